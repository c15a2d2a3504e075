"""As flax's imagenet: a residual net in Linen with batch statistics, weight decay in the loss, a `TrainState`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

from zerojax import Tuning, zero_shard


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        norm = lambda: nn.BatchNorm(use_running_average=not train, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(32, (3, 3), (2, 2), use_bias=False)(x)))
        y = norm()(nn.Conv(32, (3, 3), use_bias=False)(y))
        x = nn.relu(y + norm()(nn.Conv(32, (1, 1), (2, 2), use_bias=False)(x)))
        return nn.Dense(10)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 10)).mean()


def compute_metrics(logits, labels):
    return {"loss": cross_entropy(logits, labels), "accuracy": jnp.mean(logits.argmax(-1) == labels)}


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield {"image": draw.normal(size=(16, 8, 8, 3)).astype(np.float32), "label": draw.integers(0, 10, 16)}


schedule = optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 10)
INNER = optax.sgd(schedule, momentum=0.9, nesterov=True)


def plain():
    model = ResNet()
    variables = jax.jit(model.init)(jax.random.key(0), next(batches())["image"])
    params, statistics = variables["params"], variables["batch_stats"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=INNER, batch_stats=statistics)

    @jax.jit
    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return cross_entropy(logits, batch["label"]) + 0.5e-4 * penalty, (changed, logits)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, (changed, logits)), grads = grad_fn(state.params)
        metrics = compute_metrics(logits, batch["label"]) | {"learning_rate": schedule(state.step)}
        return state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"]), metrics

    @jax.jit
    def eval_step(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = state.apply_fn(variables, batch["image"], train=False, mutable=False)
        return compute_metrics(logits, batch["label"])

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch)
        history += [metrics, eval_step(state, batch)]
    return history


def zero(stage, mesh=None):
    model = ResNet()
    variables = jax.jit(model.init)(jax.random.key(0), next(batches())["image"])
    params, statistics = variables["params"], variables["batch_stats"]
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    state = TrainState.create(apply_fn=model.apply, params=tx.shard(params), tx=tx, batch_stats=statistics)

    @jax.jit
    def train_step(state, batch):
        def loss_fn(params, batch):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return cross_entropy(logits, batch["label"]) + 0.5e-4 * penalty, (changed, logits)

        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        (_, (changed, logits)), grads = grad_fn(state.params, batch)
        metrics = compute_metrics(logits, batch["label"]) | {"learning_rate": schedule(state.step)}
        return state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"]), metrics

    @jax.jit
    def eval_step(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = state.apply_fn(variables, batch["image"], train=False, mutable=False)
        return compute_metrics(logits, batch["label"])

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch)
        history += [metrics, eval_step(state, batch)]
    return history
