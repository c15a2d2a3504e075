"""A view of a parameter is a view of each of its shards, unless it changes the dim that is divided."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.gather.sharded_param import OF_SHARDS, extended, root_param, scanned_over
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


@pytest.mark.parametrize(("strides", "after"), [(None, []), ((1, 1), []), ((1, 2), ["device_put"])])
def test_a_range_that_is_not_contiguous_is_copied_from_host_memory_first(strides, after):
    x = jax.device_put(jnp.ones((3, 4)), jax.memory.Space.Host)
    (eqn,) = jax.make_jaxpr(lambda x: lax.slice(x, (0, 1), (3, 3), strides))(x).eqns
    found = jax.make_jaxpr(lambda x: sliced_shard(x, [eqn], {}))(x)
    assert [eqn.primitive.name for eqn in found.eqns] == [*after, "slice"]


def test_the_gradient_of_a_view_is_that_of_the_parameter_with_zeros_elsewhere():
    """Also one with partial sums in front, and of a layer whose index is computed."""
    x, i = jnp.zeros((3, 4, 5)), jnp.int32(2)
    jaxpr = jax.make_jaxpr(lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (1, 4, 5)).transpose(0, 2, 1))(x, i).jaxpr
    root = jaxpr.invars[0]
    param = root_param(root, Leaf("", x.shape, x.dtype, ("data",), 2, kind="sharded", dim=1))
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in OF_SHARDS]
    param = functools.reduce(extended, eqns, param)
    assert len(param.operands) == 1
    env = {root: x[:, :2], **dict.fromkeys(param.operands, i)}
    grads = jnp.arange(20.0).reshape(2, 1, 5, 2)
    for grad in (grads[0], grads):
        found = param.root_grad(grad, env, (*grad.shape[:-3], 3, 2, 5))
        wanted = jnp.zeros_like(found).at[..., 2, :, :].set(grad[..., 0, :, :].swapaxes(-1, -2))
        np.testing.assert_array_equal(found, wanted)
        ordered = dataclasses.replace(param, order=(2, 0, 1))
        assert ordered.to_order(grad).shape == (*grad.shape[:-3], 2, 1, 5)
        np.testing.assert_array_equal(ordered.from_order(ordered.to_order(grad)), grad)


def test_loops_scan_over_stacks_directly_and_behind_views():
    def loss(a, b, c, x):
        step = lambda x, w: (x @ w, None)
        x, _ = lax.scan(step, x, lax.rev(a, (0,)))
        return lax.scan(step, x, jnp.sin(b))[0] + lax.rev(c, (0,))[0]

    stack = jnp.zeros((2, 3, 3))
    jaxpr = jax.make_jaxpr(loss)(stack, stack, stack, stack[0]).jaxpr
    assert scanned_over(jaxpr).intersection(jaxpr.invars) == {jaxpr.invars[0]}
    assert len(scanned_over(jaxpr)) == 3
