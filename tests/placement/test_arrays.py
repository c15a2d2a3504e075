"""Arrays are replaced, copied and initialised where their plan says, and keep their form in a loop of another stage."""

import functools
import itertools

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
from zerojax.offload import chunked
from zerojax.offload.chunked import Chunking
from zerojax.offload.host import host_kind
from zerojax.placement import storage
from zerojax.train.params import program_shares

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


def test_a_copy_in_host_memory_shares_no_memory_with_the_original():
    sharding = NamedSharding(mesh_of(8), P("data"), memory_kind=host_kind(mesh_of(8)))
    first = storage.place_array(np.arange(64.0, dtype=F32), sharding)
    second = storage.place_array(first, sharding)
    assert first.sharding == second.sharding == sharding
    pointers = [{shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards} for x in (first, second)]
    assert not pointers[0] & pointers[1]
    first.delete()
    np.testing.assert_array_equal(second, np.arange(64.0))


def test_a_flat_array_has_its_logical_shape_without_padding():
    flat = Leaf("", (2, 3), F32, ("data",), 8, kind="flat")
    np.testing.assert_array_equal(storage.in_logical_shape(jnp.arange(8.0), flat), jnp.arange(6.0).reshape(2, 3))


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
    found = list(program_shares(leaves))
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    assert len(found) == count
    most = max([leaf.bytes // 2 for leaf in leaves] + [sum(leaf.local_bytes for leaf in leaves) // 8])
    assert all(sum(leaves[i].local_bytes for i in group) <= most for group in found if len(group) > 1)


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
