"""Values, gradients, dropout masks and callbacks with a budget are those of the function, at every stage."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax import Tuning, zero_shard

WIDTH, ROWS, LAYERS = 8, 16, 3
SHOWN: list[float] = []


def block(w, x, *, key):
    """A block with two products, a jit and dropout between them, a name, and a value that it shows to the user."""
    hidden = jax.jit(jnp.tanh)(checkpoint_name(x @ w["up"], "product"))
    jax.debug.callback(lambda total: SHOWN.append(float(total)), hidden.sum())
    kept = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0.0)
    return x + jnp.sin(kept @ w["down"])


def unrolled(remat, params, x, keys):
    for i in range(LAYERS):
        x = remat(block)(params, x, key=keys[i])
    return x


def scanned(remat, params, x, keys):
    return jax.lax.scan(lambda x, key: (remat(block)(params, x, key=key), None), x, keys)[0]


def mapped(remat, params, x, keys):
    return jax.vmap(lambda rows: scanned(remat, params, rows, keys))(x.reshape(2, -1, WIDTH)).reshape(x.shape)


def nested(remat, params, x, keys):
    @remat
    def twice(params, x, key):
        one = remat(block)
        return one(params, one(params, x, key=key), key=jax.random.fold_in(key, 1))

    return twice(params, twice(params, x, keys[0]), keys[1])


FORMS = {form.__name__: form for form in (unrolled, scanned, mapped, nested)}
BUDGETS = [0, 4 * ROWS * WIDTH, 1e9]


@functools.cache
def trained(form, budget, stage):
    """Loss and logical gradients, and what was shown. Without a budget, of the plain function on one device."""
    remat = (lambda fn: fn) if budget is None else functools.partial(zerojax.remat_within, budget=budget)
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) / WIDTH**0.5
    params, x = {"up": normal(0, WIDTH, 4 * WIDTH), "down": normal(1, 4 * WIDTH, WIDTH)}, normal(2, ROWS, WIDTH)
    loss = lambda params, x, keys: jnp.mean(FORMS[form](remat, params, x, keys) ** 2)
    keys = jax.random.split(jax.random.key(3), LAYERS)
    SHOWN.clear()
    if stage is None:
        found = jax.jit(jax.value_and_grad(loss))(params, x, keys)
    else:
        tx = zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh_of(2), tuning=Tuning(persist_below=16))
        value, grads = jax.jit(tx.value_and_grad(loss))(tx.shard(params), x, keys)
        found = value, tx.unshard(grads)
    found = jax.device_get(found)
    jax.effects_barrier()
    return found, sorted(SHOWN)


GRID = list(itertools.product(FORMS, BUDGETS, [None, 0, 3]))
QUICK = [("scanned", BUDGETS[1], 3), ("nested", BUDGETS[1], None)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("form", "budget", "stage"), quick_or_slow(GRID, QUICK))
def test_a_budget_changes_nothing_but_memory(form, budget, stage):
    (found, shown), (wanted, plainly) = trained(form, budget, stage), trained(form, None, None)
    # Other masks would change gradients by their own size. Recomputed values may round in another order: some ulp.
    compared = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())
    jax.tree.map(compared, found, wanted)
    # `jax.checkpoint` would show every value twice. `jax.vmap` slices what a callback shows, and then so does a budget.
    times = len(shown) // len(plainly)
    assert times == 1 or (form == "mapped" and times == 2)
    np.testing.assert_allclose(shown, np.repeat(plainly, times), rtol=1e-5, atol=1e-5)
