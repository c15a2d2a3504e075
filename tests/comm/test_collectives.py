"""Collectives between shards and full arrays: over one axis, several, or some of them; in buckets or alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from conftest import mesh_of
from engine_helpers import QUICK
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import jaxprs
from zerojax.comm.collectives import Collectives
from zerojax.comm.device_collectives import DeviceCollectives
from zerojax.comm.manual import ManualCollectives, buckets_of
from zerojax.comm.mesh import in_storage_shape
from zerojax.comm.mesh import mapped as on_shards
from zerojax.layout.leaf import Leaf

AXES = ("host", "gpu")
SIZES = {"host": 2, "gpu": 4}
MESH = mesh_of(2, 4)
SHAPES = {"replicated": (3,), "first dim": (8, 3), "padded": (3, 5), "flat": (3, 3), "small": (2,)}


def leaf_of(name, axes, dtype=jnp.float32):
    shape, shards = SHAPES[name], math.prod(SIZES[axis] for axis in axes)
    kind, dim = {"first dim": ("sharded", 0), "padded": ("sharded", 1)}.get(name, ("flat", None))
    if name == "replicated":
        kind = name
    return Leaf(f"['{name}']", shape, np.dtype(dtype), axes, shards, kind, dim)


def mapped(fn, in_specs, out_specs):
    return jax.shard_map(fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False)


def reduced(comm, leaves, exposed):
    """A function of `(devices, *shape)` stacks: the sum of each over its dim 0, in storage."""

    def local(stacks):
        return comm.reduce_across(comm.reduce_scatter([stack[0] for stack in stacks], leaves, exposed=exposed), leaves)

    return mapped(local, ([P(AXES)] * len(leaves),), [leaf.local_spec for leaf in leaves])


LEAVES = {
    "all axes": [leaf_of(name, AXES) for name in SHAPES],
    "inner axis": [leaf_of(name, ("gpu",)) for name in SHAPES],
    "mixed": [leaf_of(name, axes) for name in SHAPES for axes in (("host",), ("gpu", "host"))],
    "mixed types": [leaf_of(name, ("gpu",), dtype) for name in SHAPES for dtype in (jnp.float32, jnp.int32)],
}


@pytest.mark.parametrize(("bucket_bytes", "exposed", "version"), [(0, False, 12), (600, True, 12), (600, False, 11)])
@pytest.mark.parametrize("name", LEAVES)
def test_gradients_are_summed_over_all_axes_and_sharded_over_their_leafs(
    name, bucket_bytes, exposed, version, monkeypatch
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jaxlib.version, "__version_info__", (0, version, 0))
    leaves = LEAVES[name]
    keys = jax.random.split(jax.random.key(0), len(leaves))
    stacks = [jax.random.randint(k, (8, *x.shape), 0, 9).astype(x.dtype) for k, x in zip(keys, leaves, strict=True)]
    fn = reduced(ManualCollectives(AXES, bucket_bytes), leaves, exposed)
    # Before jaxlib 0.12, a reduce-scatter between CPU processes may give wrong sums.
    sends = {eqn.primitive.name for eqn in jaxprs.equations(jax.make_jaxpr(fn)(stacks).jaxpr)}
    assert {"reduce_scatter", "all_to_all"} & sends == {"reduce_scatter" if version == 12 else "all_to_all"}
    found = jax.jit(fn, compiler_options=QUICK)(stacks)
    for leaf, stack, x in zip(leaves, stacks, found, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(MESH, leaf.spec), x.ndim)
        np.testing.assert_array_equal(x, in_storage_shape(stack.sum(0), leaf), err_msg=leaf.path)


def operands_of(jaxpr, primitive):
    """Sizes of what a collective is given, wherever in a jaxpr it is."""
    found = (eqn for eqn in jaxprs.equations(jaxpr) if eqn.primitive.name.startswith(primitive))
    return [math.prod(v.aval.shape) for eqn in found for v in eqn.invars]


def test_exposed_gradients_are_reduced_from_the_last_leaf_on():
    leaves = [leaf_of(name, ("gpu",)) for name in ("first dim", "flat")]
    stacks = [jnp.ones((8, *leaf.shape)) for leaf in leaves]
    of = lambda exposed: jax.make_jaxpr(reduced(ManualCollectives(AXES), leaves, exposed))(stacks).jaxpr
    sizes = [math.prod(leaf.storage_shape) for leaf in leaves]
    assert [operands_of(of(exposed), "reduce_scatter") for exposed in (False, True)] == [sizes, sizes[::-1]]


def test_a_small_bucket_of_exposed_gradients_delays_no_large_one():
    """The large bucket waits for the small one only if both are larger than `shared_bytes`."""
    leaves = [leaf_of(name, ("gpu",)) for name in ("first dim", "flat")]
    stacks = [jnp.ones((8, *leaf.shape)) for leaf in leaves]
    large, small = (math.prod(leaf.shape) for leaf in leaves)

    def ordered(shared_bytes):
        comm = ManualCollectives(AXES, shared_bytes=shared_bytes)
        return operands_of(jax.make_jaxpr(reduced(comm, leaves, True))(stacks).jaxpr, "optimization_barrier")

    assert ordered(4 * small - 1) == [large, *leaves[1].local_shape]
    assert ordered(4 * small) == []


def test_leaves_that_another_axis_divides_share_a_bucket_with_others_in_global_view():
    """Each device along that axis gathers and reduces its own part of them, in one collective."""
    plain = Leaf("['plain']", (8, 3), np.dtype(np.float32), ("gpu",), 4, "sharded", 0)
    leaves = [plain, dataclasses.replace(plain, path="['tp']", shape=(6, 8), dim=1, others=("host",))]
    leaves.append(dataclasses.replace(leaves[1], path="['padded']", shape=(3, 4), dim=0, others=(None, "host")))
    comm = Collectives(("gpu",), mesh=MESH)
    arrays = [jnp.arange(1.0, leaf.size + 1).reshape(leaf.shape) for leaf in leaves]
    put = lambda x, leaf: jax.device_put(in_storage_shape(x, leaf), NamedSharding(MESH, leaf.spec))
    shards = list(map(put, arrays, leaves))

    def there_and_back(*shards):
        full = comm.all_gather(shards, leaves)
        summands = [x[None] * jnp.arange(1.0, 5).reshape(4, *[1] * x.ndim) for x in full]
        return full, comm.reduce_scatter(summands, leaves)

    full, sums = jax.jit(there_and_back)(*shards)
    for leaf, array, gathered, reduced in zip(leaves, arrays, full, sums, strict=True):
        np.testing.assert_array_equal(gathered, array)
        np.testing.assert_array_equal(reduced, in_storage_shape(10 * array, leaf))
        assert reduced.sharding.is_equivalent_to(NamedSharding(MESH, leaf.spec), reduced.ndim)
    jaxpr = jax.make_jaxpr(there_and_back)(*shards).jaxpr
    parts = [math.prod(leaf.storage_shape) // (2 if leaf.others else 1) for leaf in leaves]
    assert operands_of(jaxpr, "all_gather") == [sum(parts) // 4]
    assert operands_of(jaxpr, "reduce_scatter") == [sum(parts)]


W = Leaf("['w']", (4, 4), np.dtype(np.float32), AXES, 8, "sharded", 0)  # 64 bytes
FLAT, REPLICATED = dataclasses.replace(W, kind="flat", dim=None), dataclasses.replace(W, kind="replicated", dim=None)
TENSOR_PARALLEL = dataclasses.replace(W, others=(None, "model"))
INNER, HALF = dataclasses.replace(W, axes=("gpu",), shards=4), dataclasses.replace(W, dtype=np.dtype(np.float16))


@pytest.mark.parametrize(
    ("leaves", "limit", "expected"),
    [
        ([W, W, W], 128, [[0, 1], [2]]),
        ([W, W, W], 1000, [[0, 1, 2]]),
        ([W, W], 64, [[0], [1]]),  # as large as the limit: alone
        ([W, W], 0, [[0], [1]]),
        ([FLAT, FLAT, FLAT], 0, [[0, 1, 2]]),
        ([W, FLAT, W, FLAT], 1000, [[0, 2], [1, 3]]),
        ([W, HALF, W, HALF], 1000, [[0, 2], [1, 3]]),
        ([W, INNER, W], 1000, [[0, 2], [1]]),
        ([W, TENSOR_PARALLEL, W], 1000, [[0, 2], [1]]),
        ([W, REPLICATED, REPLICATED], 1000, [[0], [1], [2]]),
        ([W, dataclasses.replace(W, is_quantised=True), W], 1000, [[0, 2], [1]]),
    ],
)
def test_which_leaves_share_a_bucket(leaves, limit, expected):
    assert buckets_of([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves], leaves, limit) == expected


@pytest.mark.slow
def test_gradients_are_reduced_in_the_type_of_the_wire():
    leaves = [leaf_of(name, ("gpu",), dtype) for name in SHAPES for dtype in (jnp.bfloat16, jnp.int32)]
    comm = ManualCollectives(AXES, reduce_dtype=np.dtype(np.float32))
    stacks = [jnp.full((8, *leaf.shape), 257, leaf.dtype) for leaf in leaves]
    for leaf, x in zip(leaves, jax.jit(reduced(comm, leaves, False))(stacks), strict=True):
        assert x.dtype == (leaf.dtype if leaf.dtype == np.int32 else np.float32)
        assert float(x.max()) == 8 * float(stacks[0].max() if x.dtype == np.float32 else 257)


@pytest.mark.parametrize("leaf", [INNER, dataclasses.replace(INNER, shape=(3, 10), dim=1)], ids=["even", "padded"])
def test_a_device_keeps_its_part_of_a_shard_and_of_an_array_that_all_have(leaf):
    """In device view by slices, and in global view by a constraint."""
    over = dataclasses.replace(leaf, further=2)
    x = np.arange(1.0, leaf.size + 1, dtype=np.float32).reshape(leaf.shape)
    stored, extent = in_storage_shape(jnp.asarray(x), over), over.part_shape[over.dim]
    device, whole = DeviceCollectives(AXES), Collectives(AXES, mesh=MESH)
    parts = P(*[None] * leaf.dim, ("gpu", "host"))

    def own(shard):
        assert device.own_part(shard, leaf) is shard
        assert dataclasses.replace(device, defers=True).own_part(shard, over) is shard
        return device.own_part(shard, over), device.divided(jnp.asarray(x), over.dim, extent, ("gpu", "host"))

    assert whole.own_part(x, over) is x
    for found in (*mapped(own, over.spec, parts)(stored), whole.divided(x, over.dim, extent, ("gpu", "host"))):
        np.testing.assert_array_equal(found, stored)
        assert found.sharding.is_equivalent_to(NamedSharding(MESH, parts), found.ndim)
    shapes = [dataclasses.replace(device, defers=on).grad_shape(over) for on in (False, True)]
    assert shapes == [over.part_shape, over.local_shape]
    shapes = [dataclasses.replace(whole, defers=on).grad_shape(leaf) for on in (False, True)]
    assert shapes == [leaf.storage_shape, (2, *leaf.storage_shape)]


def test_a_mapped_function_is_differentiated_and_batched_as_a_plain_one():
    fn = lambda w, x, n: (jnp.sin(w) * x, n + 1)
    run = on_shards(fn, mesh=MESH, in_specs=(P(), P("gpu"), P()), out_specs=(P("gpu"), P()), axis_names={"gpu"})
    x, n = np.arange(16, dtype=np.float32).reshape(2, 8), np.arange(3)
    batched = lambda each: lambda w: jax.vmap(each, (None, 0, None))(w, x, n)
    two = jnp.float32(2)
    derived = lambda: [jax.jvp(batched(each), (two,), (two,))[1][0] for each in (run, fn)]
    values = lambda: [batched(each)(two) for each in (run, fn)]
    found, expected = zip(*jax.jit(lambda: (derived(), values()), compiler_options=QUICK)(), strict=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
