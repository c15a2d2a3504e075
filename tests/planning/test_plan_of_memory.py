"""A plan of a step with `memory=` says what fits, and warns near the limit of XLA's scheduler."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent_gpus import aot

import zerojax
from zerojax import zero_shard

WIDTH, LAYERS = 1024, 4

pytestmark = [pytest.mark.slow, aot]


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def loss(params, x):
    return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)


def planned(rows, tx_memory, **limits):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    tx = zero_shard(optax.sgd(1e-3), stage=3)
    state = tx.create({"up": shape(LAYERS, WIDTH, 4 * WIDTH), "down": shape(LAYERS, 4 * WIDTH, WIDTH)})
    step = tx.train_step(loss, memory=tx_memory)
    return zerojax.plan(step, state, shape(rows, 512, WIDTH), topology="h100:8", **limits)


def test_a_step_is_made_to_fit_an_absent_gpu():
    plain, fitted, smaller = planned(8_192, None), planned(8_192, "auto"), planned(8_192, "auto", memory="30 GB")
    assert not plain.fits
    assert any("limit of XLA's scheduler" in note for note in plain.notes)
    assert smaller.peak < fitted.peak <= 0.76 * fitted.capacity
    assert smaller.fits
    assert smaller.usable == 30e9
    for plan in (fitted, smaller):
        assert any("of the memory" in note for note in plan.notes)
        assert plan.blocks[0].calls == LAYERS
    assert smaller.blocks[0].saved < fitted.blocks[0].saved
    assert not any("limit of XLA's scheduler" in note for note in smaller.notes)


def test_a_step_uses_the_memory_and_its_peak_was_predicted():
    from memory_fit import fitted

    found = fitted("vit", "h200:8")
    first, chosen = found["trials"][0], found["trials"][found["chosen"]]
    assert abs(first["predicted"] / first["peak"] - 1) <= 0.1
    assert 0.85 * found["memory"] <= chosen["peak"] <= found["memory"]
    assert len(found["trials"]) <= 3
