"""Haliax as Levanter trains it: NamedArray leaves, a `Stacked` of remat blocks, `hax.named_jit`."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import optax

from zerojax import Tuning, zero_shard

if not hasattr(jax.core, "is_constant_dim"):
    jax.core.is_constant_dim = lambda dim: isinstance(dim, int)  # jax 0.12 removed what `hax.dot` calls

Batch, Pos, Embed, Heads, Head, Words = hax.make_axes(batch=16, position=8, embed=32, heads=2, head=16, words=64)
Layers, Mlp, KeyPos = hax.Axis("layers", 2), hax.Axis("mlp", 128), Pos.alias("key_position")
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3, weight_decay=0.1))


class Block(eqx.Module):
    norm_1: hnn.LayerNorm
    qkv: hnn.Linear
    out: hnn.Linear
    norm_2: hnn.LayerNorm
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        three = hax.Axis("qkv", 3)
        return Block(
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, (three, Heads, Head), key=keys[0], use_bias=False),
            hnn.Linear.init((Heads, Head), Embed, key=keys[1]),
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, Mlp, key=keys[2]),
            hnn.Linear.init(Mlp, Embed, key=keys[3]),
        )

    def __call__(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unbind("qkv")
        k, v = (y.rename({"position": "key_position"}) for y in (k, v))
        scores = hax.dot(q, k, axis="head") * Head.size**-0.5
        causal = hax.arange(Pos) >= hax.arange(KeyPos).broadcast_axis(Pos)
        weights = hnn.softmax(hax.where(causal, scores, -1e9), axis="key_position")
        x = x + self.out(hax.dot(weights, v, axis="key_position"))
        return x + self.down(hnn.gelu(self.up(self.norm_2(x))))


class Model(eqx.Module):
    words: hnn.Embedding
    positions: hax.NamedArray
    blocks: hnn.Stacked
    norm: hnn.LayerNorm

    @staticmethod
    def init(key):
        keys = jax.random.split(key, 3)
        blocks = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)(
            key=jax.random.split(keys[0], Layers.size)
        )
        positions = hax.random.normal(keys[2], (Pos, Embed)) * 0.1
        return Model(hnn.Embedding.init(Words, Embed, key=keys[1]), positions, blocks, hnn.LayerNorm.init(Embed))

    def __call__(self, tokens):
        x = self.words(tokens) + self.positions
        return self.words.unembed(self.norm(self.blocks.fold(x)))


def loss_fn(model, batch):
    seen, following = batch
    return hnn.cross_entropy_loss(model(seen), Words, hnn.one_hot(following, Words)).mean().scalar()


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        tokens = draw.integers(0, Words.size, (Batch.size, Pos.size + 1)).astype(np.int32)
        yield tuple(hax.named(x, (Batch, Pos)) for x in (tokens[:, :-1], tokens[:, 1:]))


def plain():
    model, tx = Model.init(jax.random.key(0)), INNER
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @hax.named_jit
    def train_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for batch in batches():
        model, opt_state, loss = train_step(model, opt_state, batch)
        losses.append(loss)
    return losses, jax.tree.leaves(model)


def zero(stage, mesh=None):
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    model = tx.init_params(Model.init, jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @hax.named_jit
    def train_step(model, opt_state, batch):
        loss, grads = tx.value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    losses = []
    for batch in batches():
        model, opt_state, loss = train_step(model, opt_state, batch)
        losses.append(loss)
    return losses, jax.tree.leaves(tx.unshard(model))
