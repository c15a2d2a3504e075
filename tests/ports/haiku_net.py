"""A Haiku net with batch norm and dropout, whose state and keys go by hand."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Tuning, zero_shard


@hk.transform_with_state
def net(x, train):
    x = hk.nets.MLP([64, 32], activate_final=True)(x)
    x = hk.BatchNorm(True, True, 0.9)(x, is_training=train)
    if train:
        x = hk.dropout(hk.next_rng_key(), 0.3, x)
    return hk.Linear(10)(x)


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield {"x": draw.normal(size=(16, 12)).astype(np.float32), "y": draw.integers(0, 10, 16)}


def loss_fn(params, batch, state, key):
    logits, state = net.apply(params, state, key, batch["x"], True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), (state, logits)


def accuracy(logits, batch):
    return jnp.mean(logits.argmax(-1) == batch["y"])


def plain():
    params, state = jax.jit(net.init, static_argnums=2)(jax.random.key(0), next(batches())["x"], True)
    tx = optax.adam(3e-3)
    opt_state = tx.init(params)

    @jax.jit
    def update(params, opt_state, state, batch, key):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (state, logits)), grads = grad_fn(params, batch, state, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, (loss, accuracy(logits, batch))

    @jax.jit
    def evaluate(params, batch, state):
        return accuracy(net.apply(params, state, None, batch["x"], False)[0], batch)

    history, keys = [], hk.PRNGSequence(1)
    for batch in batches():
        params, opt_state, state, metrics = update(params, opt_state, state, batch, next(keys))
        history += [metrics, evaluate(params, batch, state)]
    return history


def zero(stage, mesh=None):
    params, state = jax.jit(net.init, static_argnums=2)(jax.random.key(0), next(batches())["x"], True)
    tx = zero_shard(optax.adam(3e-3), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    params = tx.shard(params)
    opt_state = tx.init(params)

    @jax.jit
    def update(params, opt_state, state, batch, key):
        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        (loss, (state, logits)), grads = grad_fn(params, batch, state, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, (loss, accuracy(logits, batch))

    @jax.jit
    def evaluate(params, batch, state):
        return accuracy(net.apply(params, state, None, batch["x"], False)[0], batch)

    history, keys = [], hk.PRNGSequence(1)
    for batch in batches():
        params, opt_state, state, metrics = update(params, opt_state, state, batch, next(keys))
        history += [metrics, evaluate(params, batch, state)]
    return history
