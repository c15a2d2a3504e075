"""A decoder as NanoDO has it: remat blocks, kernels annotated for a mesh, a schedule in `inject_hyperparams`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from zerojax import zero_shard

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 32, 2, 2, 64, 8
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
INNER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adamw)(SCHEDULE, b2=0.98, weight_decay=0.1)
)
by_data = lambda *names: nn.with_partitioning(nn.initializers.lecun_normal(), names)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        project = functools.partial(nn.DenseGeneral, (HEADS, WIDTH // HEADS), use_bias=False)
        q, k, v = (project(kernel_init=by_data("data", None, None), name=n)(x) for n in ("query", "key", "value"))
        q, k = (nn.LayerNorm(use_bias=False, name=n)(y) for n, y in (("norm_q", q), ("norm_k", k)))
        scores = jnp.einsum("blhd,bmhd->bhlm", q * q.shape[-1] ** -0.5, k)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
        return nn.DenseGeneral(WIDTH, (-2, -1), use_bias=False, kernel_init=by_data(None, None, "data"))(mixed)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Attention()(nn.RMSNorm()(x))
        h = nn.gelu(nn.Dense(4 * WIDTH, use_bias=False, kernel_init=by_data("data", None))(nn.RMSNorm()(x)))
        return x + nn.Dense(WIDTH, use_bias=False, kernel_init=by_data(None, "data"))(h)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WORDS, WIDTH, embedding_init=by_data(None, "data"))
        positions = nn.Embed(LENGTH, WIDTH, embedding_init=by_data(None, "data"))
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        for _ in range(LAYERS):
            x = nn.remat(Block)()(x)
        return embed.attend(nn.RMSNorm()(x))


def batches():
    draw = np.random.default_rng(0)
    for _ in range(3):
        yield draw.integers(0, WORDS, (16, LENGTH + 1))  # word 0 is padding


def cross_entropy(model, params, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, tokens[:, :-1]), tokens[:, 1:])
    weights = tokens[:, 1:] > 0
    return jnp.sum(losses * weights) / jnp.sum(weights), jnp.sum(weights)


def plain():
    model = Decoder()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    init = lambda key: TrainState.create(
        apply_fn=model.apply, params=model.init(key, jnp.zeros((1, LENGTH), int)), tx=INNER
    )
    shardings = nn.get_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
    state = jax.jit(init, out_shardings=shardings)(jax.random.key(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        def loss_fn(params):
            return cross_entropy(model, params, batch)

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, words), grads = grad_fn(state.params)
        metrics = {"loss": loss, "words": words, "norm": optax.global_norm(grads)}
        return state.apply_gradients(grads=grads), metrics

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch)
        history.append(metrics)
    return history, nn.unbox(state.params)


def zero(stage, mesh=None):
    model = Decoder()
    tx = zero_shard(INNER, stage=stage, mesh=mesh, persist_below=20)
    params = tx.init_params(lambda key: nn.unbox(model.init(key, jnp.zeros((1, LENGTH), int))), jax.random.key(0))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        def loss_fn(params, batch):
            return cross_entropy(model, params, batch)

        grad_fn = tx.value_and_grad(loss_fn, has_aux=True)
        (loss, words), grads = grad_fn(state.params, batch)
        metrics = {"loss": loss, "words": words, "norm": optax.global_norm(grads)}
        return state.apply_gradients(grads=grads), metrics

    history = []
    for batch in batches():
        state, metrics = train_step(state, batch)
        history.append(metrics)
    return history, tx.unshard(state.params)
