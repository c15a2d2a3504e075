"""As flax's sst2: an LSTM in Linen with dropout, a `TrainState`, metrics summed over the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from flax.training.train_state import TrainState

from zerojax import zero_shard

VOCABULARY, WIDTH, LENGTH = 101, 20, 6  # the embedding is padded: 8 divides neither


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens, length, deterministic):
        drop = lambda x: nn.Dropout(0.3)(x, deterministic=deterministic)
        x = drop(nn.Embed(VOCABULARY, WIDTH)(tokens))
        (_, x), _ = nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True)(x, seq_lengths=length)
        return nn.Dense(1)(drop(nn.tanh(nn.Dense(32)(x))))


class Metrics(struct.PyTreeNode):
    loss: jax.Array
    accuracy: jax.Array
    count: int


def compute_metrics(labels, logits):
    losses = optax.sigmoid_binary_cross_entropy(logits, labels[:, None])
    return Metrics(loss=losses.sum(), accuracy=((logits > 0) == labels[:, None]).sum(), count=len(labels))


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield {
            "tokens": draw.integers(0, VOCABULARY, (16, LENGTH)),
            "length": draw.integers(1, LENGTH + 1, 16),
            "label": draw.integers(0, 2, 16).astype(np.float32),
        }


INNER = optax.chain(optax.sgd(0.1, momentum=0.9), optax.add_decayed_weights(3e-6))


def plain():
    model = Classifier()
    example = next(batches())
    params = jax.jit(model.init, static_argnums=3)(jax.random.key(0), example["tokens"], example["length"], True)[
        "params"
    ]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=INNER)

    @jax.jit
    def train_step(state, batch, rngs):
        rngs = {name: jax.random.fold_in(rng, state.step) for name, rng in rngs.items()}

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], batch["length"], False, rngs=rngs)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["label"][:, None])), logits

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, logits), grads = grad_fn(state.params)
        return state.apply_gradients(grads=grads), compute_metrics(batch["label"], logits)

    @jax.jit
    def eval_step(state, batch):
        logits = state.apply_fn({"params": state.params}, batch["tokens"], batch["length"], True)
        return compute_metrics(batch["label"], logits)

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch, {"dropout": jax.random.key(1)})
        history += [metrics, eval_step(state, batch)]
    return history


def zero(stage, mesh=None):
    model = Classifier()
    example = next(batches())
    params = jax.jit(model.init, static_argnums=3)(jax.random.key(0), example["tokens"], example["length"], True)[
        "params"
    ]
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=100)
    state = TrainState.create(apply_fn=model.apply, params=tx.shard(params), tx=tx)

    @jax.jit
    def train_step(state, batch, rngs):
        rngs = {name: jax.random.fold_in(rng, state.step) for name, rng in rngs.items()}

        def loss_fn(params, batch):
            logits = state.apply_fn({"params": params}, batch["tokens"], batch["length"], False, rngs=rngs)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["label"][:, None])), logits

        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        (_, logits), grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), compute_metrics(batch["label"], logits)

    @jax.jit
    def eval_step(state, batch):
        logits = state.apply_fn({"params": state.params}, batch["tokens"], batch["length"], True)
        return compute_metrics(batch["label"], logits)

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch, {"dropout": jax.random.key(1)})
        history += [metrics, eval_step(state, batch)]
    return history
