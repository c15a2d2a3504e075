"""A byte-level GPT in flax.linen, with scanned, rematerialised blocks and a tied embedding."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from optax.contrib import MuonDimensionNumbers

from zerojax import ZeroTransformation

VOCABULARY = 256
# Every block starts as the identity. That saves a short run about a hundred steps.
SILENT = nn.initializers.zeros
KERNEL = nn.linear.default_kernel_init


def over(axis: str | None, init: Callable, axes: tuple) -> Callable:
    """Return an initialiser that shards its dims over mesh `axes` (tensor parallel). Without `axis`, return `init`."""
    return nn.with_partitioning(init, axes) if axis else init


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute causal attention of (row, position, head, channel). Groups of query heads may share keys and values.

    On GPUs this is cuDNN's kernel, which takes bfloat16 and float16. Everywhere else it is XLA's, which stores scores.
    """
    fused = jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[-1] % 8 == 0
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if fused else "xla")


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on a normalised copy of the residual stream."""

    heads: int
    context: int = 0
    axis: str | None = None

    @nn.compact
    def __call__(self, x, _=None):
        width = x.shape[-1]
        head = (self.heads, width // self.heads)
        h = nn.RMSNorm()(x)
        of_heads = over(self.axis, KERNEL, (None, self.axis, None))
        project = functools.partial(nn.DenseGeneral, head, use_bias=False, kernel_init=of_heads)
        q, k, v = (project(name=name)(h) for name in ("query", "key", "value"))
        # Attention asks for float16 products that are summed in float32. XLA for CPUs has none.
        exact = jnp.float32 if x.dtype == jnp.float16 and jax.default_backend() == "cpu" else x.dtype
        past = self.variable("cache", "past", jnp.zeros, (), jnp.int32).value if self.context else 0
        q, k, v = (a.astype(exact) for a in (rotate(q, past), rotate(k, past), v))
        if self.context:
            k, v = self.cached(k, "keys", past), self.cached(v, "values", past)
            self.put_variable("cache", "past", past + x.shape[1])
            seen = jnp.arange(self.context) <= past + jnp.arange(x.shape[1])[:, None]
            attended = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None]).astype(x.dtype)
        else:
            attended = causal_attention(q, k, v).astype(x.dtype)
        silent = over(self.axis, SILENT, (self.axis, None, None))
        x = x + nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, kernel_init=silent, name="out")(attended)
        up, down = over(self.axis, KERNEL, (None, self.axis)), over(self.axis, SILENT, (self.axis, None))
        h = nn.gelu(nn.Dense(4 * width, use_bias=False, kernel_init=up, name="up")(nn.RMSNorm()(x)))
        return x + nn.Dense(width, use_bias=False, kernel_init=down, name="down")(h), None

    def cached(self, new, name: str, past):
        """Write `new` keys or values into the cache at position `past`, and return all `context` positions."""
        shape = (new.shape[0], self.context, *new.shape[2:])
        cache = self.variable("cache", name, jnp.zeros, shape, new.dtype)
        cache.value = lax.dynamic_update_slice_in_dim(cache.value, new, past, axis=1)
        return cache.value


class GPT(nn.Module):
    """Compute logits for the byte that follows each byte of `tokens`.

    With `context`, the blocks keep the keys and values of that many positions in the collection "cache", and `tokens`
    follow the cached ones. With `axis`, heads and features are divided over that axis of the mesh.
    """

    width: int
    layers: int
    heads: int
    context: int = 0
    axis: str | None = None

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCABULARY, self.width, embedding_init=nn.initializers.normal(0.02))
        # `scan` compiles one block for any depth. `remat` keeps the activations of one block at a time.
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "cache": 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = blocks(self.heads, self.context, self.axis, name="blocks")(nn.RMSNorm()(embed(tokens)), None)
        return embed.attend(nn.RMSNorm()(x))


def muon_matrices(params: Any) -> Any:
    """Say which parameters are matrices for Muon, for `muon_weight_dimension_numbers`. Adam trains the others.

    Dim 0 of a block's parameters is the layer. The heads together are the columns of one matrix, or in `out` its rows.
    """

    def one(path, x):
        name = path[-2].key
        if name in ("query", "key", "value"):
            return MuonDimensionNumbers(1, (2, 3))
        if name == "out":
            return MuonDimensionNumbers((1, 2), 3)
        return MuonDimensionNumbers(1, 2) if name in ("up", "down") else None

    return jax.tree_util.tree_map_with_path(one, params)


def rotate(x: jax.Array, start: int | jax.Array = 0) -> jax.Array:
    """Apply rotary position embedding (Su et al. 2021, arXiv 2104.09864) to `x` of (batch, position, head, channel).

    Positions count from `start`.

    Angles are float32 whatever the type of `x`: bfloat16 cannot tell position 256 from 257.
    """
    half = x.shape[-1] // 2
    angle = (start + jnp.arange(x.shape[1]))[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    turned = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return turned.astype(x.dtype)


def next_byte_loss(model: GPT):
    """Return a loss: the mean negative log-likelihood, in nats, of every byte of a window except the first.

    The model computes in the type of its parameters, the loss in float32.
    """

    def loss(params, windows):
        logits: Any = model.apply(params, windows[:, :-1])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), windows[:, 1:, None], -1))

    return loss


def generator(tx: ZeroTransformation, model: GPT, count: int, temperature: float = 0.8) -> Callable:
    """Return a function `generate(params, prompts, key)` that draws `count` bytes after each row of `prompts`.

    At temperature 0 it takes the likeliest byte. Stored parameters are gathered layer by layer for every byte, because
    the scan over bytes calls an eval step. A scan inside an eval step would gather all its parameters at its start.
    """

    def forward(params, tokens, cache, caching):
        logits, cache = caching.apply(params | cache, tokens, mutable=["cache"])
        return logits[:, -1].astype(jnp.float32), cache

    step = tx.eval_step(forward)

    @jax.jit
    def generate(params, prompts, key):
        caching = model.clone(context=prompts.shape[1] + count)

        def follow(carry, key):
            logits, cache = carry
            byte = jax.random.categorical(key, logits / temperature) if temperature else logits.argmax(-1)
            return step(params, byte[:, None], cache, caching), byte

        _, drawn = lax.scan(follow, step(params, prompts, {}, caching), jax.random.split(key, count))
        return drawn.T

    return generate
