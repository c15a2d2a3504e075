"""NumPyro's SVI: its `SVI` trains a VAE, whose guide and model have parameters, one of them positive."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

from zerojax import Tuning, zero_shard

WIDE, HIDDEN, LATENT = 16, 24, 4


def dense(name, rows, columns):
    weight = lambda key: jax.random.normal(key, (rows, columns)) * rows**-0.5
    return numpyro.param(f"{name}_w", weight), numpyro.param(f"{name}_b", jnp.zeros(columns))


def mlp(name, x, *widths):
    for i, columns in enumerate(widths):
        w, b = dense(f"{name}{i}", x.shape[-1], columns)
        x = (jnp.tanh if i + 1 < len(widths) else lambda x: x)(x @ w + b)
    return x


def model(x):
    noise = numpyro.param("noise", jnp.ones(WIDE), constraint=constraints.positive)
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([LATENT]).to_event(1))
        numpyro.sample("x", dist.Normal(mlp("decoder", z, HIDDEN, WIDE), noise).to_event(1), obs=x)


def guide(x):
    mean, log_scale = jnp.split(mlp("encoder", x, HIDDEN, 2 * LATENT), 2, axis=-1)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("z", dist.Normal(mean, jnp.exp(log_scale)).to_event(1))


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield draw.normal(size=(16, WIDE)).astype(np.float32)


INNER = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-2))


def plain():
    svi = SVI(model, guide, INNER, Trace_ELBO(num_particles=2))
    state = jax.jit(svi.init)(jax.random.key(0), next(batches()))
    update = jax.jit(svi.update)
    losses = []
    for batch in batches():
        state, loss = update(state, batch)
        losses.append(loss)
    return losses, svi.get_params(state)


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    elbo = Trace_ELBO(num_particles=2)

    class Sharded(Trace_ELBO):
        def loss(self, key, params, model, guide, batch):
            of_params = lambda params, batch, key: elbo.loss(key, params, model, guide, batch)
            return tx.eval_step(of_params)(params, batch, key)

    svi = SVI(model, guide, tx, Sharded())
    state = jax.jit(svi.init)(jax.random.key(0), next(batches()))
    state = state._replace(optim_state=svi.optim.init(tx.shard(svi.optim.get_params(state.optim_state))))
    update = jax.jit(svi.update)
    losses = []
    for batch in batches():
        state, loss = update(state, batch)
        losses.append(loss)
    return losses, tx.unshard(svi.get_params(state))
