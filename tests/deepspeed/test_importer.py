"""DeepSpeed's configurations: every key has a fate, what is printed runs, and trains as DeepSpeed documents it."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import quick_or_slow
from typer.testing import CliRunner

import zerojax
from zerojax import DynamicScale, Offload, Precision, Wire, from_deepspeed, zero_shard
from zerojax.cli import app
from zerojax.deepspeed import warmup_cosine_lr, warmup_decay_lr, warmup_lr
from zerojax.deepspeed.keys import KEYS

# Of DeepSpeed 0.19.6, read from its documentation and defaults: every key it knows, those below open ones left out.
ZERO = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint zenflow sub_group_size
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module.classes leaf_module.names
leaf_module.name_suffixes cpu_offload cpu_offload_param cpu_offload_use_pin_memory
stage3_gather_fp16_weights_on_model_save offload_param.device offload_param.nvme_path offload_param.buffer_count
offload_param.buffer_size offload_param.max_in_cpu offload_param.pin_memory offload_optimizer.device
offload_optimizer.nvme_path offload_optimizer.buffer_count offload_optimizer.pin_memory offload_optimizer.pipeline_read
offload_optimizer.pipeline_write offload_optimizer.fast_init offload_optimizer.ratio offload_optimizer.super_offload
offload_optimizer.cpuadam_cores_perc
""".split()
ZENFLOW = """
topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds
pt_reserved_cores_perc
""".split()
TOP = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer.type optimizer.params
scheduler.type scheduler.params fp16.enabled bf16.enabled amp torch_autocast data_types.grad_accum_dtype
gradient_clipping communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor
sparse_gradients activation_checkpointing checkpoint aio compile tensor_parallel expert_parallel elasticity
autotuning flops_profiler comms_logger tensorboard wandb csv_monitor zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown dump_state seed
""".split()
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}}


def test_every_key_has_a_fate():
    from zerojax.deepspeed.importer import key_of

    for name in [*TOP, *(f"zero_optimization.{name}" for name in ZERO)]:
        assert name in KEYS
    for name in ZENFLOW:
        assert key_of(f"zero_optimization.zenflow.{name}").fate == "refused"
    for name, key in KEYS.items():
        assert key.fate in ("mapped", "not needed", "not there", "refused")
        assert key.how, name


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
    for name, key in KEYS.items():
        short = name.removeprefix("zero_optimization.")
        assert f"| `{short}` | {key.fate} | {key.how} |" in page, name


def params():
    return {"w": jax.random.normal(jax.random.key(0), (16, 16)) / 4, "b": jnp.zeros(16)}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"].astype(batch.dtype)) + params["b"]).astype(jnp.float32) ** 2)


def trained(found, steps=3, **changes):
    tx = zero_shard(found.optimizer, **found.options | changes)
    state, step = tx.create(params()), tx.train_step(loss, **found.step_options)
    for i in range(steps):
        state, metrics = step(state, jax.random.normal(jax.random.key(i), (found.rows or 16, 16)))
    assert np.isfinite(metrics["loss"])
    return tx.unshard(state.params)


def by_hand(tx, steps=3, rows=16):
    values, state = params(), tx.init(params())
    for i in range(steps):
        grads = jax.grad(loss)(values, jax.random.normal(jax.random.key(i), (rows, 16)))
        updates, state = tx.update(grads, state, values)
        values = optax.apply_updates(values, updates)
    return values


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_accumulation_and_clipping():
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.01}
    config |= {"optimizer": ADAMW, "zero_optimization": {"stage": 2, "stage3_param_persistence_threshold": 64}}
    found = from_deepspeed(config, devices=8)
    assert found.rows == 32
    assert found.step_options == {"accumulate": 2}
    assert found.options == {"stage": 2, "persist_below": 64}
    adam = optax.adamw(1e-2, b1=0.8, b2=0.99, eps=1e-7, weight_decay=0.1)
    assert_close(trained(found), by_hand(optax.chain(optax.clip_by_global_norm(0.01), adam), rows=32))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "Adam", "params": {"weight_decay": 0.1}}, optax.adamw(1e-3, weight_decay=0.1)),
        (
            {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}},
            optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)),
        ),
        ({"type": "AdamW"}, optax.adamw(1e-3, weight_decay=0.0)),
        ({"type": "Lion", "params": {"lr": 1e-4}}, optax.lion(1e-4, b1=0.9, b2=0.99, weight_decay=0.0)),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
            optax.sgd(0.1, momentum=0.9, nesterov=True),
        ),
    ],
)
def test_optimizers_are_deepspeeds(given, expected):
    found = from_deepspeed({"optimizer": given, "gradient_clipping": 0}).optimizer
    assert_close(by_hand(found), by_hand(expected))


def test_schedules_are_those_of_its_documentation():
    """The rate of update t is that of step t - 1."""
    log = lambda step: math.log(step + 1) / math.log(10)
    for t in range(1, 60):
        step = t - 1
        rising = 0.1 + 0.9 * (log(step) if step < 10 else 1.0)
        assert warmup_lr(1.0, min_lr=0.1, warmup_steps=10)(t) == pytest.approx(rising, rel=1e-5)
        linear = step / 10 if step < 10 else max(0.0, (50 - step) / 40)
        assert warmup_decay_lr(1.0, total_steps=50, warmup_steps=10, log=False)(t) == pytest.approx(linear, abs=1e-6)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 9) / 40)) / 2
        expected = 2.0 * (0.2 + 0.8 * log(step) if step < 10 else cosine)
        found = warmup_cosine_lr(2.0, total_steps=50, warmup_steps=10, warmup_min_ratio=0.2, cos_min_ratio=0.1)(t)
        assert found == pytest.approx(expected, rel=1e-4)
    assert warmup_lr(1.0, min_lr=0.1, warmup_steps=10)(0) == pytest.approx(0.1)


CONFIGS = {
    "ZeRO-2, bf16": (
        {
            "train_batch_size": 16,
            "bf16": {"enabled": True},
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
            "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
            "steps_per_print": 10,
        },
        {"stage": 2, "precision": Precision.bf16()},
    ),
    "ZeRO-3, offload to the CPU": (
        {
            "optimizer": ADAMW,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu"},
            },
        },
        {"stage": 3, "precision": Precision.bf16(), "offload": Offload(optimizer="host", params="host")},
    ),
    "fp16": (
        {
            "optimizer": {"type": "Adam"},
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "initial_scale_power": 8,
                "loss_scale_window": 7,
                "hysteresis": 3,
            },
            "zero_optimization": {"stage": 1},
        },
        {
            "stage": 1,
            "precision": Precision.fp16(
                loss_scale=DynamicScale(initial=256.0, growth_interval=7, hysteresis=3, floor=1.0)
            ),
        },
    ),
    "ZeRO++": (
        {
            "optimizer": {"type": "Adam"},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 4,
                "zero_quantized_weights": True,
                "zero_quantized_gradients": True,
            },
        },
        {
            "stage": 3,
            "axis": ("host", "gpu"),
            "params_axis": "gpu",
            "precision": Precision.fp32(),
            "wire": Wire(gather="int8", reduce="int4"),
        },
    ),
    "ZeRO++ with LoCo": (
        {
            "optimizer": {"type": "Adam"},
            "zero_optimization": {
                "stage": 3,
                "zero_hpz_partition_size": 4,
                "zero_quantized_gradients": True,
                "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
            },
        },
        {
            "stage": 3,
            "axis": ("host", "gpu"),
            "params_axis": "gpu",
            "wire": Wire(reduce="int4", error_feedback=True),
        },
    ),
    "MiCS": (
        {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 3, "mics_shard_size": 2}},
        {"stage": 3, "axis": ("host", "gpu"), "shard_axis": "gpu"},
    ),
}


@pytest.mark.parametrize("name", quick_or_slow([(name,) for name in CONFIGS], [("ZeRO++",)]))
def test_what_is_printed_runs_and_trains(name):
    config, expected = CONFIGS[name]
    found = from_deepspeed(config)
    names = {}
    exec(str(found), names)
    options = dict(names["options"])
    mesh = options.pop("mesh", None)
    assert options == expected
    if mesh is not None:
        assert dict(mesh.shape)["gpu"] == config["zero_optimization"].get("zero_hpz_partition_size", 2)
    trained(found, persist_below=32)


@pytest.mark.slow
def test_nvme(tmp_path):
    offload = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 0.5, "pipeline_read": True}
    found = from_deepspeed({"optimizer": ADAMW, "zero_optimization": {"stage": 1, "offload_optimizer": offload}})
    assert found.options["offload"] == Offload(optimizer="disk", path=str(tmp_path), fraction=0.5)
    trained(found)


def test_parameters_on_nvme(tmp_path):
    kept = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 1000, "buffer_count": 5, "buffer_size": 1e8}
    found = from_deepspeed({"optimizer": ADAMW, "zero_optimization": {"stage": 3, "offload_param": kept}})
    assert found.options["offload"] == Offload(params="disk", optimizer="disk", path=str(tmp_path), host_bytes=4000)
    assert "offload_param.buffer_count = 5: not needed: there are 16 buffers, each of one chunk" in str(found)


def test_each_key_is_accounted_for():
    found = from_deepspeed({"optimizer": {"type": "Adam"}, "wall_clock_breakdown": True, "aio": {"block_size": 1}})
    text = str(found)
    assert "# wall_clock_breakdown = true: not needed: zerojax.Log" in text
    assert '# aio = {"block_size": 1}: not needed' in text
    assert "# gradient_clipping is not given: 1.0" in text
    assert "optax.clip_by_global_norm(1.0)" in text
    assert text.startswith("import optax\n\nimport zerojax\n\noptimizer = ")
    config = {"optimizer": ADAMW, "scheduler": {"type": "WarmupLR"}}
    assert "# optimizer.params.lr is not used, as in DeepSpeed: the schedule goes to" in str(from_deepspeed(config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stagee": 3}}, r"zero_optimization.stagee is no key .* mean zero_optimization.stage\?"),
        ({"gradient_cliping": 1}, "Do you mean gradient_clipping"),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}},
            r"optimizer.params.lr is \"auto\".*auto=\{'optimizer",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, "compressed to one bit"),
        ({"optimizer": {"type": "Lamb"}}, "trust ratio is clamped"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad"),
        ({"optimizer": {"type": "Adam", "params": {"beta": 1}}}, "optimizer.params.beta has no counterpart"),
        ({}, "names no optimizer"),
        ({"optimizer": ADAMW, "scheduler": {"type": "OneCycle"}}, "of DeepSpeed's schedules there are"),
        ({"optimizer": ADAMW, "scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps"),
        ({"optimizer": ADAMW, "amp": {"enabled": True}}, "amp=.* has no counterpart here: Apex"),
        ({"optimizer": ADAMW, "zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "gradients of earlier steps"),
        ({"optimizer": ADAMW, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both decide kind of Precision"),
        (
            {
                "optimizer": ADAMW,
                "zero_optimization": {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}},
            },
            "Give zero_hpz_partition_size too",
        ),
        ({"optimizer": ADAMW, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, "devices=8"),
    ],
)
def test_what_is_no_configuration_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        from_deepspeed(config)


def test_batch_sizes_follow_from_each_other():
    config = {"optimizer": ADAMW, "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}
    assert from_deepspeed(config, devices=8).step_options == {"accumulate": 4}
    with pytest.raises(ValueError, match=r"train_batch_size=64 is not 2 rows x 3 microbatches x 8 devices"):
        from_deepspeed(config | {"gradient_accumulation_steps": 3}, devices=8)
    with pytest.raises(ValueError, match=r"no multiple of 2 rows on each of 5"):
        from_deepspeed(config, devices=5)


def test_disabled_parts_ask_for_nothing():
    config = {"optimizer": ADAMW, "amp": {"enabled": False}, "fp16": {"enabled": False}, "bf16": {"enabled": False}}
    config["zero_optimization"] = {"stage": 3, "offload_param": None, "offload_optimizer": {"device": "none"}}
    assert from_deepspeed(config).options == {"stage": 3}
    for groups in (-1, 0):
        config["zero_optimization"] = {"mics_shard_size": groups, "zero_hpz_partition_size": 1, "zeropp_loco_param": {}}
        assert from_deepspeed(config).options == {"stage": 0}


def test_defaults_are_deepspeeds():
    scale = DynamicScale(initial=2.0**16, growth_interval=1000, hysteresis=2, floor=1.0)
    found = from_deepspeed({"optimizer": ADAMW, "fp16": {"enabled": True}})
    assert found.options["precision"] == Precision.fp16(loss_scale=scale)
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}
    printed = from_deepspeed({"optimizer": ADAMW, "scheduler": cosine}).source
    assert "warmup_cosine_lr(0.01, log=True, warmup_steps=1000, total_steps=10, warmup_min_ratio=0.0" in printed
    assert "cos_min_ratio=0.0001" in printed


@pytest.mark.parametrize(("name", "dtype"), [("fp32", jnp.float32), ("fp16", jnp.float16), ("bf16", jnp.bfloat16)])
def test_gradients_are_reduced_in_the_type_of_either_key(name, dtype):
    for config in ({"communication_data_type": name}, {"data_types": {"grad_accum_dtype": name}}):
        assert from_deepspeed({"optimizer": ADAMW, **config}).options["precision"] == Precision.fp32(reduce=dtype)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"communication_data_type": "fp16", "data_types": {"grad_accum_dtype": "fp32"}}, "decide reduce of Precision"),
        ({"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 2}}, "in two ways. Give one"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "above the initial scale"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "Give nvme_path"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "Give nvme_path"),
        (
            {
                "zero_optimization": {
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                    "offload_optimizer": {"device": "cpu"},
                }
            },
            'Give "nvme" for both',
        ),
        (
            {
                "zero_optimization": {
                    "offload_param": {"device": "nvme", "nvme_path": "/a"},
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
                }
            },
            "one folder for both",
        ),
    ],
)
def test_contradictions_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        from_deepspeed({"optimizer": ADAMW, **config})


def test_the_command(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "seed": 3}))
    done = CliRunner().invoke(app, ["deepspeed", str(file), "--auto", "optimizer.params.lr=3e-4"])
    assert done.exit_code == 0, done.output
    assert "optax.adamw(0.0003, b1=0.9" in done.output
    refused = CliRunner().invoke(app, ["deepspeed", str(file)])
    assert refused.exit_code == 2
    assert re.search(r'optimizer.params.lr is "auto"', refused.output)
    assert zerojax.deepspeed.from_deepspeed is from_deepspeed
