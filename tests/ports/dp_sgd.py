"""JAX Privacy: DP-SGD. The gradient of each row is clipped, and noise is added to the sum, by its transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import clipping, noise_addition

from zerojax import Tuning, zero_shard

ROWS = 16
NOISE = noise_addition.gaussian_privatizer(stddev=0.1, prng_key=jax.random.key(7))
INNER = optax.chain(NOISE, optax.adam(1e-2))


def init_params():
    draw = np.random.default_rng(0)
    weight = lambda *shape: jnp.asarray(draw.normal(size=shape) * shape[0] ** -0.5, jnp.float32)
    return {"in": weight(12, 32), "bias": jnp.zeros(32), "out": weight(32, 10)}


def batches():
    draw = np.random.default_rng(1)
    for _ in range(3):
        yield {"x": draw.normal(size=(ROWS, 12)).astype(np.float32), "y": draw.integers(0, 10, ROWS)}


def loss_fn(params, batch):
    logits = jnp.tanh(batch["x"] @ params["in"] + params["bias"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def plain():
    params, tx = init_params(), INNER
    opt_state = tx.init(params)
    clipped = clipping.clipped_grad(loss_fn, l2_clip_norm=0.7, normalize_by=ROWS, return_values=True)

    @jax.jit
    def step(params, opt_state, batch):
        grads, aux = clipped(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, aux.values.mean()

    losses = []
    for batch in batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return losses, params


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    params = tx.shard(init_params())
    opt_state = tx.init(params)
    clipped = clipping.clipped_grad(loss_fn, l2_clip_norm=0.7, normalize_by=ROWS, return_values=True)
    private = jax.custom_vjp(lambda params, batch: clipped(params, batch)[1].values.mean())
    private.defvjp(
        lambda params, batch: (lambda grads, aux: (aux.values.mean(), grads))(*clipped(params, batch)),
        lambda grads, cotangent: (jax.tree.map(lambda g: cotangent * g, grads), None),
    )

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = tx.value_and_grad(private)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for batch in batches():
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return losses, tx.unshard(params)
