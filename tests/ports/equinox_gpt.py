"""A GPT in Equinox: a module with functions among its leaves, `eqx.filter_jit`, dropout keys by argument."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Tuning, zero_shard

VOCABULARY, WIDTH, LENGTH = 61, 30, 8  # most leaves are padded: 8 divides neither of the first two


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, dropout_p=0.1, key=a)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 64, 1, jax.nn.gelu, key=b)
        self.drop = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        a, b = jax.random.split(key)
        y = jax.vmap(self.norm1)(x)
        x += self.attention(y, y, y, mask=jnp.tri(LENGTH, dtype=bool), key=a)
        return x + self.drop(jax.vmap(self.mlp)(jax.vmap(self.norm2)(x)), key=b)


class GPT(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: jax.Array
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, *keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, key=a)
        self.positions = 0.02 * jax.random.normal(b, (LENGTH, WIDTH))
        self.blocks = [Block(key) for key in keys]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=c)

    def __call__(self, tokens, key):
        x = jax.vmap(self.tokens)(tokens) + self.positions
        for block, k in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, k)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch[:, :-1], jax.random.split(key, len(batch)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield draw.integers(0, VOCABULARY, (16, LENGTH + 1))


def plain():
    model = GPT(jax.random.key(0))
    tx = optax.adamw(3e-3)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state, batch, key):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch, key)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    @eqx.filter_jit
    def evaluate(model, batch):
        return loss_fn(eqx.nn.inference_mode(model), batch, jax.random.key(2))

    history = []
    for i, batch in enumerate(batches()):
        model, opt_state, loss = make_step(model, opt_state, batch, jax.random.key(i))
        history += [loss, evaluate(model, batch)]
    return history


def zero(stage, mesh=None):
    model, static = eqx.partition(GPT(jax.random.key(0)), eqx.is_inexact_array)
    tx = zero_shard(optax.adamw(3e-3), stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    model = tx.shard(model)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state, batch, key):
        of_arrays = lambda model, *args: loss_fn(eqx.combine(model, static), *args)
        loss, grads = tx.value_and_grad(of_arrays)(model, batch, key)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    @tx.eval_step
    def evaluate(model, batch):
        return loss_fn(eqx.nn.inference_mode(eqx.combine(model, static)), batch, jax.random.key(2))

    history = []
    for i, batch in enumerate(batches()):
        model, opt_state, loss = make_step(model, opt_state, batch, jax.random.key(i))
        history += [loss, evaluate(model, batch)]
    return history
