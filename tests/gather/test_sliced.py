"""A view of a parameter is a view of each of its shards, unless it changes the dim that is divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.gather.sliced import sliced_leaf, sliced_shard
from zerojax.layout.leaf import Leaf

# The shape, the divided dim, the other axes and the view; then the divided dim and the other axes of the result.
VIEWS = [
    ((3, 4, 5), 1, ("model",), lambda x: lax.transpose(x, (2, 0, 1)), (2, (None, "model", None))),
    ((3, 4, 5), 1, ("model",), lambda x: lax.rev(x, (0, 2)), (1, ("model",))),
    ((3, 4, 5), 1, ("model",), lambda x: lax.rev(x, (1,)), None),
    ((3, 4, 5), 1, ("model",), lambda x: lax.slice(x, (1, 0, 1), (3, 4, 4)), (1, (None,))),
    ((3, 4, 5), 1, ("model",), lambda x: lax.slice(x, (0, 0, 1), (3, 4, 5), (1, 1, 2)), (1, ("model",))),
    ((3, 4, 5), 1, (), lambda x: lax.slice(x, (0, 1, 0), (3, 3, 5)), None),
    ((3, 1, 2), 1, (), lambda x: lax.slice(x, (0, 0, 0), (3, 1, 2), (1, 2, 1)), None),
    ((3, 4, 5), 1, ("model",), lambda x: lax.dynamic_slice(x, (2, 0, 0), (1, 4, 5)), (1, (None,))),
    ((1, 4, 5), 1, (None, None, "model"), lambda x: lax.squeeze(x, (0,)), (0, (None, "model"))),
    ((1, 4, 5), 1, (), lambda x: lax.squeeze(x, (-3,)), (0, ())),
    ((4, 1, 1), 0, (), lambda x: lax.squeeze(x, (1,)), (0, ())),
    ((1, 1, 5), 1, (), lambda x: lax.squeeze(x, (1,)), None),
    ((3, 4, 5), 1, (), lambda x: x.reshape(3, 1, 4, 5), (2, ())),
    ((3, 4, 5), 1, (None, "model"), lambda x: x.reshape(3, 1, 4, 5), (2, (None, None, "model"))),
    ((3, 4, 5), 1, ("model",), lambda x: x.reshape(3, 1, 4, 5), None),
    ((3, 4, 5), 1, (), lambda x: x.reshape(12, 5), None),
    ((3, 1, 4), 2, (), lambda x: x.reshape(3, 4), (1, ())),
]


@pytest.mark.parametrize(("shape", "dim", "others", "view", "expected"), VIEWS)
def test_a_view_of_the_shards_has_the_shards_of_the_view(shape, dim, others, view, expected):
    x = jnp.arange(float(np.prod(shape))).reshape(shape)
    (eqn,) = jax.make_jaxpr(view)(x).eqns
    leaf = sliced_leaf(Leaf("", shape, x.dtype, ("data",), 2, kind="sharded", dim=dim, others=others), eqn)
    assert (leaf and (leaf.dim, leaf.others)) == expected
    if leaf is not None:
        shards = [sliced_shard(shard, [eqn], {}) for shard in jnp.split(x, 2, dim)]
        assert leaf.shape == view(x).shape
        np.testing.assert_array_equal(jnp.concatenate(shards, leaf.dim), view(x))
