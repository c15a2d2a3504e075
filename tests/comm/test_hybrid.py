"""Hybrid sharding: within a host, and over hosts replicated (HSDP, MiCS) or divided further (parameters inside)."""

import functools
import shutil

import constructs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import fraction, mesh_of, quick_or_slow
from flat_options import tuned
from models import awkward_batches, awkward_loss, awkward_params, floats_only

import zerojax.offload
from zerojax import Offload, Precision, Tuning, check, collectives, estimate, plan, report, zero_shard
from zerojax.inspect.compiled_collectives import CompiledCollectives

AXES, BELOW = ("host", "gpu"), 50
OPTIMIZERS = {
    "adamw": floats_only(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))),
    "clip-adafactor": floats_only(optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2, 4))),
}
WAYS = {"shards": {"shard_axis": "gpu"}, "params": {"params_axis": "gpu"}, "all": {}}


def zero(stage=3, name="adamw", way="shards", **options):
    options = {"persist_below": BELOW} | WAYS[way] | options
    return zero_shard(OPTIMIZERS.get(name, name), stage=stage, mesh=mesh_of(2, 4), axis=AXES, **tuned(**options))


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


VIEWS = ("global", "device")
QUICK = [(3, "params", "global", "adamw")]
CASES = [
    (1, "shards", "device", "clip-adafactor"),
    (3, "all", "global", "adamw"),
    (2, "shards", "global", "adamw"),
    (3, "shards", "device", "adamw"),
]


@pytest.mark.parametrize(("stage", "way", "view", "name"), quick_or_slow([*QUICK, *CASES], QUICK))
def test_it_trains_as_on_one_device(stage, way, view, name):
    accumulate = 1 + (stage == 1)  # For microbatches at stage 3, see below.
    tx = zero(stage, name, way, view=view)
    assert_same(trained(tx, accumulate=accumulate), on_one_device(name, accumulate))


# what is scanned, stacked, joined, sliced, or summed by the compiler before it is reduced
SHAPES_OF_LOSSES = "scan_everything stacked_layers custom_vjp_in_scan penalty scan_same_stack_twice remat".split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "view"),
    [*fraction(2, SHAPES_OF_LOSSES, ("shards", "params"), VIEWS), ("stacked_layers", "params", "device")],
)
def test_every_shape_of_a_loss_is_differentiated_as_on_one_device(name, way, view):
    """In two microbatches, whose gradients are reduced across hosts once."""
    loss, params = constructs.TABLE[name], constructs.make_params()
    rows = jax.random.normal(jax.random.key(9), (8, 2, 3, 8))
    both = lambda p: (loss(p, rows[:, 0].reshape(24, 8)) + loss(p, rows[:, 1].reshape(24, 8))) / 2
    tx = zero(name=optax.sgd(1.0), way=way, view=view, persist_below=4)
    state, metrics = tx.train_step(loss, accumulate=2)(tx.create(params), rows.reshape(48, 8))
    value, grads = jax.jit(jax.value_and_grad(both))(params)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for old, new, grad in zip(*map(jax.tree.leaves, (params, tx.unshard(state.params), grads)), strict=True):
        np.testing.assert_allclose(old - new, grad, rtol=2e-5, atol=2e-5 * max(1e-2, float(np.abs(grad).max())))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "view"), [("shards", "global"), ("params", "device")])
def test_microbatches_are_reduced_across_hosts_once(way, view):
    def across(accumulate):
        tx = zero(way=way, view=view)
        step, state = tx.train_step(awkward_loss, accumulate=accumulate), tx.create(awkward_params())
        moved = collectives(step.lower(state, batches(accumulate)[0]).compile())
        kinds = ("all-reduce", "reduce-scatter", "all-gather")
        return sum(c.elements * c.times for c in moved.of(*kinds) if c.group == (0, 4))

    assert across(4) == across(2) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "where"),
    [("shards", "host update"), ("shards", "params"), ("params", "disk"), ("params", "host"), ("all", "host update")],
)
def test_what_is_offloaded_trains_as_on_the_device(way, where, tmp_path):
    offload = {
        "host": Offload(optimizer="host", update="device", chunk_bytes=400),
        "host update": Offload(optimizer="host", update="host", chunk_bytes=400),
        "disk": Offload(optimizer="disk", path=tmp_path / "state", chunk_bytes=400),
        "params": Offload(optimizer="host", params="host", chunk_bytes=400),
    }[where]
    found = trained(zero(way=way, offload=offload))
    zerojax.offload.close(found[2])
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    assert_same(found, on_one_device("adamw"))


@pytest.mark.slow
def test_in_mixed_precision_it_trains_as_over_all_devices():
    precision = Precision.bf16()
    found, expected = (trained(zero(way=name, precision=precision)) for name in ("params", "all"))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-2)  # 8 bits, summed in another order


PADDED = {"w": 16 * 24, "tied": 24 * 13, "frozen": 8 * 13, "uneven": 13 * 8}


def held_by(state):
    return tuple(report(state).bytes[part] for part in ("params", "opt_state"))


@pytest.mark.parametrize(
    ("stage", "way"), quick_or_slow([(1, "shards"), (2, "shards"), (3, "shards"), (3, "params")], [(3, "params")])
)
def test_a_device_holds_what_one_of_a_single_host_does_or_its_part_of_the_state(stage, way):
    state = zero(stage, way=way).create(awkward_params())
    rows = estimate(
        awkward_params(), tx=OPTIMIZERS["adamw"], devices="h200:2x4", **tuned(persist_below=BELOW, **WAYS[way])
    )
    assert (rows[stage].params, rows[stage].opt_state) == held_by(state)
    if way == "shards":
        one_host = zero_shard(OPTIMIZERS["adamw"], stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=BELOW))
        alone = report(one_host.create(awkward_params()))
        assert report(state).bytes == alone.bytes
        assert set(report(state).per_device.values()) == set(alone.per_device.values())
    else:
        assert held_by(state)[1] == held_by(zero(way="all").create(awkward_params()))[1]
        # a quarter of each parameter that is sharded, padded for eighths; the others in full
        assert held_by(state)[0] == 4 * (sum(PADDED.values()) // 4 + 4 + 3 + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "view"), [("shards", "global"), ("shards", "device"), ("params", "global"), ("params", "device")]
)
def test_only_shards_of_gradients_cross_hosts(way, view):
    """All-reduced, or reduce-scattered; a quarter of the parameters is then gathered once, after the update."""
    tx = zero(way=way, view=view)
    made = tx.train_step(awkward_loss), tx.create(awkward_params()), awkward_batches(1)[0]
    moved = collectives(made[0].lower(*made[1:]).compile())
    inside, across, everywhere = (0, 1, 2, 3), (0, 4), tuple(range(8))
    count = lambda kind, group: sum(c.elements for c in moved.of(kind) if tuple(sorted(c.group)) == group)
    within = count("reduce-scatter", inside)  # padding included
    if way == "shards":
        assert {c.group for c in moved.of("all-gather", "reduce-scatter")} == {inside}
        assert 0 < count("all-reduce", across) <= within / 4
    else:
        assert count("reduce-scatter", across) == within // 4 > 0
        assert count("all-gather", across) == sum(PADDED.values()) // 4
        groups = {tuple(sorted(c.group)) for c in moved.of("all-gather", "reduce-scatter")}
        assert groups == {inside, across, everywhere}
        assert count("all-reduce", across) == 0
    # the loss, and what is persistent
    assert count("all-reduce", everywhere) <= 20
    assert count("reduce-scatter", everywhere) + count("all-gather", everywhere) <= 40
    assert view == "device" or check(*made).ok


@pytest.mark.parametrize(
    ("stage", "way"),
    [
        (1, "shards"),
        pytest.param(1, "all", marks=pytest.mark.slow),
        pytest.param(3, "shards", marks=pytest.mark.slow),
        (3, "params"),
    ],
)
def test_bytes_sent_are_those_of_the_compiled_step(stage, way):
    def loss(params, x):
        for w in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)
        return x.sum()

    params = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 4
    tx = zero(stage, optax.adam(1e-3), way)
    rows = jax.ShapeDtypeStruct((8, 64), np.float32)
    moved = collectives(tx.train_step(loss).lower(tx.create(params), rows).compile())
    row = estimate(params, devices="h200:2x4", **tuned(persist_below=BELOW, **WAYS[way]))[stage]
    if stage < 3:  # of the gathers of stage 3 the compiler for CPUs may drop some
        assert moved.moved().sent == pytest.approx(row.sent, abs=200)  # and scalars
    between = CompiledCollectives(c for c in moved if {device // 4 for device in c.group} == {0, 1})
    assert between.moved().sent == pytest.approx(row.across, abs=200)


@aot
def test_a_plan_tells_what_crosses_hosts():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), np.float32)}
    step, rows = zero().train_step(lambda p, x: (x @ p["w"]).sum()), jax.ShapeDtypeStruct((16, 1024), np.float32)
    found = plan(step, zero().create(params), rows, topology="h200:2x8")
    # each device all-reduces its eighth of the gradient with one of the other host, which sends half of it twice
    assert found.across_hosts == pytest.approx(1024**2 / 8 * 4, rel=0.01)
    assert "all-reduce f32, hosts" in found.details
    alone = plan(step, zero().create(params), rows, topology="h200:8")
    assert alone.across_hosts == 0
    assert "hosts" not in str(alone)


def test_the_axes_are_said():
    said = {way: repr(zero(way=way).create(awkward_params())).partition("\n")[0] for way in WAYS}
    assert said == {
        "shards": "ZeroState(stage 3 over axis 'gpu', replicated over axis 'host', 8 devices)",
        "params": "ZeroState(stage 3 over axes 'gpu' and 'host', parameters over axis 'gpu', 8 devices)",
        "all": "ZeroState(stage 3 over axes 'host' and 'gpu', 8 devices)",
    }


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: zero(way="all", shard_axis=()), ValueError, r"shard_axis=\(\) must name at least one mesh axis"),
        (lambda: zero(way="all", shard_axis=0), TypeError, "shard_axis= names one mesh axis"),
        (
            lambda: estimate(awkward_params(), devices=8, tuning=Tuning(params_axis="gpu")),
            ValueError,
            "params_axis names axis 'gpu', over which no rows are divided",
        ),
        (lambda: estimate(awkward_params(), devices="h200:x"), ValueError, "Unknown topology 'h200:x'"),
        (lambda: estimate(awkward_params(), tx=zero()), TypeError, "Give the transformation that zero_shard wraps"),
    ],
)
def test_what_names_no_axis_or_cannot_be_laid_out_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
