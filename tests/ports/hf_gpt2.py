"""Hugging Face's FlaxGPT2, from scratch: parameters and dropout keys by argument, a tied head, a `TrainState`."""

import jax
import numpy as np
import optax
from flax.training import train_state
from transformers import FlaxGPT2LMHeadModel, GPT2Config

from zerojax import zero_shard

LENGTH = 8
CONFIG = GPT2Config(vocab_size=61, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)


class TrainState(train_state.TrainState):
    dropout_rng: jax.Array


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels[:, 1:]).mean()


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        tokens = draw.integers(0, CONFIG.vocab_size, (16, LENGTH))
        yield {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": tokens}


INNER = optax.adamw(1e-3, weight_decay=0.01)


def plain():
    model = FlaxGPT2LMHeadModel(CONFIG, seed=0)
    state = TrainState.create(apply_fn=model, params=model.params, tx=INNER, dropout_rng=jax.random.key(1))

    @jax.jit
    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return cross_entropy(logits, labels)

        grad_fn = jax.value_and_grad(compute_loss)
        loss, grads = grad_fn(state.params)
        return state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng), loss

    @jax.jit
    def eval_step(params, batch):
        labels = batch.pop("labels")
        return cross_entropy(model(**batch, params=params, train=False)[0], labels)

    history = []
    for batch in batches():
        state, loss = train_step(state, batch)
        history += [loss, eval_step(state.params, batch)]
    return history


def zero(stage, mesh=None):
    model = FlaxGPT2LMHeadModel(CONFIG, seed=0)
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=100)
    params = tx.shard(model.params)
    state = TrainState.create(apply_fn=model, params=params, tx=tx, dropout_rng=jax.random.key(1))

    @jax.jit
    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params, batch):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return cross_entropy(logits, labels)

        grad_fn = tx.value_and_grad(compute_loss)
        loss, grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads, dropout_rng=new_dropout_rng), loss

    @jax.jit
    def eval_step(params, batch):
        labels = batch.pop("labels")
        return cross_entropy(model(**batch, params=params, train=False)[0], labels)

    history = []
    for batch in batches():
        state, loss = train_step(state, batch)
        history += [loss, eval_step(state.params, batch)]
    return history
