"""A stack of equal layers and its compiled step, whose bytes are compared with the paper's and the estimate's."""

import functools

import jax
import jax.numpy as jnp
import optax
from conftest import mesh_of

from zerojax import Tuning, zero_shard

WIDTH, DEPTH = 128, 6


def make_params():
    keys = jax.random.split(jax.random.key(0), DEPTH)
    layer = lambda key: {"w": jax.random.normal(key, (WIDTH, WIDTH)), "b": jnp.zeros(WIDTH), "g": jnp.ones(WIDTH)}
    return {f"layer{i}": layer(key) for i, key in enumerate(keys)}


def loss(params, batch):
    for layer in params.values():
        batch = jnp.tanh(batch @ layer["w"] * layer["g"] + layer["b"])
    return jnp.mean(batch**2)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
OPTIMIZERS = {"adamw": optax.adamw(1e-3), "clip-adamw": CLIPPED}


@functools.cache
def compiled_step(stage, name="clip-adamw", count=8, view="global"):
    tx = zero_shard(OPTIMIZERS[name], stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=1000), view=view)
    state = tx.create(jax.eval_shape(make_params))
    return tx.train_step(loss).lower(state, jax.ShapeDtypeStruct((48, WIDTH), jnp.float32)).compile()


# On CPU, jax 0.10 drops the barriers that keep a backward gather apart from the forward one, and merges the two.
MERGES = jax.__version_info__ < (0, 11)
