"""As flax's lm1b: a pre-norm NNX decoder with sinusoids and dropout, label smoothing, weights of tokens, a
`TrainState` of the module's state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

from zerojax import zero_shard

VOCABULARY, WIDTH, LENGTH = 61, 30, 8  # most parameters are padded: 8 divides neither of the first two


def sinusoids(length, width):
    at = np.arange(length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(at), np.cos(at)], -1).reshape(length, width).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, dropout_rate=0.1, keep_rngs=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1)

    def __call__(self, x, mask, rngs):
        x += self.drop(self.attention(self.norm1(x), mask=mask, rngs=rngs), rngs=rngs)
        return x + self.drop(self.down(nnx.relu(self.up(self.norm2(x)))), rngs=rngs)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.1)
        self.blocks = nnx.List([Block(rngs) for _ in range(1)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, rngs=None):
        mask = nnx.combine_masks(nnx.make_causal_mask(tokens), nnx.make_attention_mask(tokens > 0, tokens > 0))
        x = jnp.pad(self.embed(tokens), ((0, 0), (1, 0), (0, 0)))[:, :-1]  # shifted to the right
        x = self.drop(x + sinusoids(LENGTH, WIDTH), rngs=rngs)
        for block in self.blocks:
            x = block(x, mask, rngs)
        return self.out(self.norm(x))


class TrainState(train_state.TrainState):
    graph: Any


def weighted_cross_entropy(logits, targets, weights, smoothing=0.1):
    soft = optax.smooth_labels(jax.nn.one_hot(targets, VOCABULARY), smoothing)
    return jnp.sum(weights * optax.softmax_cross_entropy(logits, soft)), weights.sum()


def compute_metrics(logits, targets, weights):
    loss, count = weighted_cross_entropy(logits, targets, weights)
    return {"loss": loss, "accuracy": jnp.sum(weights * (logits.argmax(-1) == targets)), "denominator": count}


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        lengths = draw.integers(1, LENGTH + 1, (16, 1))
        yield {"inputs": np.where(np.arange(LENGTH) < lengths, draw.integers(1, VOCABULARY, (16, LENGTH)), 0)}


schedule = optax.warmup_exponential_decay_schedule(0, 0.01, 2, 10, 0.9)
INNER = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)


def plain():
    graph, params = nnx.split(jax.jit(lambda key: Decoder(nnx.Rngs(key)))(jax.random.key(0)), nnx.Param)
    state = TrainState.create(apply_fn=graph.apply, params=params, tx=INNER, graph=graph)

    @jax.jit
    def train_step(state, batch, key):
        key = jax.random.fold_in(key, state.step)

        def loss_fn(params):
            module = nnx.merge(state.graph, params)
            module.train()
            inputs = batch["inputs"]
            weights = jnp.where(inputs > 0, 1.0, 0.0)
            logits = module(inputs, nnx.Rngs(dropout=key))
            loss, count = weighted_cross_entropy(logits, inputs, weights)
            return loss / count, (logits, weights)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, (logits, weights)), grads = grad_fn(state.params)
        metrics = compute_metrics(logits, batch["inputs"], weights) | {"learning_rate": schedule(state.step)}
        return state.apply_gradients(grads=grads), metrics

    @jax.jit
    def eval_step(params, batch):
        module = nnx.merge(state.graph, params)
        module.eval()
        weights = jnp.where(batch["inputs"] > 0, 1.0, 0.0)
        return compute_metrics(module(batch["inputs"]), batch["inputs"], weights)

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch, jax.random.key(1))
        history += [metrics, eval_step(state.params, batch)]
    return history


def zero(stage, mesh=None):
    graph, params = nnx.split(jax.jit(lambda key: Decoder(nnx.Rngs(key)))(jax.random.key(0)), nnx.Param)
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=100)
    state = TrainState.create(apply_fn=graph.apply, params=tx.shard(params), tx=tx, graph=graph)

    @jax.jit
    def train_step(state, batch, key):
        key = jax.random.fold_in(key, state.step)

        def loss_fn(params, batch):
            module = nnx.merge(state.graph, params)
            module.train()
            inputs = batch["inputs"]
            weights = jnp.where(inputs > 0, 1.0, 0.0)
            logits = module(inputs, nnx.Rngs(dropout=key))
            loss, count = weighted_cross_entropy(logits, inputs, weights)
            return loss / count, (logits, weights)

        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        (_, (logits, weights)), grads = grad_fn(state.params, batch)
        metrics = compute_metrics(logits, batch["inputs"], weights) | {"learning_rate": schedule(state.step)}
        return state.apply_gradients(grads=grads), metrics

    @jax.jit
    def eval_step(params, batch):
        module = nnx.merge(state.graph, params)
        module.eval()
        weights = jnp.where(batch["inputs"] > 0, 1.0, 0.0)
        return compute_metrics(module(batch["inputs"]), batch["inputs"], weights)

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch, jax.random.key(1))
        history += [metrics, eval_step(state.params, batch)]
    return history
