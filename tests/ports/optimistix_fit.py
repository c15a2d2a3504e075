"""Optimistix: `minimise` runs an optax transformation in its own loop until it has converged."""

import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx

from zerojax import zero_shard

INNER = optax.adam(2e-2)


def init_params():
    draw = np.random.default_rng(0)
    weight = lambda *shape: jnp.asarray(draw.normal(size=shape) * shape[0] ** -0.5, jnp.float32)
    return {"in": weight(8, 24), "bias": jnp.zeros(24), "out": weight(24, 1)}


def rows():
    x = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)
    return x, np.sin(x[:, :1])


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"] - y) ** 2)


def plain():
    solver = optx.OptaxMinimiser(INNER, rtol=1e-2, atol=1e-2)
    solution = optx.minimise(loss_fn, solver, init_params(), args=rows(), max_steps=30)
    return loss_fn(solution.value, rows()), solution.stats["num_steps"], solution.value


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=20)
    solver = optx.OptaxMinimiser(tx, rtol=1e-2, atol=1e-2)
    solution = optx.minimise(tx.eval_step(loss_fn), solver, tx.shard(init_params()), args=rows(), max_steps=30)
    return tx.eval_step(loss_fn)(solution.value, rows()), solution.stats["num_steps"], tx.unshard(solution.value)
