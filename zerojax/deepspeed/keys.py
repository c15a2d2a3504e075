"""Every key of a DeepSpeed configuration, and what becomes of it: one table for the importer, its page and its test.

References:
    DeepSpeed's documentation, "Configuration JSON"; keys and defaults of version 0.19.6.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, Literal

from zerojax.deepspeed.schema import ANY, BLOCK, TEXT, TRUTH, TRUTH_OR_NULL, Rule, integer, number, word

Fate = Literal["mapped", "not needed", "not there"]


@dataclasses.dataclass(frozen=True)
class Key:
    """What becomes of one key.

    Attributes:
        fate: `"mapped"` to something here; `"not needed"`; `"not there"` yet, or on purpose.
        how: What it is mapped to, or why it is not.
        off: Values with which it asks for nothing.
        stops: Whether a run that asks for it would compute something else here, so that it is refused.
        open: Whether anything may be below it, which is not read.
        rule: Which values it takes.
    """

    fate: Fate
    how: str
    off: tuple[Any, ...] = (None, False, "none")
    stops: bool = False
    open: bool = False
    rule: Rule = ANY


def mapped(how: str, rule: Rule, off: tuple[Any, ...] = (None,), *, is_open: bool = False) -> Key:
    """Return a key with a counterpart, whose values follow a rule."""
    return Key("mapped", how, off, open=is_open, rule=rule)


def unneeded(why: str, *, is_open: bool = False) -> Key:
    """Describe a key whose purpose is met without it."""
    return Key("not needed", why, open=is_open)


def missing(why: str, *off: Any, stops: bool = False, is_open: bool = False) -> Key:
    """Describe a key without a counterpart."""
    return Key("not there", why, (None, False, "none", *off), stops, is_open)


LOCO = "Wire(error_feedback=True), across hosts; errors are added in full, whatever err_beta, and never reset"
BUCKETS = "leaves of a layer share a bucket, bounded by zero_shard(bucket_bytes=)"
COMPILED = "XLA plans memory and overlap when the step is compiled; zero_shard(prefetch=) says how far ahead"
CHECKPOINTS = "a checkpoint has logical leaves: any stage and number of devices reads it"
LOGS = "zerojax.Log, and jax.profiler for traces"
PINNED = "host memory is pinned, and chunks are streamed: Offload(chunk_bytes=)"

LARGEST_SCALE = 2.0**127
COUNT = integer(1, null=True)
DEVICE = word("none", "cpu", "nvme", null=True)
TYPE = word("fp32", "fp16", "bf16", null=True)
ARGUMENTS = dataclasses.replace(BLOCK, what="an object of arguments")

ZERO = {
    "stage": mapped("zero_shard(stage=)", integer(0, 3)),
    "contiguous_gradients": unneeded(COMPILED),
    "reduce_scatter": unneeded("gradients are reduce-scattered wherever the stage shards them"),
    "reduce_bucket_size": unneeded(BUCKETS),
    "use_multi_rank_bucket_allreduce": unneeded(BUCKETS),
    "allgather_partitions": unneeded("one all-gather of all that the update changed"),
    "allgather_bucket_size": unneeded(BUCKETS),
    "overlap_comm": unneeded(COMPILED),
    "load_from_fp32_weights": unneeded(CHECKPOINTS),
    "elastic_checkpoint": unneeded(CHECKPOINTS),
    "sub_group_size": unneeded(PINNED),
    "stage3_prefetch_bucket_size": unneeded(COMPILED),
    "stage3_param_persistence_threshold": mapped("zero_shard(persist_below=), in elements", integer(0)),
    "stage3_model_persistence_threshold": unneeded("persistence is decided leaf by leaf"),
    "stage3_max_live_parameters": unneeded(COMPILED),
    "stage3_max_reuse_distance": unneeded(COMPILED),
    "stage3_gather_16bit_weights_on_model_save": unneeded("zerojax export writes full weights, to safetensors"),
    "stage3_gather_fp16_weights_on_model_save": unneeded("zerojax export writes full weights, to safetensors"),
    "stage3_module_granularity_threshold": unneeded("zerojax.block marks what is gathered together"),
    "stage3_use_all_reduce_for_fetch_params": unneeded("parameters are all-gathered"),
    "stage3_allgather_sequential": unneeded(BUCKETS),
    "ignore_unused_parameters": unneeded("a parameter that the loss does not use has a gradient of zeros, as in JAX"),
    "legacy_stage1": unneeded("there is one stage 1"),
    "round_robin_gradients": unneeded("shards are even"),
    "zero_hpz_partition_size": mapped('params_axis="gpu" on a mesh of ("host", "gpu")', integer(1), (None, 1)),
    "zero_quantized_weights": mapped('Wire(gather="int8")', TRUTH, (None, False)),
    "zero_quantized_nontrainable_weights": mapped(
        'Wire(gather="int8"), which takes frozen weights too', TRUTH, (None, False)
    ),
    "zero_quantized_gradients": mapped('Wire(reduce="int4")', TRUTH, (None, False)),
    "zeropp_loco_param": mapped(LOCO, BLOCK, (None, False), is_open=True),
    "mics_shard_size": mapped('shard_axis="gpu" on a mesh of ("host", "gpu")', integer(-1), (None, -1, 0)),
    "mics_hierarchical_params_gather": unneeded("gathers stay within a host"),
    "memory_efficient_linear": unneeded(COMPILED),
    "pipeline_loading_checkpoint": unneeded(CHECKPOINTS),
    "override_module_apply": unneeded("modules are not changed"),
    "log_trace_cache_warnings": unneeded("the order of uses is that of the traced loss"),
    "enable_sanity_checks": unneeded("zerojax.check holds a step against its contract"),
    "save_muon_momentum_buffer_in_memory": unneeded("optimizer state is on the device unless it is offloaded"),
    "leaf_module.classes": unneeded("zerojax.block(fn) marks what is gathered at once"),
    "leaf_module.names": unneeded("zerojax.block(fn) marks what is gathered at once"),
    "leaf_module.name_suffixes": unneeded("zerojax.block(fn) marks what is gathered at once"),
    "cpu_offload": mapped('deprecated there: Offload(optimizer="host")', TRUTH_OR_NULL, (None, False)),
    "cpu_offload_param": mapped('deprecated there: Offload(params="host")', TRUTH_OR_NULL, (None, False)),
    "cpu_offload_use_pin_memory": unneeded(PINNED),
    "offload_param.device": mapped('Offload(params="host"); on NVMe there are none', DEVICE, (None, "none")),
    "offload_param.nvme_path": missing("parameters are on the device or in host memory"),
    "offload_param.buffer_count": unneeded(PINNED),
    "offload_param.buffer_size": unneeded(PINNED),
    "offload_param.max_in_cpu": unneeded("all sharded parameters are in host memory, or none is"),
    "offload_param.pin_memory": unneeded(PINNED),
    "offload_optimizer.device": mapped('Offload(optimizer="host" or "disk")', DEVICE, (None, "none")),
    "offload_optimizer.nvme_path": mapped("Offload(path=)", TEXT),
    "offload_optimizer.buffer_count": unneeded(PINNED),
    "offload_optimizer.pin_memory": unneeded(PINNED),
    "offload_optimizer.pipeline_read": unneeded("chunks are read while others are updated"),
    "offload_optimizer.pipeline_write": unneeded("chunks are written while others are updated"),
    "offload_optimizer.fast_init": unneeded("state is made group by group where it stays"),
    "offload_optimizer.ratio": mapped("Offload(fraction=)", number(0, 1), (None, 1.0)),
    "offload_optimizer.super_offload": unneeded("Offload(update=) measures whether the host or the device is faster"),
    "offload_optimizer.cpuadam_cores_perc": unneeded("XLA's threads update on the host"),
    "zenflow": missing("it updates with gradients of earlier steps", is_open=True, stops=True),
}
TOP = {
    "train_batch_size": mapped("rows of the batch that a step is given", COUNT),
    "train_micro_batch_size_per_gpu": mapped("rows of the batch / devices / accumulate", COUNT),
    "gradient_accumulation_steps": mapped("train_step(accumulate=)", COUNT),
    "optimizer.type": mapped("an optax transformation", TEXT),
    "optimizer.params": mapped("its arguments", ARGUMENTS),
    "optimizer.legacy_fusion": unneeded("XLA fuses the update"),
    "scheduler.type": mapped("an optax schedule, such as zerojax.deepspeed.warmup_lr", TEXT),
    "scheduler.params": mapped("its arguments", ARGUMENTS),
    "fp16.enabled": mapped("Precision.fp16()", TRUTH, (None, False)),
    "fp16.auto_cast": unneeded("Precision casts the batch"),
    "fp16.loss_scale": mapped("Precision(loss_scale=); 0: DynamicScale", number(0, LARGEST_SCALE)),
    "fp16.initial_scale_power": mapped("DynamicScale(initial=2**...)", integer(0, 127)),
    "fp16.loss_scale_window": mapped("DynamicScale(growth_interval=)", integer(1)),
    "fp16.hysteresis": mapped("DynamicScale(hysteresis=)", integer(1)),
    "fp16.consecutive_hysteresis": missing("overflows count until the scale grows", stops=True),
    "fp16.min_loss_scale": mapped("DynamicScale(floor=)", number(0, LARGEST_SCALE, above=True)),
    "fp16.fp16_master_weights_and_grads": missing("master weights are float32: Precision(master=)", stops=True),
    "bf16.enabled": mapped("Precision.bf16()", TRUTH, (None, False)),
    "bf16.immediate_grad_update": unneeded("gradients are summed in Precision(reduce=) as they are computed"),
    "bf16.check_grad_overflow": mapped("train_step(skip_nonfinite=True)", TRUTH, (None, False)),
    "bf16.bf16_master_weights_and_grads": missing("master weights are float32: Precision(master=)", stops=True),
    "bf16.bf16_optimizer_states": missing("moments have the type that optax gives them (mu_dtype=)", stops=True),
    "amp": missing("Apex's levels; take fp16 or bf16", is_open=True, stops=True),
    "torch_autocast": missing("types are chosen leaf by leaf: Precision(keep=)", is_open=True, stops=True),
    "data_types.grad_accum_dtype": mapped("Precision(reduce=)", TYPE),
    "gradient_clipping": mapped("optax.clip_by_global_norm; 1.0 if not given, as there since 2026-06", number(), ()),
    "communication_data_type": mapped("Precision(reduce=)", TYPE),
    "gradient_allreduce_op": unneeded("gradients are those of the mean over all rows"),
    "prescale_gradients": unneeded("the mean is taken in the loss, before the backward pass"),
    "gradient_predivide_factor": unneeded("the mean is taken in the loss, before the backward pass"),
    "sparse_gradients": unneeded("gradients are dense, and the same"),
    "activation_checkpointing": unneeded("jax.checkpoint in the model, zerojax.offload.remat_policy", is_open=True),
    "checkpoint": unneeded("zerojax.checkpoint.Checkpointer, which writes beside the training", is_open=True),
    "aio": unneeded("files are written in large blocks: Offload(chunk_bytes=)", is_open=True),
    "compile": unneeded("every step is compiled", is_open=True),
    "tensor_parallel": missing("the model says how it is divided: examples/parallel.py", is_open=True),
    "expert_parallel": missing("the model says how it is divided: examples/parallel.py", is_open=True),
    "elasticity": unneeded("a checkpoint goes on with any number of devices; the batch stays yours", is_open=True),
    "autotuning": unneeded("zerojax.plan.fit finds stage, microbatches and axes, from shapes", is_open=True),
    "flops_profiler": unneeded("zerojax.plan counts products and the least time of a step", is_open=True),
    "comms_logger": unneeded("zerojax.collectives(compiled) lists all of them", is_open=True),
    "tensorboard": unneeded(LOGS, is_open=True),
    "wandb": unneeded(LOGS, is_open=True),
    "csv_monitor": unneeded(LOGS, is_open=True),
    "zero_allow_untested_optimizer": unneeded("any optax transformation is exact"),
    "zero_force_ds_cpu_optimizer": unneeded("Offload(update=) says where the update runs"),
    "steps_per_print": unneeded(LOGS),
    "wall_clock_breakdown": unneeded(LOGS),
    "dump_state": unneeded("print(state.plan)"),
    "seed": unneeded("keys are given to what draws from them"),
}
KEYS = MappingProxyType(TOP | {f"zero_optimization.{name}": key for name, key in ZERO.items()})
