"""Parameters and batches in NumPy's default types, of 64 bits: JAX makes narrower arrays of them, and so do plans."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from parity import assert_parity

from zerojax import Offload, Precision, Tuning, estimate, zero_shard

NUMBERS = np.random.default_rng(0)
PARAMS = {"w": NUMBERS.normal(size=(17, 16)), "z": np.ones(5, complex), "b": np.zeros(16), "order": np.arange(16)[::-1]}
BATCHES = [{"x": NUMBERS.normal(size=(8, 17)), "i": np.arange(8)} for _ in range(2)]
NARROW = {"float64": "float32", "int64": "int32", "complex128": "complex64"}


def loss(p, batch):
    h = jnp.tanh(batch["x"] @ p["w"] + p["b"]).take(p["order"], axis=1)
    return jnp.mean(h**2 * (batch["i"] % 3)[:, None]) + jnp.abs(p["z"]).mean()


def zero(stage, **options):
    return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=20), **options)


def types(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


@pytest.mark.slow
def test_they_train_as_their_arrays_of_jax_do():
    tx = zero(3, offload=Offload(optimizer="host", params="host"))
    assert_parity(tx, loss, PARAMS, BATCHES)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert types(tx.create(shapes).params) == types(tx.create(PARAMS).params) == set(NARROW.values())
    assert not any(name in str(tx.create(shapes).plan) for name in NARROW)


@pytest.mark.slow
def test_of_other_entries_each_takes_them():
    tx = zero(3, precision=Precision.bf16())
    state, step = tx.create(PARAMS), tx.train_step(loss)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (PARAMS, BATCHES[0]))
    step.lower(tx.create(shapes[0]), shapes[1])
    assert step(state, BATCHES[0])[1]["loss"] > 0
    tx = zero(2)
    params, state = PARAMS, tx.init(PARAMS)
    value, grads = tx.value_and_grad(loss)(params, BATCHES[0])
    updates, state = tx.update(jax.device_get(grads), state, params)
    assert types(optax.apply_updates(params, updates)) == set(NARROW.values())
    np.testing.assert_allclose(tx.eval_step(loss)(tx.shard(PARAMS), BATCHES[0]), value, rtol=1e-6)
    one = {name: {"w": PARAMS["w"].astype(name)} for name in ("float32", "float64")}
    assert str(estimate(one["float64"], devices=4)) == str(estimate(one["float32"], devices=4))


@pytest.mark.slow
def test_with_64_bits_enabled_they_keep_them():
    with jax.enable_x64(True):
        tx = zero(3)
        state, _ = tx.train_step(loss)(tx.create(PARAMS), BATCHES[0])
        assert types(state.params) == set(NARROW)
        grads = jax.grad(lambda w: loss({**PARAMS, "w": w}, BATCHES[0]))(PARAMS["w"])
        moved = tx.unshard(state.params)["w"] - PARAMS["w"]
        np.testing.assert_allclose(moved, -1e-2 * grads / (np.abs(grads) + 1e-8), rtol=1e-10)
