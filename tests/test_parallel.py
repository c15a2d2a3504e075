"""ZeRO beside tensor, sequence, expert and pipeline parallel: as the same model on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import quick_or_slow
from flax import linen as nn
from parallel import WAYS, Decoder, loss_of, mesh_for

from zerojax import zero_shard

WIDTH, BATCH, LENGTH = 16, 16, 16
LAYERS = {"tensor": 2, "sequence": 2, "expert": 2, "pipeline": 8}
# A step of Adam is a gradient divided by its own size: where that is below what float32 rounds its sum to, epsilon
# decides the step's size, and not the order of the sum.
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-4),
    "clip-adafactor": optax.chain(optax.clip_by_global_norm(0.5), optax.adafactor(1e-2, 4)),
}


def model(way, mesh=None):
    return Decoder(way, WIDTH, LAYERS[way], mesh=mesh)


def init(model):
    return lambda key: model.init(key, jnp.zeros((8, LENGTH), jnp.int32))["params"]


def batches(count=3):
    return np.random.default_rng(0).integers(256, size=(count, BATCH, LENGTH + 1), dtype=np.int32)


@functools.cache
def on_one_device(way, name):
    tx, loss = OPTIMIZERS[name], loss_of(model(way))
    params = nn.meta.unbox(jax.jit(init(model(way)))(jax.random.key(0)))
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for batch in batches():
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return losses, jax.device_get(params)


def zero(way, stage, name="adamw", **options):
    return zero_shard(OPTIMIZERS[name], stage=stage, mesh=mesh_for(way), persist_below=100, **options)


def trained(way, tx, **options):
    divided = model(way, tx.config.mesh)
    state = tx.create(tx.init_params(init(divided), jax.random.key(0)))
    step, losses = tx.train_step(loss_of(divided), **options), []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(nn.meta.unbox(tx.unshard(state.params)))


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6), found[1], expected[1])


GRID = [(way, stage, name) for way in WAYS for stage in range(4) for name in OPTIMIZERS]


@pytest.mark.parametrize(("way", "stage", "name"), quick_or_slow(GRID, []))
def test_it_trains_as_on_one_device(way, stage, name):
    assert_same(trained(way, zero(way, stage, name)), on_one_device(way, name))
