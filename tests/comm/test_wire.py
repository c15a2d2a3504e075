"""Quantised collectives: how far a value is rounded, what travels, and that all else is as without."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from engine_helpers import QUICK
from flat_options import tuned
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from zerojax import Precision, Wire, check, collectives, estimate, report, zero_shard
from zerojax.comm.collectives import LABEL
from zerojax.comm.manual import ManualCollectives
from zerojax.comm.quantised import Codec
from zerojax.config.wire import FORMATS
from zerojax.layout.leaf import Leaf

AXES = ("host", "gpu")
BLOCK = 16


# The largest error of an element, as a share of its block's largest magnitude, and of itself.
ERRORS = {"int4": (1 / 14, 0), "int8": (1 / 254, 0)}
ERRORS |= {"float8_e4m3fn": (2**-10 / 448, 1 / 16), "float8_e5m2": (1e-9, 1 / 8)}


@functools.cache
def round_trip(fmt):
    codec = Codec(fmt, BLOCK)
    return jax.jit(lambda x: codec.decode(codec.encode(x), x.shape[-1])), codec


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 20), zeros=st.floats(0, 1))
def test_an_element_is_off_by_at_most_its_formats_bound(fmt, seed, spread, zeros):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(2, 70)) * np.exp2(rng.uniform(-spread, spread, (2, 70)))).astype(np.float32)
    x[rng.random(x.shape) < zeros] = 0
    fn, _ = round_trip(fmt)
    peaks = np.abs(np.pad(x, [(0, 0), (0, 10)])).reshape(2, -1, BLOCK).max(-1).repeat(BLOCK, axis=-1)[:, :70]
    of_block, of_itself = ERRORS[fmt]
    found = np.asarray(fn(x))
    rounding = 4 * np.finfo(np.float32).eps * peaks  # of the division by the scale and the product with it
    assert (np.abs(found - x) <= of_block * peaks + of_itself * np.abs(x) + rounding).all()
    assert (found[x == 0] == 0).all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_alone(fmt, value):
    fn, codec = round_trip(fmt)
    x = np.ones((1, 70), np.float32)
    x[0, 20] = value
    found = np.asarray(fn(x))[0]
    assert not np.isfinite(found[20])
    np.testing.assert_allclose(found[[*range(16), *range(32, 70)]], 1, rtol=1e-6)
    assert codec.encode(x).nbytes == codec.bytes(70) == 5 * (BLOCK * FORMATS[fmt] // 8 + 4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.3, -0.07, 1e-3])
def test_stochastic_rounding_is_right_in_the_mean(fmt, value):
    """Though a number far below a step is nearest to zero; also where one number stands everywhere."""
    codec = Codec(fmt, BLOCK, stochastic=True)
    x = np.full((4096, BLOCK), value, np.float32)
    x[:, 0] = 1  # the block's largest
    found = np.asarray(jax.jit(lambda x: codec.decode(codec.encode(x), BLOCK))(x))
    step = 1 / {"int4": 7, "int8": 127}[fmt]
    assert (np.abs(found - x) < step).all()
    assert abs(found[:, 1:].mean() - value) < 4 * step / 2 / np.sqrt(found.size)  # four standard errors at most
    np.testing.assert_allclose(found[:, 0], 1, rtol=1e-6)
    assert (codec.decode(codec.encode(jnp.zeros((2, 70))), 70) == 0).all()


def leaf_of(axes, shape, dim):
    shards = math.prod({"host": 2, "gpu": 4}[axis] for axis in axes)
    return Leaf("['w']", shape, np.dtype(np.float32), axes, shards, "sharded", dim, is_quantised=True)


def numpy_reduced(parts, leaf, codec, over):
    """Reduce `(workers, *shape)` as devices do: hop by hop, the innermost axis first."""
    back = lambda x: np.asarray(codec.decode(codec.encode(jnp.asarray(x)), x.shape[-1]))
    at = leaf.storage_shape[leaf.dim]
    widths = [(0, at - n if d == leaf.dim else 0) for d, n in enumerate(leaf.shape)]
    rows = np.stack([np.moveaxis(np.pad(x, widths), leaf.dim, 0).reshape(leaf.shards, -1) for x in parts])
    local = np.moveaxis(np.empty(leaf.storage_shape), leaf.dim, 0)[: at // leaf.shards].shape
    in_order = lambda x: np.moveaxis(x.reshape(*x.shape[:-1], *local), x.ndim - 1, x.ndim - 1 + leaf.dim)
    rows = in_order(rows).reshape(2, 4, 2, 4, -1)  # workers, shards, elements
    summed = (back(rows) if "gpu" in over else rows).sum(1)  # over the devices of a host
    summed = (back(summed) if "host" in over else summed).sum(0)
    return summed.reshape(leaf.shards, -1)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "dim"), [((8, 40), 0), ((5, 24), 1), ((9, 30), 0)])
@pytest.mark.parametrize("over", [AXES, ("host",), ("gpu",)])
def test_sums_are_of_parts_that_were_rounded_once_an_axis(shape, dim, over):
    leaves = [leaf_of(AXES, shape, dim), leaf_of(AXES, (16, 16), 0)]
    comm = ManualCollectives(AXES, wire=Wire(reduce="int8", block=BLOCK, over=over))
    parts = [jax.random.normal(jax.random.key(i), (8, *leaf.shape)) for i, leaf in enumerate(leaves)]

    def local(parts):
        return [x.reshape(1, -1) for x in comm.reduce_scatter([x[0] for x in parts], leaves)]

    fn = jax.shard_map(local, mesh=mesh_of(2, 4), in_specs=([P(AXES)] * 2,), out_specs=[P(AXES)] * 2, check_vma=False)
    for leaf, x, found in zip(leaves, parts, jax.jit(fn, compiler_options=QUICK)(parts), strict=True):
        expected = numpy_reduced(np.asarray(x), leaf, Codec("int8", BLOCK), over)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("over", [AXES, ("host",), ("gpu",)])
@pytest.mark.parametrize("axes", quick_or_slow([(AXES,), (("gpu", "host"),), (("gpu",),)], [(AXES,)]))
def test_a_gathered_parameter_is_its_rounded_shards(axes, over):
    leaves = [leaf_of(axes, (8, 40), 1), leaf_of(axes, (9, 30), 0)]
    comm = ManualCollectives(AXES, wire=Wire(gather="int8", block=BLOCK, over=over))
    arrays = [jax.random.normal(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)]
    pads = [[(0, n - m) for n, m in zip(leaf.storage_shape, leaf.shape, strict=True)] for leaf in leaves]
    stored = [jnp.pad(x, pad) for x, pad in zip(arrays, pads, strict=True)]
    specs = [leaf.spec for leaf in leaves]
    gather = lambda shards: comm.all_gather(shards, leaves)
    fn = jax.shard_map(gather, mesh=mesh_of(2, 4), in_specs=(specs,), out_specs=[P()] * 2, check_vma=False)
    codec = Codec("int8", BLOCK)
    for leaf, array, x, found in zip(leaves, arrays, stored, jax.jit(fn)(stored), strict=True):
        if not set(over) & set(axes):
            np.testing.assert_array_equal(found, array)
            continue
        shards = np.split(np.asarray(x), leaf.shards, leaf.dim)
        flat = [np.asarray(codec.decode(codec.encode(jnp.asarray(s.ravel())), s.size)).reshape(s.shape) for s in shards]
        expected = np.concatenate(flat, leaf.dim)[tuple(slice(n) for n in leaf.shape)]
        np.testing.assert_allclose(found, expected, rtol=1e-6)


LAYERS, WIDTH = 3, 32


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embedding": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 6,
        "blocks": {
            "up": jax.random.normal(keys[1], (LAYERS, WIDTH, 2 * WIDTH)) / 6,
            "down": jax.random.normal(keys[2], (LAYERS, 2 * WIDTH, WIDTH)) / 8,
            "norm": jnp.ones((LAYERS, WIDTH)),
        },
        "scale": jnp.ones(WIDTH),
    }


def loss(params, batch):
    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x * w["norm"] @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(block, batch @ params["embedding"], params["blocks"])
    return jnp.mean((x * params["scale"]) ** 2)


BATCH = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
WIRE = Wire(gather="int8", reduce="int4", block=BLOCK, where=("*/up", "*/down"))


def transformation(stage=3, *, tx=None, wire=WIRE, axis=AXES, **options):
    options = {"mesh": mesh_of(2, 4), "axis": axis, "persist_below": 64} | options
    return zero_shard(tx or optax.sgd(1.0), stage=stage, wire=wire, **tuned(**options))


def gradients(tx):
    compiled = jax.jit(tx.value_and_grad(loss), compiler_options=QUICK).lower(tx.shard(params()), BATCH).compile()
    value, grads = compiled(tx.shard(params()), BATCH)
    return value, tx.unshard(grads), compiled


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


CASES = {
    "gather": (Wire(gather="int8", block=BLOCK), {}, 0.02),
    "reduce": (Wire(reduce="int8", block=BLOCK), {}, 0.02),
    "both": (WIRE, {}, 0.2),
    "stochastic": (dataclasses.replace(WIRE, rounding="stochastic"), {}, 0.3),
    "across": (Wire(gather="float8_e4m3fn", reduce="int8", block=BLOCK, over="host"), {}, 0.1),
    "inside": (WIRE, {"params_axis": "gpu"}, 0.2),
}


@functools.cache
def exact():
    return jax.jit(jax.value_and_grad(loss))(params(), BATCH)


GRID = [(case, view) for case in CASES for view in ("global", "device")]
QUICK_ONES = [("inside", "device")]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "view"), quick_or_slow(GRID, QUICK_ONES))
def test_bytes_travel_and_gradients_are_near(case, view):
    wire, options, error = CASES[case]
    wire = dataclasses.replace(wire, where=WIRE.where)
    tx = transformation(wire=wire, view=view, **options)
    value, grads, compiled = gradients(tx)
    np.testing.assert_allclose(value, exact()[0], rtol=0.02)
    expected = flat(exact()[1])
    found = np.linalg.norm(flat(grads) - expected) / np.linalg.norm(expected)
    assert 1e-4 < found < error
    moved = [c for c in collectives(compiled) if LABEL.search(c.op_name)]
    narrow = {(c.kind, c.group_size) for c in moved if c.dtype == "u8"}
    hops = {("all-to-all", 2)} if wire.over else {("all-to-all", 4), ("all-to-all", 2)}
    gathers = (4,) if options else (2, 4) if wire.over else (8,)  # over the hosts first, then inside of each
    assert narrow == {("all-gather", size) for size in gathers if wire.gather} | (hops if wire.reduce else set())


def test_bytes_are_those_of_the_formula():
    """A layer at a time, in both passes, each with its scales; what `check` counts and its contract are the same."""
    tx = transformation()
    _, _, compiled = gradients(tx)
    moved = [c for c in collectives(compiled) if LABEL.search(c.op_name)]
    eighth = 2 * WIDTH * WIDTH // 8
    gathered, reduced = (Codec(fmt, BLOCK).bytes(eighth) for fmt in ("int8", "int4"))
    total = lambda kind: sum(c.times_if_once * c.bytes for c in moved if c.kind == kind and c.dtype == "u8")
    assert total("all-gather") == 2 * LAYERS * 2 * 8 * gathered
    assert total("all-to-all") == LAYERS * 2 * (8 + 2) * reduced  # over "gpu" all rows, over "host" what is left
    found = check(tx.train_step(loss), tx.create(params()), BATCH)
    assert found.ok, found
    assert found.reduced == pytest.approx(found.reduced_formula, rel=0.02)
    once = WIDTH * WIDTH  # the embedding's gradient does not read it
    assert found.gathered == pytest.approx(found.gathered_formula - once, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), [(3, {}), (3, {"params_axis": "gpu"}), (1, {})])
def test_the_estimate_sends_what_the_step_does(stage, options):
    wire = WIRE if stage == 3 else dataclasses.replace(WIRE, gather=None)
    tx = transformation(stage, tx=optax.adam(1e-3), wire=wire, **options)
    state = tx.create(params())
    step = tx.train_step(loss).lower(state, BATCH).compile()
    sent = sum(c.times_if_once * c.sent for c in collectives(step))
    options |= {"devices": "h200:2x4", "tx": optax.adam(1e-3), "persist_below": 64}
    rows, plain = (estimate(params(), wire=one, **tuned(**options)) for one in (WIRE, None))
    shards = 4 if "params_axis" in options else 8
    once = (stage == 3) * 4 * WIDTH * WIDTH * (shards - 1) / shards  # the embedding's gradient does not read it
    assert rows[stage].sent - once == pytest.approx(sent, rel=0.01)
    assert rows[stage].sent < 0.75 * plain[stage].sent


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_on_one_device_skips_the_step_on_all(stage):
    wire = WIRE if stage == 3 else dataclasses.replace(WIRE, gather=None)
    tx = transformation(stage, wire=wire, precision=Precision.fp16() if stage == 2 else None)
    state, step = tx.create(params()), tx.train_step(loss, skip_nonfinite=True)
    bad = BATCH.copy()
    bad[5, 3] = np.inf
    after, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    after, metrics = step(after, BATCH)
    assert np.isfinite(metrics["loss"])


def test_each_leaf_says_how_it_is_sent():
    state = transformation(wire=Wire(gather="int8", block=BLOCK)).create(params())
    lines = {line.split("  ")[0]: line for line in str(state.plan).splitlines()}
    assert lines["params['blocks']['up']"].endswith(", quantised")
    assert lines["params['embedding']"].endswith("sent as it is: an embedding by its name")
    assert lines["params['scale']"].endswith("sent as it is: small: 32 elements, under persist_below=64")
    assert "small: 12 elements per shard, under 8 blocks of 16" in lines["params['blocks']['norm']"]
    notes = {row.path: row.note for row in report(state).rows if row.part == "params"}
    assert notes["['blocks']['up']"] == "quantised"
    assert notes["['embedding']"] == "sent as it is: an embedding by its name"
    plain = transformation(wire=None).create(params())
    assert "quantised" not in str(plain.plan)
    assert "sent as it is" not in str(plain.plan)
