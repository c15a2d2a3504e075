"""Stacks of sharded matrices reach their owners whole and in order, and the results come back to the shards."""

import jax
import numpy as np
import pytest
from conftest import mesh_of
from engine_helpers import QUICK

from zerojax import jaxprs
from zerojax.comm.owners import Owners
from zerojax.layout.leaf import Leaf


def leaf(*shape, dim, dtype=np.float32):
    return Leaf("", shape, np.dtype(dtype), ("gpu",), 8, "sharded", dim)


# Two of one type and two of others. No sharded dim can be divided evenly over eight devices.
LEAVES = [leaf(3, 5, dim=1), leaf(6, 3, dim=0), leaf(2, 7, dim=1, dtype=np.int32), leaf(5, dim=0, dtype=np.int8)]
OUTS = [leaf(6, 5, dim=1), leaf(2, 7, dim=0, dtype=np.int32)]


def of_one(a, b, c, d, small, shared):
    """Each result depends on the order along the sharded dims."""
    return [b.cumsum(0) @ a.cumsum(1) + shared, c.cumsum(1), small * a.sum() + d[4]]


@pytest.mark.parametrize(("sizes", "within"), [((1, 2), 1), ((2, 3), 2)])
def test_owners_compute_each_item_of_a_stack_with_whole_matrices(sizes, within):
    items, rng = sum(sizes), np.random.default_rng(0)
    owners = Owners.of(mesh_of(1, 8, 1, names=("host", "gpu", "model")), ("gpu",), within)
    assert (owners.count, owners.each) == (8 // within, within)
    whole = [rng.integers(1, 9, (items, *x.shape)).astype(x.dtype) for x in LEAVES]
    small, shared = np.arange(items, dtype=np.float32), np.float32(2)
    widths = lambda leaf: [(0, 0), *((0, m - n) for m, n in zip(leaf.storage_shape, leaf.shape, strict=True))]
    stored = lambda stacks, leaves: [np.pad(x, widths(leaf)) for x, leaf in zip(stacks, leaves, strict=True)]
    arrays = [np.split(x, [sizes[0]]) for x in stored(whole, LEAVES)]
    run = jax.jit(lambda arrays, small: owners.compute(of_one, arrays, LEAVES, [small], [shared], OUTS))
    (*outs, last) = map(
        np.stack, zip(*(of_one(*item, shared) for item in zip(*whole, small, strict=True)), strict=True)
    )
    traced = run.trace(arrays, small)
    found = traced.lower().compile(QUICK)(arrays, small)
    jax.tree.map(np.testing.assert_array_equal, found, (stored(outs, OUTS), [last]))
    names = [eqn.primitive.name for eqn in jaxprs.equations(traced.jaxpr.jaxpr)]
    assert names.count("all_to_all") == 5  # one per type, there and back
    assert ("scan" in names) == (items > owners.count)  # an owner of one matrix needs no loop
