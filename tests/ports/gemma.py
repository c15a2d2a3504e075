"""As flax's gemma: an NNX decoder with rotary positions, GeGLU and annotations for tensor parallelism."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType

from zerojax import Tuning, zero_shard

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 8
DEPTH = WIDTH // HEADS


def weight(rngs, shape, *axes):
    init = nnx.with_partitioning(nnx.initializers.normal(0.1), axes)
    return nnx.Param(init(rngs.params(), shape))


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)


def rotated(x, positions):
    angles = positions[..., None] / 10_000 ** (jnp.arange(0, DEPTH, 2) / DEPTH)
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = (nnx.Param(jnp.zeros(WIDTH)) for _ in range(2))
        self.q = weight(rngs, (HEADS, WIDTH, DEPTH), "model", None, None)
        self.kv = weight(rngs, (2, WIDTH, DEPTH), None, None, None)  # of one head, as in the smallest Gemma
        self.o = weight(rngs, (HEADS, DEPTH, WIDTH), "model", None, None)
        self.gate = weight(rngs, (2, WIDTH, 64), None, None, "model")
        self.down = weight(rngs, (64, WIDTH), "model", None)

    def __call__(self, x, positions, mask):
        y = rms_norm(x, self.norm1[...])
        q = rotated(jnp.einsum("btd,hdk->bthk", y, self.q[...]), positions) / DEPTH**0.5
        k, v = jnp.einsum("btd,ndk->nbtk", y, self.kv[...])
        logits = jnp.einsum("bthk,bsk->bhts", q, rotated(k[:, :, None], positions)[:, :, 0])
        logits = 50 * jnp.tanh(logits / 50)
        shares = jax.nn.softmax(jnp.where(mask[:, None], logits, -1e9))
        x += jnp.einsum("bhts,bsk,hkd->btd", shares, v, self.o[...])
        gate, up = jnp.einsum("btd,ndf->nbtf", rms_norm(x, self.norm2[...]), self.gate[...])
        return x + (jax.nn.gelu(gate) * up) @ self.down[...]


class Gemma(nnx.Module):
    def __init__(self, rngs):
        self.embed = weight(rngs, (VOCABULARY, WIDTH), "model", None)
        self.blocks = nnx.List([Block(rngs)])
        self.norm = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, tokens, positions, mask):
        x = self.embed[...][tokens] * WIDTH**0.5
        for block in self.blocks:
            x = block(x, positions, mask)
        return rms_norm(x, self.norm[...]) @ self.embed[...].T


class TrainState(train_state.TrainState):
    graph: Any


def compute_metrics(logits, targets, weights):
    losses = weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = jnp.sum(weights * (logits.argmax(-1) == targets))
    return {"loss": losses.sum(), "accuracy": right, "denominator": weights.sum()}


def masks(tokens):
    there = tokens > 0
    mask = there[:, None] & jnp.tri(LENGTH, dtype=bool)
    return there.astype(jnp.float32), jnp.cumsum(there, -1) - there, mask


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        lengths = draw.integers(1, LENGTH + 1, (16, 1))
        tokens = np.where(np.arange(LENGTH + 1) < lengths + 1, draw.integers(1, VOCABULARY, (16, LENGTH + 1)), 0)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


INNER = optax.adamw(1e-2, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)


def plain():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    create = lambda key: nnx.split(Gemma(nnx.Rngs(key)))
    with jax.set_mesh(mesh):
        graph, params = jax.jit(create)(jax.random.key(0))
    state = TrainState.create(apply_fn=graph.apply, params=params, tx=INNER, graph=graph)

    @jax.jit
    def train_step(state, batch):
        weights, positions, mask = masks(batch["inputs"])

        def loss_fn(params):
            logits = nnx.merge(state.graph, params)(batch["inputs"], positions, mask)
            metrics = compute_metrics(logits, batch["targets"], weights)
            return metrics["loss"] / metrics["denominator"], logits

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (_, logits), grads = grad_fn(state.params)
        return state.apply_gradients(grads=grads), compute_metrics(logits, batch["targets"], weights)

    @jax.jit
    def eval_step(params, batch):
        weights, positions, mask = masks(batch["inputs"])
        logits = nnx.merge(graph, params)(batch["inputs"], positions, mask)
        return compute_metrics(logits, batch["targets"], weights)

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch)
        history += [metrics, eval_step(state.params, batch)]
    return history


def zero(stage, mesh=None):
    mesh = mesh or jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    create = lambda key: nnx.split(Gemma(nnx.Rngs(key)))
    with jax.set_mesh(mesh):
        graph, params = jax.jit(create)(jax.random.key(0))
    tx = zero_shard(INNER, stage=stage, mesh=mesh, tuning=Tuning(persist_below=100))
    state = TrainState.create(apply_fn=graph.apply, params=tx.shard(params), tx=tx, graph=graph)

    @jax.jit
    def train_step(state, batch):
        weights, positions, mask = masks(batch["inputs"])

        def loss_fn(params, batch):
            logits = nnx.merge(state.graph, params)(batch["inputs"], positions, mask)
            metrics = compute_metrics(logits, batch["targets"], weights)
            return metrics["loss"] / metrics["denominator"], logits

        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        (_, logits), grads = grad_fn(state.params, batch)
        return state.apply_gradients(grads=grads), compute_metrics(logits, batch["targets"], weights)

    @jax.jit
    def eval_step(params, batch):
        weights, positions, mask = masks(batch["inputs"])
        logits = nnx.merge(graph, params)(batch["inputs"], positions, mask)
        return compute_metrics(logits, batch["targets"], weights)

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch)
        history += [metrics, eval_step(state.params, batch)]
    return history
