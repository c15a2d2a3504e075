"""List every key of a DeepSpeed configuration with its translation, for the importer, its documentation and its test.

References:
    DeepSpeed's documentation, "Configuration JSON"; keys and defaults of version 0.19.6.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from zerojax.deepspeed.expressions import Code
from zerojax.deepspeed.schema import ANY, BLOCK, TEXT, TRUTH, TRUTH_OR_NULL, Rule, integer, number, word


@dataclasses.dataclass(frozen=True)
class Key:
    """The translation of one key.

    A `"mapped"` key has a counterpart in zerojax. A `"not needed"` key does not change the training. A `"not there"`
    key has no counterpart and is ignored. A `"refused"` key would change the training, so asking for it is an error.
    """

    fate: Literal["mapped", "not needed", "not there", "refused"]
    how: str  # the counterpart, or why there is none
    rule: Rule = ANY  # which values the key takes
    # Returns the arguments that a value contributes, such as `{"Wire.gather": "int8"}`. Arguments of None are left out.
    gives: Callable[[Any], Mapping[str, Any]] = lambda value: {}
    open: bool = False  # whether the key takes an object whose entries are not read


def argument(name: str, rule: Rule, values: Mapping[Any, Any] | None = None, how: str = "") -> Key:
    """Map a key to one argument, such as `"Wire.gather"`.

    `values` maps a value of the key to the argument. Other values contribute no argument. If `values` is None, the
    argument is the key's value. The default of `how` shows the call, such as `Wire(gather="int8")`.
    """
    gives = lambda value: {name: value if values is None else values.get(value)}
    only = repr(*values.values()).replace("'", '"') if values and len(values) == 1 else ""
    return Key("mapped", how or f"{name.replace('.', '(')}={only})", rule, gives)


def host_groups(name: str, least: int, off: tuple[int, ...]) -> Key:
    """Map a number of devices per group to a mesh, its axes, and the argument `name`, which names the inner axis."""
    mesh = lambda size: Code(f"jax.make_mesh((jax.device_count() // {size}, {size}), ('host', 'gpu'))")
    axes = {"zero_shard.axis": ("host", "gpu"), f"zero_shard.{name}": "gpu"}
    gives = lambda size: {} if size in off else {"zero_shard.mesh": mesh(size), **axes}
    return Key("mapped", f'{name}="gpu" on a mesh of ("host", "gpu")', integer(least), gives)


def asked(value: Any) -> bool:
    """Return whether a value turns on the feature of its key."""
    enabled = value.get("enabled", True) if isinstance(value, Mapping) else value
    return enabled not in (None, False, "none") and value != {}


def without_effect(fate: Literal["not needed", "not there", "refused"], table: str) -> dict[str, Key]:
    """Parse lines of keys and their shared reason. `zero.` means `zero_optimization.`, and a star marks an open key."""
    found = {}
    for line in table.strip().splitlines():
        names, how = line.split(": ", 1)
        for name in names.split():
            path = name.rstrip("*").replace("zero.", "zero_optimization.")
            found[path] = Key(fate, how, open=name.endswith("*"))
    return found


BUCKETS = "the leaves of a layer share buckets; zero_shard(bucket_bytes=) sets their size"
COMPILED = "XLA plans memory and overlap when it compiles the step; zero_shard(prefetch=) sets how early gathers start"
CHECKPOINTS = "a checkpoint stores logical leaves, so it restores at any stage and on any number of devices"
PINNED = "host memory is always pinned; Offload(chunk_bytes=) sets the size of each copy"
BUFFERS = "there are 16 buffers, each of one chunk instead of one parameter; Offload(chunk_bytes=) sets their size"
BLOCKS = "zerojax.block(fn) marks parameters that are gathered together"
EXPORT = "zerojax export writes full weights to safetensors"
LOCO = "Wire(error_feedback=True), across hosts; errors are added in full, so err_beta and resets do nothing"
ELEMENTS = "zero_shard(persist_below=), in elements"
FROZEN = 'Wire(gather="int8"), which also quantises frozen weights'
HOST_OR_DISK = 'Offload(optimizer="host" or "disk")'
PARAMS_PLACE = 'Offload(params="host" or "disk"), and with "disk" optimizer="disk"'
IN_MEMORY = 'Offload(host_bytes=) with params="disk", 4 bytes per element'
CLIPPING = "optax.clip_by_global_norm; 1.0 if not given, DeepSpeed's default since 2026-06"
COUNT = integer(1, null=True)
SCALE = number(0, 2.0**127)
FLOOR = number(0, 2.0**127, above=True)
ARGUMENTS = dataclasses.replace(BLOCK, what="an object of arguments")
TYPE = word("fp32", "fp16", "bf16", null=True)
TYPES = {"fp32": Code("jnp.float32"), "fp16": Code("jnp.float16"), "bf16": Code("jnp.bfloat16")}
DEVICE = word("none", "cpu", "nvme", null=True)

ZERO = {
    "stage": argument("zero_shard.stage", integer(0, 3)),
    "stage3_param_persistence_threshold": argument("zero_shard.persist_below", integer(0), how=ELEMENTS),
    "zero_hpz_partition_size": host_groups("params_axis", 1, off=(1,)),
    "mics_shard_size": host_groups("shard_axis", -1, off=(-1, 0)),
    "zero_quantized_weights": argument("Wire.gather", TRUTH, {True: "int8"}),
    "zero_quantized_nontrainable_weights": argument("Wire.gather", TRUTH, {True: "int8"}, FROZEN),
    "zero_quantized_gradients": argument("Wire.reduce", TRUTH, {True: "int4"}),
    "zeropp_loco_param": Key(
        "mapped", LOCO, BLOCK, lambda value: {"Wire.error_feedback": asked(value) or None}, open=True
    ),
    "cpu_offload": argument("Offload.optimizer", TRUTH_OR_NULL, {True: "host"}),
    "cpu_offload_param": argument("Offload.params", TRUTH_OR_NULL, {True: "host"}),
    "offload_param.device": argument("Offload.params", DEVICE, {"cpu": "host", "nvme": "disk"}, PARAMS_PLACE),
    "offload_param.nvme_path": argument("Offload.params_path", TEXT, how="Offload(path=)"),
    "offload_param.max_in_cpu": argument("Offload.max_in_cpu", integer(0), how=IN_MEMORY),
    "offload_optimizer.device": argument("Offload.optimizer", DEVICE, {"cpu": "host", "nvme": "disk"}, HOST_OR_DISK),
    "offload_optimizer.nvme_path": argument("Offload.path", TEXT),
    "offload_optimizer.ratio": argument("Offload.fraction", number(0, 1)),
}
TOP = {
    "train_batch_size": Key("mapped", "rows of the batch that a step is given", COUNT),
    "train_micro_batch_size_per_gpu": Key("mapped", "rows of the batch / devices / accumulate", COUNT),
    "gradient_accumulation_steps": Key("mapped", "train_step(accumulate=)", COUNT),
    "optimizer.type": Key("mapped", "an optax transformation", TEXT),
    "optimizer.params": Key("mapped", "the arguments of the transformation", ARGUMENTS),
    "scheduler.type": Key("mapped", "an optax schedule, such as zerojax.deepspeed.warmup_lr", TEXT),
    "scheduler.params": Key("mapped", "the arguments of the transformation", ARGUMENTS),
    "gradient_clipping": Key("mapped", CLIPPING, number()),
    "fp16.enabled": argument("Precision.kind", TRUTH, {True: "fp16"}, "Precision.fp16()"),
    "fp16.loss_scale": argument("Precision.loss_scale", SCALE, how="Precision(loss_scale=); 0: DynamicScale"),
    "fp16.initial_scale_power": argument("DynamicScale.initial", integer(0, 127), how="DynamicScale(initial=2**...)"),
    "fp16.loss_scale_window": argument("DynamicScale.growth_interval", integer(1)),
    "fp16.hysteresis": argument("DynamicScale.hysteresis", integer(1)),
    "fp16.min_loss_scale": argument("DynamicScale.floor", FLOOR),
    "bf16.enabled": argument("Precision.kind", TRUTH, {True: "bf16"}, "Precision.bf16()"),
    "bf16.check_grad_overflow": argument("train_step.skip_nonfinite", TRUTH, {True: True}),
    "data_types.grad_accum_dtype": argument("Precision.reduce", TYPE, TYPES),
    "communication_data_type": argument("Precision.reduce", TYPE, TYPES),
}
REFUSED = """
zero.zenflow*: ZenFlow updates parameters with gradients of earlier steps
fp16.consecutive_hysteresis: zerojax counts overflows until the scale grows
fp16.fp16_master_weights_and_grads bf16.bf16_master_weights_and_grads: Precision(master=) sets their type
bf16.bf16_optimizer_states: the optax transformation sets the types of moments (mu_dtype=)
amp*: Apex's levels have no counterpart; use fp16 or bf16
torch_autocast*: types are chosen per leaf, with Precision(keep=), not per operation
"""
NOT_THERE = """
tensor_parallel* expert_parallel*: the model states how it is divided, as in examples/parallel.py
"""
NOT_NEEDED = f"""
zero.reduce_bucket_size zero.use_multi_rank_bucket_allreduce zero.allgather_bucket_size: {BUCKETS}
zero.stage3_allgather_sequential: {BUCKETS}
zero.contiguous_gradients zero.overlap_comm zero.stage3_prefetch_bucket_size: {COMPILED}
zero.stage3_max_live_parameters zero.stage3_max_reuse_distance zero.memory_efficient_linear: {COMPILED}
zero.load_from_fp32_weights zero.elastic_checkpoint zero.pipeline_loading_checkpoint: {CHECKPOINTS}
zero.sub_group_size zero.cpu_offload_use_pin_memory: {PINNED}
zero.offload_param.pin_memory: {PINNED}
zero.offload_param.buffer_count zero.offload_param.buffer_size: {BUFFERS}
zero.offload_optimizer.buffer_count zero.offload_optimizer.pin_memory: {PINNED}
zero.leaf_module.classes zero.leaf_module.names zero.leaf_module.name_suffixes: {BLOCKS}
zero.stage3_module_granularity_threshold: {BLOCKS}
zero.stage3_gather_16bit_weights_on_model_save zero.stage3_gather_fp16_weights_on_model_save: {EXPORT}
tensorboard* wandb* csv_monitor* steps_per_print wall_clock_breakdown: zerojax.Log, and jax.profiler for traces
prescale_gradients gradient_predivide_factor: the loss computes the mean before the backward pass
zero.reduce_scatter: gradients are reduce-scattered wherever the stage shards them
zero.allgather_partitions: updated parameters are all-gathered together
zero.stage3_model_persistence_threshold: whether a parameter persists is decided per leaf
zero.stage3_use_all_reduce_for_fetch_params: parameters are all-gathered
zero.ignore_unused_parameters: a parameter that the loss does not use has a gradient of zeros, as in JAX
zero.legacy_stage1: there is only one implementation of stage 1
zero.round_robin_gradients: all shards have the same size
zero.mics_hierarchical_params_gather: gathers stay within a host
zero.override_module_apply: modules are not changed
zero.log_trace_cache_warnings: parameters are gathered in the order of the traced loss
zero.enable_sanity_checks: zerojax.check compares a step with the contract of its stage
zero.save_muon_momentum_buffer_in_memory: optimizer state is on the device unless it is offloaded
zero.offload_optimizer.pipeline_read: chunks are always read while other chunks are updated
zero.offload_optimizer.pipeline_write: chunks are always written while other chunks are updated
zero.offload_optimizer.fast_init: optimizer state is created group by group where it is kept
zero.offload_optimizer.super_offload: Offload(update=) measures whether the host or the device is faster
zero.offload_optimizer.cpuadam_cores_perc: XLA uses its own threads for updates on the host
optimizer.legacy_fusion: XLA fuses the update
fp16.auto_cast: Precision casts the batch
bf16.immediate_grad_update: gradients are summed in Precision(reduce=) as they are computed
gradient_allreduce_op: gradients are always averaged over all rows
sparse_gradients: gradients are dense, with equal values
activation_checkpointing*: jax.checkpoint in the model, zerojax.offload.remat_policy
checkpoint*: zerojax.checkpoint.Checkpointer, which writes while training continues
aio*: files are written in large blocks: Offload(chunk_bytes=)
compile*: every step is compiled
elasticity*: a checkpoint restores on any number of devices; you choose the batch size
autotuning*: zerojax.plan.fit finds the stage, microbatches and axes from shapes
flops_profiler*: zerojax.plan counts FLOPs and the least time of a step
comms_logger*: zerojax.collectives(compiled) lists all collectives
zero_allow_untested_optimizer: any optax transformation is exact
zero_force_ds_cpu_optimizer: Offload(update=) chooses where the update runs
dump_state: print(state.plan)
seed: random functions take explicit keys
"""
KEYS: Mapping[str, Key] = MappingProxyType(
    {
        **TOP,
        **{f"zero_optimization.{name}": key for name, key in ZERO.items()},
        **without_effect("refused", REFUSED),
        **without_effect("not there", NOT_THERE),
        **without_effect("not needed", NOT_NEEDED),
    }
)
