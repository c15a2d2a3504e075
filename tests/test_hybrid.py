"""Hybrid sharding: shards within a host, replicated over hosts (HSDP, MiCS)."""

import functools
import shutil

import jax
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from jax.sharding import AxisType
from models import awkward_batches, awkward_loss, awkward_params, floats_only

import zerojax.offload
from zerojax import Offload, Precision, check, collectives, estimate, plan, report, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.gpus.topology import installed

AXES, BELOW = ("host", "gpu"), 50
OPTIMIZERS = {
    "adamw": floats_only(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))),
    "clip-adafactor": floats_only(optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2, 4))),
}


def zero(stage=3, name="adamw", shard_axis="gpu", **options):
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
    return zero_shard(
        OPTIMIZERS[name], stage=stage, mesh=mesh, axis=AXES, shard_axis=shard_axis, persist_below=BELOW, **options
    )


def trained(tx, **options):
    """`(losses and norms, parameters, state, step)` after three steps."""
    state, step = tx.create(awkward_params()), tx.train_step(awkward_loss, **options)
    metrics = []
    for batch in batches(options.get("accumulate", 1)):
        state, found = step(state, batch)
        metrics.append((float(found["loss"]), float(found["grad_norm"])))
    return metrics, jax.device_get(tx.unshard(state.params)), state, step


def batches(accumulate=1):
    """Rows for every device and microbatch: each batch so many times."""
    return [jax.tree.map(lambda x: np.concatenate([x] * accumulate), batch) for batch in awkward_batches(3)]


@functools.cache
def on_one_device(name, accumulate=1):
    tx = zero_shard(OPTIMIZERS[name], stage=0, mesh=mesh_of(1))
    return trained(tx, accumulate=accumulate)[:2]


def assert_same(found, expected):
    # sums over devices are made in another order
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=4e-6), found[1], expected[1])


GRID = [(stage, view, name) for stage in range(4) for view in ("global", "device") for name in OPTIMIZERS]


QUICK = [(3, "device", "clip-adafactor")]


@pytest.mark.parametrize(("stage", "view", "name"), quick_or_slow(GRID, QUICK))
def test_it_trains_as_on_one_device(stage, view, name):
    assert_same(trained(zero(stage, name, view=view)), on_one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize("view", ["global", "device"])
@pytest.mark.parametrize("stage", [1, 3])
def test_microbatches_are_those_of_one_device(stage, view):
    assert_same(trained(zero(stage, view=view), accumulate=2), on_one_device("adamw", 2))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "host update", "disk", "params"])
def test_what_is_offloaded_trains_as_on_the_device(where, tmp_path):
    offload = {
        "host": Offload(optimizer="host", update="device", chunk_bytes=400),
        "host update": Offload(optimizer="host", update="host", chunk_bytes=400),
        "disk": Offload(optimizer="disk", path=tmp_path / "state", chunk_bytes=400),
        "params": Offload(optimizer="host", params="host", chunk_bytes=400),
    }[where]
    found = trained(zero(offload=offload))
    zerojax.offload.close(found[2])
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    assert_same(found, on_one_device("adamw"))


@pytest.mark.slow
def test_in_mixed_precision_it_trains_as_over_all_devices():
    precision = Precision.bf16()
    found, expected = (trained(zero(shard_axis=axis, precision=precision)) for axis in ("gpu", None))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-2)  # 8 bits, summed in another order


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_device_holds_what_one_of_a_single_host_does(stage):
    state = zero(stage).create(awkward_params())
    alone = zero_shard(OPTIMIZERS["adamw"], stage=stage, mesh=mesh_of(4), persist_below=BELOW)
    one_host = alone.create(awkward_params())
    assert report(state).bytes == report(one_host).bytes
    assert set(report(state).per_device.values()) == set(report(one_host).per_device.values())
    on_paper = estimate(awkward_params(), tx=OPTIMIZERS["adamw"], devices=8, replicas=2, persist_below=BELOW)[stage]
    assert (on_paper.params, on_paper.opt_state) == tuple(report(state).bytes[part] for part in ("params", "opt_state"))


@pytest.mark.parametrize("view", ["global", pytest.param("device", marks=pytest.mark.slow)])
def test_only_shards_of_gradients_cross_hosts(view):
    tx = zero(view=view)
    compiled = tx.train_step(awkward_loss).lower(tx.create(awkward_params()), awkward_batches(1)[0]).compile()
    moved = collectives(compiled)
    assert {c.group for c in moved.of("all-gather", "reduce-scatter")} == {(0, 1, 2, 3)}
    across = sum(c.elements for c in moved.of("all-reduce") if c.group == (0, 4))
    scattered = moved.moved("reduce-scatter").elements  # padding included
    assert 0 < across <= scattered / 4
    # the loss, and what is persistent
    assert sum(c.elements for c in moved.of("all-reduce") if c.group_size == 8) <= 20
    assert view == "device" or check(tx, awkward_loss, awkward_params(), awkward_batches(1)[0]).ok


def test_bytes_sent_are_those_of_the_compiled_step():
    params = {"w": jax.ShapeDtypeStruct((64, 64), np.float32)}
    tx = zero(1)
    step = tx.train_step(lambda p, x: (x @ p["w"]).sum())
    moved = collectives(step.lower(tx.create(params), jax.ShapeDtypeStruct((8, 64), np.float32)).compile())
    on_paper = estimate(params, tx=OPTIMIZERS["adamw"], devices=8, replicas=2, persist_below=BELOW)[1].sent
    assert moved.moved().sent == pytest.approx(on_paper, abs=100)  # and scalars


@pytest.mark.slow
@pytest.mark.parametrize("other", [None, "gpu", "host"])
def test_a_checkpoint_is_restored_over_other_axes(other, tmp_path):
    _, params, state, _ = trained(zero())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        tx = zero(shard_axis=other)
        restored = checkpoints.restore(tx.create(awkward_params())).state
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(tx.unshard(restored.params)), params)


@pytest.mark.skipif(not installed() or jax.__version_info__ < (0, 11), reason="needs the extra aot, of the newest jax")
def test_a_plan_tells_what_crosses_hosts():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), np.float32)}
    step, rows = zero().train_step(lambda p, x: (x @ p["w"]).sum()), jax.ShapeDtypeStruct((16, 1024), np.float32)
    found = plan(step, zero().create(params), rows, topology="h200:2x8")
    # each device all-reduces its eighth of the gradient with one of the other host, which sends half of it twice
    assert found.across_hosts == pytest.approx(1024**2 / 8 * 4, rel=0.01)
    assert "all-reduce f32, hosts" in str(found)
    alone = plan(step, zero().create(params), rows, topology="h200:8")
    assert alone.across_hosts == 0
    assert "hosts" not in str(alone)


def test_the_axes_are_said():
    assert repr(zero().create(awkward_params())).startswith(
        "ZeroState(stage 3 over axis 'gpu', replicated over axis 'host', 8 devices)"
    )


@pytest.mark.parametrize(
    ("axis", "error", "message"),
    [
        ("model", ValueError, "shard_axis names axis 'model', over which no rows are divided"),
        ((), ValueError, r"shard_axis=\(\) must name at least one mesh axis"),
        (0, TypeError, "shard_axis= names one mesh axis"),
    ],
)
def test_axes_that_divide_no_rows_are_refused(axis, error, message):
    with pytest.raises(error, match=message):
        zero(shard_axis=axis)


def test_an_estimate_refuses_what_it_cannot_divide():
    with pytest.raises(ValueError, match="replicas=3 does not divide 8 devices"):
        estimate(awkward_params(), devices=8, replicas=3)
    with pytest.raises(TypeError, match="give the transformation that zero_shard wraps"):
        estimate(awkward_params(), tx=zero())
