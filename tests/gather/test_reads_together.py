"""Blocks that read a parameter side by side gather it once, and a tangent without a gradient has no backward pass."""

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import assert_same
from jax import lax
from test_gather_counts import SIZE, passes

from zerojax import jaxprs
from zerojax.gather.clusters import only_scales, reads_together

W = jnp.cos(jnp.arange(float(SIZE * SIZE))).reshape(SIZE, SIZE) / SIZE
X = jnp.sin(jnp.arange(16.0 * SIZE)).reshape(16, SIZE)
PARAMS, DIMS = {"a": W, "b": W.T, "tied": W + 0.1}, {"a": 0, "b": 1, "tied": 0}


def chunks(p, x, wrap=lambda fn: fn):
    """A model, and its logits by an embedding, some rows at a time."""
    x = jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])
    chunk = wrap(lambda x: jax.nn.logsumexp(x @ p["tied"].T, -1).sum())
    return sum(map(chunk, jnp.split(x, 2))) / x.size


def in_the_middle(p, x):
    """A parameter that is read again where one other block reads it together with another one."""
    x = jnp.tanh(x @ p["tied"])
    x = jnp.tanh(x @ p["tied"])
    x = jax.checkpoint(lambda x: jnp.tanh(x @ p["tied"] @ p["a"]))(x)
    return jnp.mean((x @ p["b"]) ** 2)


def net(p, x):
    return jax.nn.silu(x @ p["a"]) @ p["b"] @ p["tied"]


def tangent(net):
    """Mean flow: a loss on a network and on its tangent, which gets no gradient."""

    def loss(p, x):
        out, moved = jax.jvp(lambda x: net(p, x), (x,), (jnp.cos(x),))
        return jnp.mean((out - lax.stop_gradient(jnp.sin(x) - moved)) ** 2)

    return loss


def views(net):
    """Two views of a batch through one network, and a loss on both results (BYOL, VICReg)."""

    def loss(p, x):
        return jnp.mean((net(p, x) - net(p, jnp.cos(x))) ** 2)

    return loss


def residual(p, x):
    for name in p:
        x = x + jax.nn.silu(x @ p[name])
    return x


def attending(p, x):
    """Products of activations between those of parameters."""
    x = x.reshape(-1, 2, SIZE)
    q, k = x @ p["a"], x @ p["b"]
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ (x @ p["tied"])


def in_turn(p, x):
    """A parameter that is read again after each other one, as a recurrence reads its input's matrix."""
    h = jnp.zeros_like(x)
    for i in range(8):
        h = jnp.tanh(h @ p["a"] + jnp.cos(i * x) @ p["b"])
    return jnp.mean((h @ p["tied"]) ** 2)


def embedded_twice(p, x):
    """A decoder's embedding, which is twice as large as what an encoder reads first, and would wait for all of it."""
    seen = jnp.tanh(jnp.tanh(x @ p["tied"]) @ p["a"]).mean(0)
    y = jnp.concatenate([x, x, x]) @ p["tied"]
    return jnp.mean(((y + seen) @ p["b"]) ** 2)


SHARED = {
    "chunks, remat": lambda p, x: chunks(p, x, jax.checkpoint),
    "in the middle": in_the_middle,
    "views, residual": views(residual),
    "views, attention": views(attending),
    "tangent": tangent(net),
    "tangent of a jit": tangent(lambda p, x: jax.jit(net)(p, x)),
    "tangent of a remat": tangent(jax.checkpoint(net)),
}


@pytest.mark.parametrize("name", SHARED)
def test_reads_share_a_gather_and_a_reduction(name):
    gathered, reduced = passes(SHARED[name], PARAMS, DIMS, X)
    assert gathered <= 2
    assert reduced == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["chunks, remat", "in the middle", "tangent", "views, residual"])
def test_gradients_are_those_of_plain_jit(name):
    assert_same(SHARED[name], PARAMS, X, DIMS)


def peak(jaxpr):
    """The most bytes of the batch, and of values that are computed and still read."""
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in jaxprs.variables_in(eqn.invars)}
    live, most = {jaxpr.invars[-1]}, 0
    for i, eqn in enumerate(jaxpr.eqns):
        live = {v for v in live | set(eqn.outvars) if last.get(v, -1) > i}
        most = max(most, sum(map(jaxprs.nbytes, live)))
    return most


@pytest.mark.parametrize("loss", [views(residual), views(attending), in_turn, embedded_twice])
def test_what_is_computed_early_is_little(loss):
    """Many rows, so that a value of each is larger than a parameter."""
    jaxpr = jax.make_jaxpr(loss)(PARAMS, jnp.ones((1024, SIZE))).jaxpr
    moved = reads_together(jaxpr, jaxpr.invars[:-1])
    assert sorted(map(id, moved.eqns)) == sorted(map(id, jaxpr.eqns))
    assert (moved.eqns != jaxpr.eqns) == (loss is not embedded_twice)
    assert peak(moved) <= 2 * peak(jaxpr)  # as if each equation had the rows of two calls


def test_a_loss_without_such_reads_stays():
    for loss in (chunks, in_the_middle, tangent(net)):
        jaxpr = jax.make_jaxpr(loss)(PARAMS, X).jaxpr
        assert reads_together(jaxpr, jaxpr.invars[:-1]).eqns == jaxpr.eqns


# A loss of a weight, its norm `n` and rows, and whether the norm only changes weights.
SCALES = [
    (lambda w, n, x: x @ (w / jnp.sqrt(n)), True),
    (lambda w, n, x: x @ (jnp.sin(w) / n), True),
    (lambda w, n, x: x @ (w / n) + n, False),  # and the rows
    (lambda w, n, x: (n, x @ (w / n)), False),  # and is returned
    (lambda w, n, x: (n + 1, x @ (w / n)), False),
    (lambda w, n, x: jnp.tanh(n) < 1, False),
    (lambda w, n, x: jnp.tanh(n - x[0, 0]) * w, False),  # with a value of the rows
]


@pytest.mark.parametrize(("fn", "expected"), SCALES)
def test_what_only_scales_a_weight_is_found(fn, expected):
    jaxpr = jax.make_jaxpr(lambda w, x: fn(w, jnp.sum(w * w), x))(W, X).jaxpr
    first = next(i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "reduce_sum")
    is_known = lambda v: v is jaxpr.invars[0]
    assert only_scales(jaxpr.eqns[first + 1 :], jaxpr.eqns[first], is_known, jaxpr.outvars) == expected
