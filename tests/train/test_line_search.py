"""Line searches, which evaluate the loss in their update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, zero_shard

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# No dim of `w` and `b` is divided by 4 devices.
PARAMS = {"w": jnp.sin(jnp.arange(42.0)).reshape(6, 7), "b": jnp.zeros(13), "frozen": jnp.ones(7)}
BATCH = jnp.cos(jnp.arange(48.0)).reshape(8, 6)


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) * p["frozen"]) ** 2) + jnp.mean((p["b"] - 1) ** 2)


def lbfgs():
    return optax.lbfgs(memory_size=2)


def backtracking():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=4, store_grad=True)
    return optax.chain(optax.sgd(0.5), search)


def fitted(tx, gradient, params):
    @jax.jit
    def step(params, state):
        value, grad = gradient(params, BATCH)
        extra = {"value": value, "grad": grad, "value_fn": lambda p: loss(p, BATCH)}
        updates, state = tx.update(grad, state, params, **extra)
        return value, optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(2):
        value, params, state = step(params, state)
    return value, params, state


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optimizer"), [(3, backtracking), slow(1, lbfgs)])
def test_a_line_search_equals_that_of_one_device(stage, optimizer):
    tx = zero_shard(optimizer(), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=0))
    value, params, _ = fitted(tx, tx.value_and_grad(loss), tx.shard(PARAMS))
    expected, plainly, _ = fitted(optimizer(), jax.value_and_grad(loss), PARAMS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, x in plainly.items():
        np.testing.assert_allclose(params[name], x, rtol=1e-4, atol=1e-5, err_msg=name)  # the search divides by sums
