"""Activation budgets beside the policies of JAX, compiled for a GPU that is not there: memory and FLOPs, all exact.

    python benchmarks/remat_budget.py                       every model, and a picture of each frontier
    python benchmarks/remat_budget.py --models gpt vit --json results/remat_budget.json

For each model the gradient of a loss is compiled with each policy of `jax.checkpoint` around its blocks, and with
`zerojax.remat` at several budgets from 0 to all bytes. The bytes that each policy saves are also budgets. A policy is
*dominated* if the program with some budget has at most 1.02 times the memory and at most 1.005 times the FLOPs of the
program with this policy. `memory` is the temporary memory of the compiled program, in MiB. `FLOPs` are the FLOPs of its
matrix products and convolutions, in GFLOP. Needs the extra `aot`, but no GPU.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.gpus.topology import absent_mesh
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops

POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
WIDTH, HEADS, ROWS, TOKENS, LAYERS = 1024, 16, 4, 512, 4


def norm(x):
    x = x.astype(jnp.float32)
    return ((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)


def attend(p, x, memory, mask=None):
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) for name, y in zip("qkv", (x, memory, memory), strict=True))
    scores = jnp.einsum("bthe,bshe->bhts", q, k).astype(jnp.float32) / (WIDTH // HEADS) ** 0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
    return jnp.einsum("bthe,hed->btd", jnp.einsum("bhts,bshe->bthe", weights, v), p["o"])


def feed(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def attention_shapes(prefix=""):
    heads = (WIDTH, HEADS, WIDTH // HEADS)
    return {prefix + name: heads for name in "qkv"} | {prefix + "o": (*heads[1:], WIDTH)}


FEED = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
CAUSAL = lambda: jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def gpt_block(p, x):
    h = norm(x)
    x = x + attend(p, h, h, CAUSAL())
    return x + feed(p, norm(x))


def vit_block(p, x):
    """Attention over all patches, and a feed-forward layer with SiLU gates, side by side."""
    h = norm(x)
    gated = (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return x + attend(p, h, h) + gated


def cross_block(p, x):
    """A decoder's block: attention to itself and to the memory of an encoder, and a feed-forward layer."""
    x, memory = jnp.split(x, 2, axis=1)
    h = norm(x)
    x = x + attend(p, h, h, jnp.tril(jnp.ones((x.shape[1],) * 2, bool)))
    x = x + attend({name: p["c" + name] for name in "qkvo"}, norm(x), memory)
    return jnp.concatenate([x + feed(p, norm(x)), memory], axis=1)


def moe_block(p, x):
    """Attention, and a feed-forward layer of eight experts, whose gate weighs the two that a token is sent to."""
    h = norm(x)
    x = x + attend(p, h, h, CAUSAL())
    h = norm(x)
    logits = (h @ p["router"]).astype(jnp.float32)
    kept = logits >= jax.lax.top_k(logits, 2)[0][..., -1:]
    gate = jax.nn.softmax(jnp.where(kept, logits, -1e9)).astype(jnp.bfloat16)
    each = jax.nn.gelu(jnp.einsum("btd,xdf->xbtf", h, p["expert_up"]))
    return x + jnp.einsum("xbtf,xfd,btx->btd", each, p["expert_down"], gate)


def unet_block(p, x):
    """One level down and up again, with a connection past it: convolutions of pictures."""
    image = x.reshape(ROWS, 32, 16, -1)
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    first = jax.nn.silu(norm(conv(image, p["first"])))
    low = jax.lax.reduce_window(first, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    low = jax.nn.silu(norm(conv(low.astype(jnp.bfloat16), p["low"])))
    high = jax.image.resize(low, first.shape, "nearest")
    return x + conv(jnp.concatenate([first, high], -1), p["last"]).reshape(x.shape)


MODELS = {
    "gpt": (gpt_block, attention_shapes() | FEED, False),
    "gpt scan": (gpt_block, attention_shapes() | FEED, True),
    "vit": (vit_block, attention_shapes() | FEED | {"gate": FEED["up"]}, False),
    "encoder-decoder": (cross_block, attention_shapes() | attention_shapes("c") | FEED, True),
    "experts": (
        moe_block,
        attention_shapes() | {"router": (WIDTH, 8), "expert_up": (8, WIDTH, WIDTH), "expert_down": (8, WIDTH, WIDTH)},
        False,
    ),
    "u-net": (
        unet_block,
        {"first": (3, 3, WIDTH, 512), "low": (3, 3, 512, 512), "last": (3, 3, 1024, WIDTH)},
        False,
    ),
}


def measure(block, shapes, scan: bool) -> tuple[float, float]:
    """Compile the gradient of a stack of blocks, and return its temporary MiB and its GFLOP."""
    place = NamedSharding(absent_mesh("h200:1"), PartitionSpec())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    def loss(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
        for i in range(0 if scan else LAYERS):
            x = block(jax.tree.map(lambda w, i=i: w[i], params), x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    params = {name: array(LAYERS, *shape) for name, shape in shapes.items()}
    compiled: Any = jax.jit(jax.grad(loss)).lower(params, array(ROWS, TOKENS, WIDTH)).compile()
    operations = product_flops(kernels(read(compiled.as_text())))
    return compiled.memory_analysis().temp_size_in_bytes / 2**20, sum(operations.values()) / 1e9


def saved_bytes(fn, *args) -> int:
    """Return the bytes that a call keeps for its backward pass, in addition to its arguments."""
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    given = [(x.shape, x.dtype) for x in jax.tree.leaves(args)]
    total = 0
    for x in kept:
        if (x.shape, x.dtype) in given:
            given.remove((x.shape, x.dtype))
        elif hasattr(x.dtype, "itemsize"):
            total += x.size * x.dtype.itemsize
    return total


def study(name: str, budgets: int) -> dict:
    """Measure one model with every policy and budget."""
    block, shapes, scan = MODELS[name]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    given = {key: array(*shape) for key, shape in shapes.items()}, array(ROWS, TOKENS, WIDTH)
    cse: Any = {"prevent_cse": not scan}
    most = zerojax.remat(block, budget=0).choice(*given).most_bytes
    found = {"model": name, "policies": {}, "budgets": []}
    chosen = {most * i // budgets for i in range(budgets + 1)}
    for policy, rule in POLICIES.items():
        theirs = jax.checkpoint(block, policy=rule, **cse)
        found["policies"][policy] = measure(theirs, shapes, scan)
        chosen.add(min(most, saved_bytes(theirs, *given)))
    for budget in sorted(chosen):
        ours = zerojax.remat(block, budget=budget, **cse)
        choice = ours.choice(*given)
        memory, flops = measure(ours, shapes, scan)
        found["budgets"].append(
            {"budget": budget, "saved": choice.saved_bytes, "repeated": choice.flops, "memory": memory, "flops": flops}
        )
    return found


def show(found: dict) -> None:
    print(f"\n{found['model']}: MiB and GFLOP")
    for policy, (memory, flops) in found["policies"].items():
        better = [b for b in found["budgets"] if b["memory"] <= 1.02 * memory and b["flops"] <= 1.005 * flops]
        by = f"dominated by budget {better[0]['budget'] / 2**20:.1f} MiB" if better else "not dominated"
        print(f"  {policy:34s} {memory:8.1f} {flops:9.2f}  {by}")
    for b in found["budgets"]:
        print(f"  budget {b['budget'] / 2**20:27.1f} {b['memory']:8.1f} {b['flops']:9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    every = []
    for name in args.models:
        every.append(study(name, args.budgets))
        show(every[-1])
    if args.json:
        versions = {"jax": jax.__version__, "zerojax": zerojax.__version__}
        result = {"date": f"{datetime.date.today()}", "versions": versions, "hardware": "h200:1, absent"}
        args.json.write_text(json.dumps({**result, "models": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
