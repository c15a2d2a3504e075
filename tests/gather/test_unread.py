"""Which values a loss takes instead of a weight: quantised copies and scales, computed on shards before the gather."""

import types

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import lay_out
from jax import lax

from zerojax import jaxprs
from zerojax.gather.engine import trace_loss
from zerojax.gather.narrow import hoisted
from zerojax.gather.parts import dims_of
from zerojax.gather.shardwise import shardwise_p
from zerojax.gather.unread import spared

W = jnp.cos(jnp.arange(16.0)).reshape(4, 4)


@jax.custom_vjp
def rounded(w, scale):
    return jnp.round(w / scale).astype(jnp.int8).astype(w.dtype) * scale


rounded.defvjp(lambda w, scale: (rounded(w, scale), None), lambda _, g: (g, g.sum()))


@pytest.mark.parametrize("is_read", [False, True])
def test_a_scale_is_computed_apart_from_its_quantiser_if_nothing_reads_its_cotangent(is_read):
    fn = jax.custom_vjp(lambda w, scale: (jnp.round(w / scale).astype(jnp.int8).astype(w.dtype), 2 * scale))
    fn.defvjp(lambda w, scale: (fn(w, scale), None), lambda _, g: (g[0] + g[1] if is_read else g[0], jnp.zeros(())))
    w, scale = jnp.arange(12.0).reshape(3, 4), jnp.float32(0.5)
    jaxpr = jax.make_jaxpr(fn)(w, scale).jaxpr
    dims = dims_of(jaxpr, {jaxpr.invars[0]: 0, jaxpr.invars[1]: None})
    closed = jax.make_jaxpr(lambda *values: spared(jaxpr.eqns[0], values, dims))(w, scale)
    if is_read:
        assert closed.jaxpr.outvars == []
        return
    assert closed.jaxpr.outvars[1] not in jaxprs.dependent_on(closed.jaxpr.invars[:1], closed.jaxpr.eqns)
    for found, wanted in zip(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, w, scale), fn(w, scale), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("dtype", "cotangent"), [("float8_e4m3fn", 0), ("float8_e4m3fn", 0.5), ("int8", None)])
def test_a_product_takes_the_copy_of_a_weight_alone_if_the_copy_gets_no_cotangent(dtype, cotangent):
    """And its backward pass reads what the forward pass computed, instead of computing it again."""
    fn = jax.custom_vjp(lambda x, w, q: jnp.exp(x @ q.astype(x.dtype)))

    def backward(kept, g):
        x, q, y = kept
        g = g * y
        return g @ q.astype(g.dtype).T, x.T @ g, None if cotangent is None else jnp.full_like(q, cotangent)

    fn.defvjp(lambda x, w, q: ((y := fn(x, w, q)), (x, q, y)), backward)
    x, q = W[:2], W.astype(dtype)
    jaxpr = jax.make_jaxpr(fn)(x, W, q).jaxpr
    dims = dict.fromkeys(jaxpr.invars[1:], 0)
    run = lambda x, w, q: spared(jaxpr.eqns[0], [x, w, q], dims)
    if cotangent:
        assert run(x, W, q) is None
        return
    both = lambda fn: lambda x, w: jax.vjp(lambda x, w: fn(x, w, q), x, w)[1](x)
    closed = jax.make_jaxpr(both(lambda *args: run(*args)[0]))(x, W)
    assert sum(eqn.primitive.name == "exp" for eqn in jaxprs.equations(closed.jaxpr)) == 1
    for found, wanted in zip(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x, W), both(fn)(x, W), strict=True):
        np.testing.assert_array_equal(found, wanted)


def hoisted_of(loss, *args, constants=0):
    """The jaxpr of `loss(w, *args, x)` before and after; only `w` is divided, and all but `x` are alike."""
    jaxpr = jax.make_jaxpr(loss)(W, *args).jaxpr
    (leaf,) = lay_out([W], [0], devices=2).leaves
    return jaxpr, hoisted(jaxpr, [leaf, *[None] * len(args)], [True] * (1 + len(args)), constants)[0]


def test_constants_of_a_loss_get_no_cotangent_from_a_quantiser():
    _, found = hoisted_of(lambda w, a, b, c: rounded(w, a * b * c), *jnp.arange(1.0, 4), constants=2)
    (eqn,) = [eqn for eqn in found.eqns if eqn.primitive is shardwise_p]
    assert [v for i, v in enumerate(eqn.invars) if i in eqn.params["of"].fixed] == found.invars[2:]


@pytest.mark.parametrize("per_iteration", [False, True])
def test_a_weight_is_quantised_before_a_loop_unless_each_iteration_has_a_scale(per_iteration):
    def loss(w, scale, scales, x):
        step = lambda x, row: (x @ rounded(w, row if per_iteration else scale), None)
        return lax.scan(step, x, scales)[0]

    jaxpr, found = hoisted_of(loss, jnp.float32(0.5), jnp.arange(1.0, 4), W)
    assert (found is jaxpr) == per_iteration


def test_the_derivatives_of_groups_are_added_except_new_values_of_overwritten_parameters():
    """A weight keeps one gradient per group. Of new values, the largest counts."""
    fn = jax.custom_vjp(lambda w, scale, history: rounded.fun(w, scale))
    fn.defvjp(lambda *args: (fn(*args), args), lambda kept, g: (g, (g * kept[0]).sum(), 2 * kept[2]))
    params = [W, jnp.float32(0.5), jnp.float32(3)]
    leaves = lay_out(params, [0, -1, -1], devices=1).leaves
    program = trace_loss(lambda p, x: jnp.sum(x @ fn(*p)), leaves, params, [W], differing=[0])[0]
    (computation,) = program.shardwise
    per_shard = lambda local, values, *_: local(*values)
    comm = types.SimpleNamespace(follower=True, across=lambda leaf: None, per_shard=per_shard)
    env = dict(zip(program.invars, params, strict=False))
    pull = lambda g: [*computation.pull(comm, env, g).values()]
    pulled = lambda g: jax.vmap(pull, axis_name="data", axis_size=1, in_axes=None, out_axes=None)(g)
    (w, scale, history), one = pulled(jnp.stack([W, 2 * W])), pulled(W)
    np.testing.assert_array_equal(w, jnp.stack([W, 2 * W]))
    np.testing.assert_allclose([scale, history], [3 * one[1], one[2]], rtol=1e-6)
    assert history == 6
