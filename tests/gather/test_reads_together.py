"""Consecutive blocks that read a parameter gather it once, and a tangent without a gradient has no backward pass."""

import jax
import jax.numpy as jnp
import pytest
from engine_helpers import assert_same
from jax import lax
from test_gather_counts import SIZE, passes

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


SHARED = {
    "chunks": chunks,
    "chunks, remat": lambda p, x: chunks(p, x, jax.checkpoint),
    "in the middle": in_the_middle,
    "tangent": tangent(net),
    "tangent of a jit": tangent(lambda p, x: jax.jit(net)(p, x)),
}


@pytest.mark.parametrize("name", SHARED)
def test_consecutive_reads_share_a_gather_and_a_reduction(name):
    gathered, reduced = passes(SHARED[name], PARAMS, DIMS, X)
    assert gathered <= 2
    assert reduced == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["chunks, remat", "in the middle", "tangent"])
def test_gradients_are_those_of_plain_jit(name):
    assert_same(SHARED[name], PARAMS, X, DIMS)
