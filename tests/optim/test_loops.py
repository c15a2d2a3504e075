"""Loops that do more than update: line searches evaluate the loss, and lookahead has two copies of the parameters.

A transformation takes the gradients of a part of its parameters: the error names a way that works.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, zero_shard

PARAMS = {"w": jnp.linspace(0.1, 1, 128).reshape(16, 8), "b": jnp.ones(8)}
# No dim of `w` and `b` is divided by 4 devices.
UNEVEN = {"w": jnp.sin(jnp.arange(42.0)).reshape(6, 7), "b": jnp.zeros(13), "frozen": jnp.ones(7)}
ROWS = jnp.cos(jnp.arange(48.0)).reshape(8, 6)
BATCHES = np.asarray(jax.random.normal(jax.random.key(0), (4, 16, 16)))


def loss(params, rows):
    return jnp.mean((rows @ params["w"] + params["b"]) ** 2)


def lookahead(optimizer, value_and_grad, params):
    """The loop of optax's documentation."""
    tx = optax.lookahead(optimizer, sync_period=2, slow_step_size=0.5)
    both = optax.LookaheadParams.init_synced(params)
    state = tx.init(both)
    for rows in BATCHES:
        _, grads = value_and_grad(both.fast, rows)
        updates, state = tx.update(grads, state, both)
        both = optax.apply_updates(both, updates)
    return both


def test_the_remedy_works():
    zero = lambda tx: zero_shard(tx, stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=0))
    outside = zero(optax.lookahead(optax.adam(1e-2), 2, 0.5))
    both = optax.LookaheadParams.init_synced(PARAMS)
    step, hand = outside.train_step(lambda p, rows: loss(p.fast, rows)), outside.shard(both)
    tries = {
        "step": lambda: step(outside.create(both), BATCHES[0]),
        "by hand": lambda: outside.update(hand, outside.init(hand), hand),
        "plain": lambda: outside.train_step(loss)(outside.create(PARAMS), BATCHES[0]),
    }
    for one in tries.values():
        with pytest.raises((ValueError, AttributeError)) as caught:
            one()
        assert any("optax.lookahead(zero_shard(tx, ...), ...)" in note for note in caught.value.__notes__)
    tx = zero(optax.adam(1e-2))
    found = lookahead(tx, tx.value_and_grad(loss), tx.shard(PARAMS))
    wanted = lookahead(optax.adam(1e-2), jax.value_and_grad(loss), PARAMS)
    for have, want in zip(found, wanted, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), tx.unshard(have), want)  # other order


def regression(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) * p["frozen"]) ** 2) + jnp.mean((p["b"] - 1) ** 2)


def lbfgs():
    return optax.lbfgs(memory_size=2)


def backtracking():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=4, store_grad=True)
    return optax.chain(optax.sgd(0.5), search)


def fitted(tx, gradient, params):
    @jax.jit
    def step(params, state):
        value, grad = gradient(params, ROWS)
        extra = {"value": value, "grad": grad, "value_fn": lambda p: regression(p, ROWS)}
        updates, state = tx.update(grad, state, params, **extra)
        return value, optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(2):
        value, params, state = step(params, state)
    return value, params, state


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optimizer"), [(3, backtracking), (1, lbfgs)])
def test_a_line_search_equals_that_of_one_device(stage, optimizer):
    tx = zero_shard(optimizer(), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=0))
    value, params, _ = fitted(tx, tx.value_and_grad(regression), tx.shard(UNEVEN))
    expected, plainly, _ = fitted(optimizer(), jax.value_and_grad(regression), UNEVEN)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, x in plainly.items():
        np.testing.assert_allclose(params[name], x, rtol=1e-4, atol=1e-5, err_msg=name)  # the search divides by sums
