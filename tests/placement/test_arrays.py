"""Arrays are sliced, joined, copied, cast and compared with their plan; each function alone, on small arrays."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Tuning, zero_shard
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import Padded
from zerojax.layout.tree import layout_of
from zerojax.offload import chunked
from zerojax.offload.chunked import Chunking
from zerojax.offload.host import host_kind
from zerojax.offload.options import Offload
from zerojax.placement import init_programs, storage

P = PartitionSpec
F32 = np.dtype("float32")


def leaf(*shape, dim=0, **options):
    kind = "replicated" if dim is None else "sharded"
    return Leaf("['w']", shape, F32, ("data",), 8, kind=kind, dim=dim, **options)


@functools.cache
def config(stage=3, **options):
    return Config(optax.sgd(1.0), stage, mesh_of(8), persist_below=4, **options)


def counting(*shape):
    return jnp.arange(float(math.prod(shape))).reshape(shape)


def put(x, *spec):
    return jax.device_put(x, NamedSharding(mesh_of(8), P(*spec)))


@pytest.mark.parametrize(
    ("of", "cut"),
    [
        (leaf(24, 4), Chunking(0, (2, 1))),
        (leaf(24, 4), Chunking(1, (3, 1))),
        (leaf(3, 16, dim=1), Chunking(0, (1, 1, 1))),
        (leaf(5, 3, dim=None), Chunking(0, (2, 2, 1))),
        (leaf(16), Chunking(0, (2,))),
    ],
)
def test_chunks_are_parts_of_every_shard_and_join_to_the_array(of, cut):
    mesh, x = mesh_of(8), counting(*of.storage_shape)
    stored = put(x, *of.spec)

    @jax.jit
    def run(stored):
        chunks = chunked.split_chunks(mesh, stored, of, cut)
        last, zeros = cut.chunks[-1][0], jnp.zeros_like(chunks[-1])
        updated = chunked.update_chunk(mesh, stored, zeros, of, cut.dim, last)
        return chunks, chunked.join_chunks(mesh, chunks, of, cut), updated

    chunks, joined, updated = run(stored)
    np.testing.assert_array_equal(joined, x)
    assert [chunk.shape for chunk in chunks] == cut.chunk_shapes(of)
    shards = [np.array(x)] if of.dim is None else np.split(np.array(x), 8, of.dim)
    for chunk, (start, length) in zip(chunks, cut.chunks, strict=True):
        parts = [np.take(shard, range(start, start + length), cut.dim) for shard in shards]
        np.testing.assert_array_equal(chunk, parts[0] if of.dim is None else np.concatenate(parts, of.dim))
    start, length = cut.chunks[-1]
    for shard in shards:
        shard[(slice(None),) * cut.dim + (slice(start, start + length),)] = 0
    np.testing.assert_array_equal(updated, shards[0] if of.dim is None else np.concatenate(shards, of.dim))


def test_an_offloaded_array_is_loaded_and_replaced():
    of, cut = leaf(24, 4), Chunking(0, (2, 1))
    x = put(counting(24, 4), "data")
    node = chunked.chunked(config(), [put(jnp.zeros(shape), "data") for shape in cut.chunk_shapes(of)], of, cut)
    new = chunked.replaced(node, x)
    assert [chunk.sharding.memory_kind for chunk in new.chunks] == [host_kind(mesh_of(8))] * 2
    loaded = chunked.joined(new)
    np.testing.assert_array_equal(loaded, x)
    assert loaded.sharding == x.sharding


@pytest.mark.parametrize("count", [1, 8])
def test_a_placed_array_shares_no_memory_with_the_callers(count):
    sharding = NamedSharding(mesh_of(count), P())
    x = jnp.arange(64.0)
    placed = storage.place_array(x, sharding)
    assert placed.sharding == sharding
    pointers = {shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards}
    assert x.unsafe_buffer_pointer() not in pointers
    placed.delete()
    assert float(x.sum()) == 63 * 32
    assert storage.place_array(np.ones(2), sharding).sharding == sharding


def test_a_copy_in_host_memory_shares_no_memory_with_the_original():
    sharding = NamedSharding(mesh_of(8), P("data"), memory_kind=host_kind(mesh_of(8)))
    first = storage.place_array(np.arange(64.0, dtype=F32), sharding)
    second = storage.place_array(first, sharding)
    assert first.sharding == second.sharding == sharding
    pointers = [{shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards} for x in (first, second)]
    assert not pointers[0] & pointers[1]
    first.delete()
    np.testing.assert_array_equal(second, np.arange(64.0))


def test_shapes_are_placed_as_shapes():
    sharding = NamedSharding(mesh_of(8), P("data"))
    found = storage.place_array(jax.ShapeDtypeStruct((8,), F32), sharding)
    assert (type(found), found.shape, found.sharding) == (jax.ShapeDtypeStruct, (8,), sharding)
    assert storage.are_shapes({"a": found, "b": jnp.ones(2)})
    assert not storage.are_shapes({"b": jnp.ones(2)})
    shapes = storage.place_replicated(mesh_of(8), {"n": 1, "x": np.ones(2, np.float32)}, shapes=True)
    live = storage.place_replicated(mesh_of(8), {"n": 1, "x": np.ones(2, np.float32)}, shapes=False)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), live)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves((shapes, live)))


@pytest.mark.parametrize("offload", [None, Offload(optimizer="host", params="host")])
def test_parameters_are_placed_and_cast_where_they_live(offload):
    given = config(offload=offload)
    params = {"b": jnp.arange(3.0), "w": counting(16, 4)}
    layout = layout_of(given, params)
    placed = storage.place_params(given, layout, params)
    assert [x.sharding for x in placed] == [storage.named(given, of) for of in layout.params]
    host = [of.host for of in layout.params]
    assert host == [False, offload is not None]
    narrow = [dataclasses.replace(of, dtype=np.dtype(jnp.bfloat16)) for of in layout.params]
    cast = storage.cast_params(given, layout, placed, narrow)
    assert [x.dtype for x in cast] == [jnp.bfloat16] * 2
    assert [x.sharding for x in cast] == [x.sharding for x in placed]
    assert storage.cast_params(given, layout, placed, layout.params) is placed


def test_storage_is_converted_between_stages():
    x = counting(5, 3)
    padded = Padded(jnp.pad(x, ((0, 3), (0, 0))), (5, 3), 0)
    (kept,) = storage.storage_leaves([padded], [leaf(5, 3)])
    assert kept is padded.storage
    for given in (x, padded):
        for of, shape in ((leaf(5, 3, dim=1), (5, 8)), (leaf(5, 3, dim=None), (5, 3)), (leaf(5, 3), (8, 3))):
            (stored,) = storage.storage_leaves([given], [of])
            assert stored.shape == shape
            np.testing.assert_array_equal(storage.unpadded(stored, of), x)
            np.testing.assert_array_equal(storage.in_logical_shape(stored, of), x)
    assert storage.padded_forms([padded, x]) == ((0, 8), None)
    flat = Leaf("", (2, 3), F32, ("data",), 8, kind="flat")
    np.testing.assert_array_equal(storage.in_logical_shape(jnp.arange(8.0), flat), counting(2, 3))
    one, two = storage.cast([x, x], [F32, jnp.bfloat16])
    assert one is x
    assert two.dtype == jnp.bfloat16


@pytest.mark.parametrize("form", [None, (0, 8), (0, 6), (1, 4)])
def test_parameters_return_in_the_form_in_which_they_came(form):
    x, given = counting(5, 3), config()
    layout = layout_of(given, {"w": x, "large": jnp.ones((64, 64))})
    of = leaf(5, 3)
    stored = jnp.pad(x, ((0, 3), (0, 0)))
    tree = storage.unflatten_params([jnp.ones((64, 64)), stored], layout, [leaf(64, 64), of], [None, form])
    assert storage.padded_forms(tree)[1] == form
    np.testing.assert_array_equal(jnp.asarray(tree["w"]), x)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([80] * 1000, 8),  # equal layers: an eighth of all shards per program
        ([8000, *[80] * 1000], 3),  # half of the largest leaf, in full, is more than an eighth of all shards
        ([8000] * 2, 1),
        ([], 0),
    ],
)
def test_each_program_makes_a_share_of_the_parameters(sizes, count):
    leaves = tuple(map(leaf, sizes))
    found = list(init_programs.groups(leaves))
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    assert len(found) == count
    most = max([leaf.bytes // 2 for leaf in leaves] + [sum(leaf.local_bytes for leaf in leaves) // 8])
    assert all(sum(leaves[i].local_bytes for i in group) <= most for group in found if len(group) > 1)


def test_a_leaf_with_padding_is_padded_in_storage():
    assert storage.storage_forms([leaf(79), leaf(80), leaf(81)]) == ((0, 80), None, (0, 88))


# No dim is divided by 4 devices.
ODD = {"w": jnp.sin(jnp.arange(77.0)).reshape(7, 11), "v": jnp.cos(jnp.arange(55.0)).reshape(11, 5)}
ROWS = jnp.cos(jnp.arange(12 * 7.0)).reshape(12, 7)


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)


def trained(tx, params):
    state, gradient = tx.init(params), getattr(tx, "value_and_grad", jax.value_and_grad)(loss)
    for _ in range(2):
        _, grads = gradient(params, ROWS)
        assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 0])
def test_padded_parameters_keep_their_form_in_a_loop_of_another_stage(stage):
    make = functools.partial(zero_shard, optax.adam(1e-2), mesh=mesh_of(4), tuning=Tuning(persist_below=0))
    given = make(stage=3).shard(ODD)
    assert all(isinstance(x, Padded) for x in given.values())
    found = trained(make(stage=stage), given)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for name, x in trained(optax.adam(1e-2), ODD).items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, err_msg=name)
