"""Stacks of sharded matrices reach their owners whole and in order, and the results come back to the shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import jaxprs
from zerojax.comm.mesh import in_storage_shape
from zerojax.comm.owners import Owners
from zerojax.layout.leaf import Leaf


def leaf(*shape, dim, dtype=np.float32):
    return Leaf("", shape, np.dtype(dtype), ("gpu",), 4, "sharded", dim)


# Two of one type and one of another. No sharded dim can be divided evenly over four devices.
LEAVES = [leaf(3, 5, dim=1), leaf(6, 3, dim=0), leaf(2, 7, dim=1, dtype=np.int32)]
OUTS = [leaf(6, 5, dim=1), leaf(2, 7, dim=1, dtype=np.int32)]


def of_one(a, b, c, small, shared):
    """Each result depends on the order along the sharded dims."""
    return [jnp.cumsum(b, 0) @ jnp.cumsum(a, 1) + shared, jnp.cumsum(c, 1), small / jnp.sum(a)]


@pytest.mark.parametrize(("sizes", "within"), [((1, 2), 1), ((2, 3), 2)])
def test_owners_compute_each_item_of_a_stack_with_whole_matrices(sizes, within):
    mesh, items, rng = mesh_of(2, 4), sum(sizes), np.random.default_rng(0)
    owners = Owners.of(mesh, ("gpu",), within)
    assert (owners.count, owners.each) == (4 // within, within)
    whole = [jnp.asarray(rng.integers(1, 9, (items, *x.shape)), x.dtype) for x in LEAVES]
    small, shared = jnp.arange(1.0, items + 1), jnp.float32(2)
    stored = lambda stack, leaf: jax.vmap(lambda x: in_storage_shape(x, leaf))(stack)
    put = lambda stack, leaf: jax.device_put(stored(stack, leaf), NamedSharding(mesh, P(None, *leaf.spec)))
    arrays = [[put(x, leaf) for x in jnp.split(stack, [sizes[0]])] for stack, leaf in zip(whole, LEAVES, strict=True)]
    run = lambda arrays: owners.compute(of_one, arrays, LEAVES, [small], [shared], OUTS)
    (*outs, last) = jax.vmap(of_one, (0, 0, 0, 0, None))(*whole, small, shared)
    expected = [stored(x, leaf) for x, leaf in zip(outs, OUTS, strict=True)], [last]
    # A division by zero would be one of an owner that has no matrix and computes with zeros.
    with jax.debug_infs(True):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(run)(arrays), expected)
    names = [eqn.primitive.name for eqn in jaxprs.equations(jax.make_jaxpr(run)(arrays).jaxpr)]
    assert names.count("all_to_all") == 4  # one per type, there and back
    assert ("scan" in names) == (items > owners.count)  # an owner of one matrix needs no loop
