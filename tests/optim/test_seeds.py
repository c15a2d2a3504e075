"""Training over seeds: `jax.vmap` of a whole loop, as purejaxrl has it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, zero_shard

SEEDS = jax.random.split(jax.random.key(0), 3)
TOKENS = jax.random.randint(jax.random.key(1), (3, 24, 4), 0, 11)


def init(key):
    """Make leaves of which no dim is divided by 4 devices, and one that is."""
    a, b, c = jax.random.split(key, 3)
    shapes = {"table": (11, 7), "conv": (3, 7, 7), "out": (7, 12)}
    return {name: jax.random.normal(k, shapes[name]) / 3 for name, k in zip(shapes, (a, b, c), strict=True)}


def losses(p, tokens):
    """Sum over rows in a gather, a convolution, a loop and a product."""
    h = jax.lax.conv_general_dilated(
        p["table"][tokens], p["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["conv"][:2])
    return jnp.mean((h @ p["out"]) ** 2, axis=(1, 2))


def loss(p, tokens):
    return jnp.mean(losses(p, tokens))


def weighted(p, tokens):
    weights = 1.0 + tokens[:, 0]
    return jnp.sum(weights * losses(p, tokens)), jnp.sum(weights)


def weighted_mean(p, tokens):
    total, weight = weighted(p, tokens)
    return total / weight


def trained(tx, gradient, key, tokens, shard=lambda p: p) -> Any:
    params = shard(init(key))

    def step(carry, _):
        params, state = carry
        value, grads = gradient(params, tokens)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), values = jax.lax.scan(step, (params, tx.init(params)), length=2)
    return jnp.asarray(params["table"]), values


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "view", "options"), [(3, "global", {}), (3, "device", {"accumulate": 2, "weighted": True})]
)
def test_a_loop_under_vmap_trains_every_seed(stage, view, options):
    fn, plain = (weighted, weighted_mean) if options else (loss, loss)
    adam = optax.adam(1e-2)
    tx = zero_shard(adam, stage=stage, view=view, mesh=mesh_of(4), tuning=Tuning(persist_below=0))
    run: Any = functools.partial(trained, tx, tx.value_and_grad(fn, **options), shard=tx.shard)
    expected: Any = jax.jit(jax.vmap(functools.partial(trained, adam, jax.value_and_grad(plain))))(SEEDS, TOKENS)
    found: Any = jax.jit(jax.vmap(run))(SEEDS, TOKENS)
    assert_equal(found, expected)


@pytest.mark.slow
def test_a_step_and_an_evaluation_under_vmap():
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=0))

    def run(key, tokens):
        state, _ = tx.train_step(loss)(tx.create(init(key)), tokens)
        return jnp.asarray(state.params["table"]), tx.eval_step(loss)(state.params, tokens)

    def plain(key, tokens):
        params, adam = init(key), optax.adam(1e-2)
        updates, _ = adam.update(jax.grad(loss)(params, tokens), adam.init(params), params)
        moved: Any = optax.apply_updates(params, updates)
        return moved["table"], loss(moved, tokens)

    assert_equal(jax.jit(jax.vmap(run))(SEEDS, TOKENS), jax.vmap(plain)(SEEDS, TOKENS))
