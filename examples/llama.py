"""Llama in flax.linen: read published weights straight into shards, and continue a text.

    python examples/llama.py FOLDER                        a folder with the downloaded config.json and safetensors
    python examples/llama.py FOLDER --tokens 1 306 4658 --new 8 --stage 3 --dtype bfloat16

`published` alone connects the model to the names and shapes in the files. Export takes the same mapping. With the same
config.json, transformers loads the exported files.

For training on long sequences, `next_token_loss(Llama(config, loss_tiles=64, mlp_tiles=16))` computes the logits and
the feed-forward layers tile by tile (docs/long_context.md).
"""

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from gpt import causal_attention
from jax.ad_checkpoint import checkpoint_name
from train_gpt import mesh_of, positive

from zerojax import tiled, zero_shard
from zerojax.checkpoint import import_params


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and position embedding. `scaling` is Llama 3.1's: factor, low and high frequency, positions."""

    vocabulary: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float
    theta: float
    scaling: tuple[float, float, float, int] | None = None
    tied: bool = False


class FeedForward(nn.Module):
    """A gated feed-forward layer. It treats each position alone."""

    config: Config

    @nn.compact
    def __call__(self, h):
        dense = functools.partial(nn.Dense, use_bias=False)
        h = nn.silu(dense(self.config.hidden, name="gate")(h)) * dense(self.config.hidden, name="up")(h)
        return dense(self.config.width, name="down")(h)


class Block(nn.Module):
    """Attention, then a feed-forward layer in tiles of the sequence, each on a normalised copy of the stream."""

    config: Config
    mlp_tiles: int
    attention: Callable

    @nn.compact
    def __call__(self, x, _=None):
        c, x = self.config, checkpoint_name(x, "layer_input")
        norm = functools.partial(nn.RMSNorm, epsilon=c.epsilon)
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        h = norm(name="attention_norm")(x)
        q = dense((c.heads, c.head), name="query")(h)
        k, v = (dense((c.kv_heads, c.head), name=name)(h) for name in ("key", "value"))
        x = x + dense(c.width, axis=(-2, -1), name="out")(self.attention(rotate(q, c), rotate(k, c), v))
        h, mlp = norm(name="mlp_norm")(x), FeedForward(c, name="mlp")
        if self.mlp_tiles == 1 or self.is_initializing():
            return x + mlp(h), None
        pure: Any = FeedForward(c, parent=None).apply  # a bound module cannot be called in another loop
        return x + tiled(pure, tiles=self.mlp_tiles)(mlp.variables, h), None


class Llama(nn.Module):
    """Compute logits for the token that follows each of `tokens`. With `targets`, compute their losses in nats instead.

    Attributes:
        config: Sizes.
        loss_tiles: Number of tiles of the sequence in which the logits of `targets` are computed.
        mlp_tiles: Number of tiles in which the feed-forward layers are computed.
        attention: `attention(q, k, v)`, each (row, position, head, channel).
        policy: Policy of the layers' remat. It may offload "layer_input".
    """

    config: Config
    loss_tiles: int = 1
    mlp_tiles: int = 1
    attention: Callable = causal_attention
    policy: Callable | None = None

    @nn.compact
    def __call__(self, tokens, targets=None):
        c = self.config
        embed = nn.Embed(c.vocabulary, c.width, name="embed")
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False, policy=self.policy),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=c.layers,
        )
        x, _ = blocks(c, self.mlp_tiles, self.attention, name="layers")(embed(tokens), None)
        x = nn.RMSNorm(epsilon=c.epsilon, name="norm")(x)
        head = nn.Dense(c.vocabulary, use_bias=False, name="head")
        if targets is None:
            return embed.attend(x) if c.tied else head(x)
        kernel = embed.embedding.T if c.tied else head.variables["params"]["kernel"]
        nll = tiled(negative_log_likelihood, tiles=self.loss_tiles) if self.loss_tiles > 1 else negative_log_likelihood
        return nll(kernel, x, targets)


def negative_log_likelihood(kernel: jax.Array, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of each target, in nats, as float32."""
    return optax.softmax_cross_entropy_with_integer_labels((x @ kernel).astype(jnp.float32), targets)


def next_token_loss(model: Llama) -> Callable:
    """Return a loss: the mean negative log-likelihood of all tokens but the first, or of those that `real` marks."""

    def loss(params, tokens, real=None):
        nll: Any = model.apply(params, tokens[:, :-1], tokens[:, 1:])
        return jnp.mean(nll, where=None if real is None else real[:, 1:])

    return loss


def rotate(x: jax.Array, config: Config) -> jax.Array:
    """Apply rotary position embedding to `x` of (batch, position, head, channel), with float32 angles."""
    half = x.shape[-1] // 2
    frequency = config.theta ** (-jnp.arange(half) / half)
    if config.scaling:
        factor, low, high, positions = config.scaling
        cycles = positions * frequency / (2 * math.pi)
        kept = jnp.clip((cycles - low) / (high - low), 0, 1)  # 1 for high frequencies, 0 for low ones
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return rotated.astype(x.dtype)


def published(config: Config) -> dict[str, Any]:
    """Return the mapping from published names and shapes to the parameters of `Llama`."""
    layer, leaf = "model.layers.{i}.", "params/layers/"
    dense = "out in -> in out"
    return {
        "model.embed_tokens.weight": "params/embed/embedding",
        layer + "input_layernorm.weight": leaf + "attention_norm/scale",
        layer + "self_attn.q_proj.weight": (leaf + "query/kernel", "(h d) e -> e h d"),
        layer + "self_attn.k_proj.weight": (leaf + "key/kernel", "(h d) e -> e h d"),
        layer + "self_attn.v_proj.weight": (leaf + "value/kernel", "(h d) e -> e h d"),
        layer + "self_attn.o_proj.weight": (leaf + "out/kernel", "e (h d) -> h d e"),
        layer + "self_attn.rotary_emb.inv_freq": None,  # in old files
        layer + "post_attention_layernorm.weight": leaf + "mlp_norm/scale",
        layer + "mlp.gate_proj.weight": (leaf + "mlp/gate/kernel", dense),
        layer + "mlp.up_proj.weight": (leaf + "mlp/up/kernel", dense),
        layer + "mlp.down_proj.weight": (leaf + "mlp/down/kernel", dense),
        "model.norm.weight": "params/norm/scale",
        "lm_head.weight": None if config.tied else ("params/head/kernel", dense),
    }


def read_config(folder: Path) -> Config:
    """Read the published config.json, and refuse features that this model does not have."""
    said = json.loads((folder / "config.json").read_text())
    rope = said.get("rope_parameters") or {
        "rope_theta": said.get("rope_theta", 1e4),
        **(said.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", "default")
    if said.get("attention_bias") or said.get("mlp_bias") or said["hidden_act"] != "silu" or kind not in ROPES:
        raise SystemExit(f"{folder}/config.json has biases, an activation or a position embedding that is not here.")
    return Config(
        vocabulary=said["vocab_size"],
        width=said["hidden_size"],
        hidden=said["intermediate_size"],
        layers=said["num_hidden_layers"],
        heads=said["num_attention_heads"],
        kv_heads=said.get("num_key_value_heads") or said["num_attention_heads"],
        head=said.get("head_dim") or said["hidden_size"] // said["num_attention_heads"],
        epsilon=said["rms_norm_eps"],
        theta=rope["rope_theta"],
        scaling=tuple(rope[key] for key in SCALING) if kind == "llama3" else None,
        tied=said.get("tie_word_embeddings", False),
    )


ROPES = ("default", "llama3")
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def shapes_of(config: Config, dtype: Any = jnp.float32) -> Any:
    """Return the shapes of the parameters, without initialising them."""
    shapes = jax.eval_shape(Llama(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def main() -> None:
    args = options()
    config = read_config(args.folder)
    tx = zero_shard(optax.identity(), stage=args.stage, mesh=mesh_of(args.devices))
    params = import_params(args.folder, tx.shard(shapes_of(config, args.dtype)), mapping=published(config))

    def next_token(params, tokens, count):
        logits: Any = Llama(config).apply(params, tokens)
        return jnp.argmax(logits[0, count - 1])

    step = tx.eval_step(next_token)
    tokens = (
        jnp.zeros((1, len(args.tokens) + args.new), jnp.int32).at[0, : len(args.tokens)].set(jnp.array(args.tokens))
    )
    for count in range(len(args.tokens), tokens.shape[1]):
        tokens = tokens.at[0, count].set(step(params, tokens, count))
    print(*tokens[0].tolist())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="to continue (default: 1, the begin token)")
    parser.add_argument("--new", type=positive, default=8, help="number of tokens to add (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--devices", type=positive, help="number of devices (default: all GPUs, or 8 simulated)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder} has no config.json")
    return args


if __name__ == "__main__":
    main()
