"""Llama in flax.linen, its published weights read straight into shards, and the tokens that it continues with.

    python examples/llama.py FOLDER                        config.json and safetensors, as they are downloaded
    python examples/llama.py FOLDER --tokens 1 306 4658 --new 8 --stage 3 --dtype bfloat16

`published` is all that ties the model to the names and the forms of the files. Export takes the same
mapping, and transformers loads what it writes beside the same config.json.
"""

import argparse
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from train_gpt import mesh_of, positive

from zerojax import zero_shard
from zerojax.checkpoint import import_params


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, and position embedding; `scaling` is that of Llama 3.1: factor, low and high frequency, positions."""

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


class Block(nn.Module):
    """Attention in which groups of heads share keys and values, then a gated feed-forward layer."""

    config: Config

    @nn.compact
    def __call__(self, x, _=None):
        c = self.config
        norm = functools.partial(nn.RMSNorm, epsilon=c.epsilon)
        dense = functools.partial(nn.DenseGeneral, use_bias=False)
        h = norm(name="attention_norm")(x)
        q = dense((c.heads, c.head), name="query")(h)
        k, v = (dense((c.kv_heads, c.head), name=name)(h) for name in ("key", "value"))
        attended = jax.nn.dot_product_attention(rotate(q, c), rotate(k, c), v, is_causal=True)
        x = x + dense(c.width, axis=(-2, -1), name="out")(attended)
        h = norm(name="mlp_norm")(x)
        h = nn.silu(dense(c.hidden, name="gate")(h)) * dense(c.hidden, name="up")(h)
        return x + dense(c.width, name="down")(h), None


class Llama(nn.Module):
    """Logits for the token that follows each of `tokens`."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        embed = nn.Embed(c.vocabulary, c.width, name="embed")
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=c.layers,
        )
        x, _ = blocks(c, name="layers")(embed(tokens), None)
        x = nn.RMSNorm(epsilon=c.epsilon, name="norm")(x)
        return embed.attend(x) if c.tied else nn.Dense(c.vocabulary, use_bias=False, name="head")(x)


def rotate(x: jax.Array, config: Config) -> jax.Array:
    """Rotary position embedding of `x` of (batch, position, head, channel); angles are float32."""
    half = x.shape[-1] // 2
    frequency = config.theta ** (-jnp.arange(half) / half)
    if config.scaling:
        factor, low, high, positions = config.scaling
        cycles = positions * frequency / (2 * math.pi)
        kept = jnp.clip((cycles - low) / (high - low), 0, 1)  # of high frequencies all, of low ones none
        frequency = frequency * (kept + (1 - kept) / factor)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    rotated = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)
    return rotated.astype(x.dtype)


def published(config: Config) -> dict[str, Any]:
    """The mapping from published names and forms to the parameters of `Llama`."""
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
        layer + "mlp.gate_proj.weight": (leaf + "gate/kernel", dense),
        layer + "mlp.up_proj.weight": (leaf + "up/kernel", dense),
        layer + "mlp.down_proj.weight": (leaf + "down/kernel", dense),
        "model.norm.weight": "params/norm/scale",
        "lm_head.weight": None if config.tied else ("params/head/kernel", dense),
    }


def read_config(folder: Path) -> Config:
    """The published config.json; what this model has not is refused."""
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
    """The parameters' shapes; nothing is initialised."""
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
    parser.add_argument("folder", type=Path, help="with config.json and *.safetensors")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], help="to continue (default: 1, the begin token)")
    parser.add_argument("--new", type=positive, default=8, help="how many to add (default: %(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--devices", type=positive, help="how many (default: all GPUs, or 8 simulated)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="(default: %(default)s)")
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        parser.error(f"{args.folder} has no config.json")
    return args


if __name__ == "__main__":
    main()
