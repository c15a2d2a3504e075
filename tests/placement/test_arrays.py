"""Arrays are replaced, copied and initialised where their plan says, and keep their form in a loop of another stage."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Offload, Tuning, zero_shard
from zerojax.comm.mesh import in_storage_shape
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import Padded
from zerojax.offload import chunked
from zerojax.offload.chunked import Chunking
from zerojax.offload.host import host_kind
from zerojax.placement import storage

P = PartitionSpec
F32 = np.dtype("float32")


def leaf(*shape, dim=0, **options):
    kind = "replicated" if dim is None else "sharded"
    return Leaf("['w']", shape, F32, ("data",), 8, kind=kind, dim=dim, **options)


def test_an_offloaded_array_is_loaded_and_replaced():
    of, cut = leaf(24, 4), Chunking(0, (2, 1))
    config = Config(optax.sgd(1.0), 3, mesh_of(8))
    put = lambda x: jax.device_put(x, NamedSharding(mesh_of(8), P("data")))
    x = put(jnp.arange(96.0).reshape(24, 4))
    node = chunked.chunked(config, [put(jnp.zeros(shape)) for shape in cut.chunk_shapes(of)], of, cut)
    new = chunked.replaced(node, x)
    assert [chunk.sharding.memory_kind for chunk in new.chunks] == [host_kind(mesh_of(8))] * 2
    loaded = chunked.joined(new)
    np.testing.assert_array_equal(loaded, x)
    assert loaded.sharding == x.sharding


@pytest.mark.parametrize("kind", ["device", host_kind])
def test_a_placed_copy_shares_no_memory_with_the_original(kind):
    kind = kind if kind == "device" else kind(mesh_of(8))
    sharding, numbers = NamedSharding(mesh_of(8), P("data"), memory_kind=kind), np.arange(64.0, dtype=F32)
    first = storage.place_array(numbers, sharding)
    numbers[:] = 0
    second = storage.place_array(first, sharding)
    assert first.sharding == second.sharding == sharding
    pointers = [{shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards} for x in (first, second)]
    assert not pointers[0] & pointers[1]
    back = storage.place_array(first, sharding.with_memory_kind("device"))
    first.delete()
    for copy in (second, back):
        np.testing.assert_array_equal(copy, np.arange(64.0))


def test_numbers_and_their_shapes_are_replicated():
    tree, mesh = [3, np.ones(2), jnp.ones(2, jnp.bfloat16)], mesh_of(8)
    for shapes in (False, True):
        placed = storage.place_replicated(mesh, tree, shapes=shapes)
        assert [(x.shape, x.dtype) for x in placed] == [((), jnp.int32), ((2,), F32), ((2,), jnp.bfloat16)]
        assert {x.sharding for x in placed} == {NamedSharding(mesh, P())}
        assert shapes or not any(x.weak_type for x in placed)


def test_padded_parameters_are_read_and_returned_in_the_form_of_another_stage():
    """Here 13 rows are padded to 16 and given in 14, as of another number of devices; and back."""
    of, x = leaf(13, 2), jnp.arange(26.0).reshape(13, 2)
    plain = dataclasses.replace(of, shape=(16, 2))
    flat = Leaf("", (2, 3), F32, ("data",), 8, kind="flat")
    given = [Padded(storage.pad(x, 0, n), (13, 2), 0) for n in (14, 16)] + [x, jnp.ones((16, 2)), jnp.ones((2, 3))]
    forms, leaves = storage.padded_forms(given), [of, of, of, plain, flat]
    assert forms == ((0, 14), (0, 16), None, None, None)
    stored = storage.storage_leaves(given, leaves)
    assert [x.shape for x in stored] == [(16, 2)] * 4 + [(2, 3)], "a flat array is flattened on the devices"
    assert stored[1] is given[1].storage
    layout = types.SimpleNamespace(treedef=jax.tree.structure([0] * 5), params=leaves)
    jax.tree.map(np.testing.assert_array_equal, storage.unflatten_params(stored, layout, leaves, forms), given)
    assert storage.storage_forms([*leaves, leaf(5, dim=None), leaf(7)]) == (*[(0, 16)] * 3, None, None, None, (0, 8))
    np.testing.assert_array_equal(storage.in_logical_shape(jnp.arange(8.0), flat), jnp.arange(6.0).reshape(2, 3))


def test_a_gather_reaches_the_layout_of_each_target():
    """Of three leaves in one program: in full, over fewer axes, and a small one that is flat."""
    mesh = mesh_of(2, 4)
    config = Config(optax.sgd(1.0), 3, mesh, axis=("host", "gpu"))
    fine = Leaf("", (13, 2), F32, ("gpu", "host"), 8, kind="sharded", dim=0)
    coarse = dataclasses.replace(fine, axes=("gpu",), shards=4, further=2)
    flat = Leaf("", (3, 2), F32, ("gpu", "host"), 8, kind="flat")
    whole = functools.partial(dataclasses.replace, kind="replicated", dim=None)
    x, small = jnp.arange(26.0).reshape(13, 2), jnp.arange(6.0).reshape(3, 2)
    put = lambda x, leaf: jax.device_put(in_storage_shape(x, leaf), NamedSharding(mesh, leaf.spec))
    stored = [put(x, fine), put(x, fine), put(small, flat)]
    found = storage.gather(config, stored, [fine, fine, flat], [whole(fine), coarse, whole(flat)])
    for array, expected, spec in zip(found, (x, storage.pad(x, 0, 16), small), (P(), P("gpu"), P()), strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.sharding.spec == spec
    one, alone = (dataclasses.replace(of, axes=(), shards=1) for of in (fine, flat))
    same, row = storage.gather(config, [x, jnp.arange(6.0)], [one, alone], [one, whole(alone)])
    assert same is x, "nothing is divided"
    np.testing.assert_array_equal(row, small)


def test_parameters_are_cast_where_they_are():
    mesh = mesh_of(8)
    config = Config(optax.sgd(1.0), 3, mesh, offload=Offload(optimizer="host", params="host"))
    leaves = [leaf(16, host=True), leaf(16), leaf(16)]
    narrow = [dataclasses.replace(x, dtype=np.dtype(jnp.bfloat16)) for x in leaves[:2]] + [leaves[2]]
    arrays = [jax.device_put(jnp.arange(16.0), storage.leaf_sharding(config, x)) for x in leaves]
    found = storage.cast_params(config, types.SimpleNamespace(params=leaves), arrays, narrow)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.bfloat16, F32]
    assert [x.sharding for x in found] == [x.sharding for x in arrays]
    assert list(map(storage.is_on_host, found)) == [True, False, False]
    assert found[2] is arrays[2]
    moved = storage.return_to_host(config, {0: jnp.ones(16), 1: arrays[1]}, leaves)
    assert storage.is_on_host(moved[0])
    assert moved[1] is arrays[1]
    pinned = jax.make_jaxpr(lambda arrays: storage.pin_to_plan(config, arrays, leaves))(arrays)
    assert [v in pinned.jaxpr.invars for v in pinned.jaxpr.outvars] == [True, False, False], "not those of the host"


def test_only_arrays_in_host_memory_need_room_there(monkeypatch):
    needed, mesh = [], mesh_of(8)
    monkeypatch.setattr(Offload, "check_host_memory", lambda self, *args: needed.append(args))
    config = Config(optax.sgd(1.0), 3, mesh, offload=Offload(optimizer="host", params="host"))
    for params in ([jnp.ones(16)] * 2, jax.eval_shape(lambda: [jnp.ones(16)] * 2)):
        for leaves in ([leaf(16, host=True), leaf(16)], [leaf(16)] * 2):
            storage.place_params(config, types.SimpleNamespace(params=leaves), params)
    storage.check_host_room(Config(optax.sgd(1.0), 3, mesh), types.SimpleNamespace(params=[leaf(16, host=True)]))
    assert needed == [(mesh, 8)]


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
