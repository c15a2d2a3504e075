"""Flax loops, linen and nnx, run unchanged around a sharded transformation."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import zerojax.flax_nnx
from zerojax import Precision, Tuning, report, zero_shard

STAGES = [0, 3]
X = jax.random.normal(jax.random.key(0), (16, 8))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(13)(nn.relu(nn.Dense(64)(x)))


INNER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def zero(stage, count=8, **options):
    return zero_shard(INNER, stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=20), **options)


def linen_loop(tx, params, grad):
    state = TrainState.create(apply_fn=Dense().apply, params=params, tx=tx)

    @jax.jit
    def step(state, batch):
        loss, grads = grad(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    for _ in range(3):
        state, loss = step(state, X)
    return state, loss


def linen_loss(params, batch):
    return jnp.mean(Dense().apply({"params": params}, batch) ** 2)


def linen_params():
    return Dense().init(jax.random.key(1), X)["params"]


@functools.cache
def plain_linen_loop(tx):
    return linen_loop(tx, linen_params(), jax.value_and_grad(linen_loss))


@pytest.mark.parametrize(
    ("stage", "sharded"), quick_or_slow(list(itertools.product(STAGES, (False, True))), [(3, True)])
)
def test_a_linen_train_state_runs_unchanged(stage, sharded):
    tx = zero(stage)
    plain, loss = plain_linen_loop(INNER)
    params, grad = linen_params(), jax.value_and_grad(linen_loss)
    if sharded:
        params, grad = tx.shard(params), tx.value_and_grad(linen_loss)
    state, found = linen_loop(tx, params, grad)
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), tx.unshard(state.params), plain.params)
    fraction = report(state).bytes["opt_state"] / report(plain).bytes["opt_state"]
    assert fraction < (0.13 if stage else 1.01)


def test_predicates_know_nnx_parameters_by_one_path(mesh):
    """`nnx.Optimizer` and `shard_module` flatten a module's state to different depths."""
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    precision = Precision.bf16(keep=lambda path, leaf: path == "bias")
    tx = zero_shard(
        optax.sgd(0.1), stage=2, mesh=mesh, precision=precision, trainable=lambda path, leaf: path == "kernel"
    )
    zerojax.flax_nnx.shard_module(model, tx)
    before = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    assert {k: v.dtype for k, v in before.items()} == {"kernel": jnp.float32, "bias": jnp.float32}  # no bit is lost
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    _, grads = zerojax.flax_nnx.value_and_grad(tx, lambda m, b: jnp.mean(m(b) ** 2))(model, X)
    optimizer.update(model, grads)
    after = nnx.to_pure_dict(nnx.state(model))
    assert not np.array_equal(after["kernel"], before["kernel"])
    np.testing.assert_array_equal(after["bias"], before["bias"])
