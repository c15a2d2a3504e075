"""Programs that plain JAX runs and that zerojax once failed in foreign words."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, Tuning, zero_shard
from zerojax.metrics import PerRow

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(8, 24)).astype("float32"), "b": RNG.normal(size=5).astype("float32")}
BATCH = {"x": RNG.normal(size=(48, 8)).astype("float32"), "none": np.zeros((48, 0), np.float32)}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 4) + jnp.sum(params["b"] ** 2) + batch["none"].sum()


def assert_equal(a, b):  # sums are in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), a, b)


@pytest.mark.quick(1)
@pytest.mark.parametrize("view", ["global", "device"])
def test_microbatches_of_a_batch_with_an_empty_leaf(mesh, view):
    """A leaf of rows without elements is divided as the others are, and comes back so from the aux."""
    tx = zero_shard(optax.sgd(0.1), stage=2, mesh=mesh, view=view)
    with_aux = lambda params, batch: (loss_fn(params, batch), PerRow({"x": batch["x"], "none": batch["none"]}))
    (value, aux), grads = tx.value_and_grad(with_aux, has_aux=True, accumulate=3)(tx.shard(PARAMS), BATCH)
    assert_equal((value, grads), jax.value_and_grad(loss_fn)(PARAMS, BATCH))
    assert_equal(aux, BATCH)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_that_was_moved_by_hand(stage):
    """A step places a state of NumPy arrays, or of arrays on one device, as it was; offloaded ones are refused."""
    tx = zero_shard(optax.adam(0.1), stage=stage, mesh=mesh_of(6), tuning=Tuning(persist_below=1))
    step = tx.train_step(loss_fn)
    kept, _ = step(tx.create(PARAMS), BATCH)
    on_host = jax.device_get(kept)
    expected, _ = step(kept, BATCH)
    for moved in (on_host, jax.device_put(on_host, jax.devices()[7])):
        state, _ = step(moved, BATCH)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(expected))
        same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), state, expected)
        assert all(jax.tree.leaves(same))
    assert isinstance(on_host.step, np.ndarray)  # and not donated


def test_an_offloaded_state_that_was_moved_by_hand(mesh):
    """Its chunks cannot be placed by a step: the error says what can."""
    offload = Offload(optimizer="host", update="device")
    tx = zero_shard(optax.adam(0.1), stage=1, mesh=mesh, tuning=Tuning(persist_below=1), offload=offload)
    state = tx.create(PARAMS)
    with pytest.raises(ValueError, match=r"state.step is a ndarray, not on the mesh.*Save and restore"):
        tx.train_step(loss_fn)(jax.device_get(state), BATCH)


def test_adafactor_of_an_empty_leaf_with_offloaded_state(mesh):
    tx = zero_shard(
        optax.adafactor(0.1, min_dim_size_to_factor=4), stage=3, mesh=mesh, offload=Offload(optimizer="host")
    )
    loss = lambda params, batch: loss_fn(params, batch) + params["empty"].sum()
    state, found = tx.train_step(loss)(tx.create(PARAMS | {"empty": np.zeros((0, 8), np.float32)}), BATCH)
    assert_equal(found["loss"], loss_fn(PARAMS, BATCH))
    assert state.params["empty"].shape == (0, 8)


def entries_of_jit():
    gc.collect()
    found = sum(type(x).__name__ == "PjitInfo" for x in gc.get_objects())
    assert found  # else JAX has renamed it, and this test tells nothing
    return found


@pytest.mark.slow
def test_a_step_that_is_made_again_leaves_no_entry_in_the_caches_of_jit(mesh):
    tx = zero_shard(optax.adam(0.1), stage=3, mesh=mesh)
    state, counts = tx.create(PARAMS), []
    for _ in range(4):
        state, _ = tx.train_step(loss_fn)(state, BATCH)
        counts.append(entries_of_jit())
    assert counts[-1] <= counts[1]
