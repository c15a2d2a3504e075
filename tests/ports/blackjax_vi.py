"""BlackJAX: mean-field variational inference of a Bayesian network, whose gradient BlackJAX takes itself."""

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Tuning, zero_shard

INNER = optax.adam(2e-2)


def position():
    return {"in": jnp.zeros((8, 24)), "bias": jnp.zeros(24), "out": jnp.zeros((24, 1))}


def rows():
    x = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)
    return x, np.sin(x[:, :1])


def logdensity(params, batch):
    x, y = batch
    mean = jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]
    prior = sum(jax.scipy.stats.norm.logpdf(leaf).sum() for leaf in jax.tree.leaves(params))
    return prior + jax.scipy.stats.norm.logpdf(y, mean, 0.3).sum()


def plain():
    of_params = lambda params: logdensity(params, rows())
    vi = blackjax.meanfield_vi(of_params, INNER, num_samples=4)
    state = vi.init(position())
    elbos = []
    for key in jax.random.split(jax.random.key(0), 4):
        state, info = jax.jit(vi.step)(key, state)
        elbos.append(info.elbo)
    return elbos, (state.mu, state.rho)


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    of_params = lambda params: tx.eval_step(logdensity)(params, rows())
    vi = blackjax.meanfield_vi(of_params, tx, num_samples=4)
    state = vi.init(tx.shard(position()))
    elbos = []
    for key in jax.random.split(jax.random.key(0), 4):
        state, info = jax.jit(vi.step)(key, state)
        elbos.append(info.elbo)
    return elbos, tx.unshard((state.mu, state.rho))
