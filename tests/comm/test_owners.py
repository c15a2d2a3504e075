"""Owners compute with whole items of a stack that is stored in slices, and the results are stored in slices again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import mesh_of

from zerojax.comm.owners import Owners
from zerojax.layout.leaf import Leaf


def leaf(*shape, dim):
    return Leaf("", shape, np.dtype("float32"), ("data",), 8, kind="sharded", dim=dim)


def stack(leaf, items, seed):
    """A stack of items in storage shape, and the items."""
    x = jax.random.normal(jax.random.key(seed), (items, *leaf.shape))
    widths = [(0, 0)] + [(0, m - n) for n, m in zip(leaf.shape, leaf.storage_shape, strict=True)]
    return jnp.pad(x, widths), x


@pytest.mark.quick(1)
@pytest.mark.parametrize(("within", "items"), [(2, 5), (1, 3), (1, 9), (2, 4), (4, 3)])
def test_each_item_is_computed_as_a_whole(within, items):
    """Also items that owners get to fill their slots, and that nobody reads."""
    owners = Owners.of(mesh_of(8), ("data",), within)
    assert (owners.count, owners.each) == (8 // within, within)
    a, b, out = leaf(5, 3, dim=0), leaf(3, 16, dim=1), leaf(16, 5, dim=0)
    (first, x), (second, y) = stack(a, items, 0), stack(b, items, 1)
    factors, offset = jnp.arange(1.0, items + 1), jnp.float32(0.5)

    def fn(a, b, factor, offset):
        product = a @ b * factor + offset
        return [product.T, product.sum()]

    halves = [first[:1], first[1:]]
    run = lambda *stacks: owners.compute(fn, [list(stacks[:2]), [stacks[2]]], [a, b], [factors], [offset], [out])
    (found,), (sums,) = jax.jit(run)(*halves, second)
    expected = jnp.einsum("nij,njk->nki", x, y) * factors[:, None, None] + offset
    assert found.shape == (items, *out.storage_shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, expected.sum((1, 2)), rtol=1e-4)
