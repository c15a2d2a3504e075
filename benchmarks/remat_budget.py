"""Compare activation budgets with the policies of JAX, compiled for absent GPUs: memory, FLOPs and step time.

    python benchmarks/remat_budget.py --json benchmarks/results/remat_budget.json     all models
    python benchmarks/remat_budget.py --models gpt vit --json ...                     replaces these models in the file
    python benchmarks/remat_budget.py --json ... --only-show                          the table of the file

For each model, the stage-3 gradient of a loss is compiled for 8 H200s, with each policy of `jax.checkpoint` around the
blocks, and with `zerojax.remat_within` at several budgets. For each policy there is also the smallest budget that
repeats about as few FLOPs as the bytes that the policy saves allow. A policy is *dominated* if the program with some
budget has at most 1.02 times the memory and at most 1.005 times the FLOPs. Memory is the temporary memory of the
compiled program, in MiB. FLOPs are the FLOPs of matrix products and convolutions, in GFLOP. Time is the simulated time
of kernels at the peak rates of the GPU, with the waits for collectives, in milliseconds. All figures are per device.
Needs the extra `aot`, but no GPU.
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
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.gpus.devices import absent_mesh
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.planning.compiled_plan import CompiledStep, read_plan

TOPOLOGY = "h200:8"
POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}
WIDTH, HEADS, ROWS, TOKENS, LAYERS = 1024, 16, 32, 512, 4


def norm(x):
    x = x.astype(jnp.float32)
    return ((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)


def attend(p, x, memory, mask=None):
    q, k, v = (jnp.einsum("btd,dhe->bthe", y, p[name]) for name, y in zip("qkv", (x, memory, memory), strict=True))
    scores = jnp.einsum("bthe,bshe->bhts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
    return jnp.einsum("bthe,hed->btd", jnp.einsum("bhts,bshe->bthe", weights, v), p["o"])


def feed(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def attention_shapes(width, heads, prefix=""):
    split = (width, heads, width // heads)
    return {prefix + name: split for name in "qkv"} | {prefix + "o": (*split[1:], width)}


def feed_shapes(width):
    return {"up": (width, 4 * width), "down": (4 * width, width)}


def causal(tokens):
    return jnp.tril(jnp.ones((tokens, tokens), bool))


def gpt_block(p, x):
    h = norm(x)
    x = x + attend(p, h, h, causal(x.shape[1]))
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
    x = x + attend(p, h, h, causal(x.shape[1]))
    x = x + attend({name: p["c" + name] for name in "qkvo"}, norm(x), memory)
    return jnp.concatenate([x + feed(p, norm(x)), memory], axis=1)


def moe_block(p, x):
    """Attention, and a feed-forward layer of eight experts, whose gate weighs the two that a token is sent to."""
    h = norm(x)
    x = x + attend(p, h, h, causal(x.shape[1]))
    h = norm(x)
    logits = (h @ p["router"]).astype(jnp.float32)
    kept = logits >= jax.lax.top_k(logits, 2)[0][..., -1:]
    gate = jax.nn.softmax(jnp.where(kept, logits, -1e9)).astype(jnp.bfloat16)
    each = jax.nn.gelu(jnp.einsum("btd,xdf->xbtf", h, p["expert_up"]))
    return x + jnp.einsum("xbtf,xfd,btx->btd", each, p["expert_down"], gate)


def unet_block(p, x):
    """One level down and up again, with a connection past it: convolutions of pictures."""
    image = x.reshape(x.shape[0], x.shape[1] // 16, 16, -1)
    conv = functools.partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    first = jax.nn.silu(norm(conv(image, p["first"])))
    low = jax.lax.reduce_window(first, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    low = jax.nn.silu(norm(conv(low.astype(jnp.bfloat16), p["low"])))
    high = jax.image.resize(low, first.shape, "nearest")
    return x + conv(jnp.concatenate([first, high], -1), p["last"]).reshape(x.shape)


# Each model has a block, the shapes of the block's parameters for a width and a number of heads, and whether it is
# scanned.
MODELS = {
    "gpt": (gpt_block, lambda width, heads: attention_shapes(width, heads) | feed_shapes(width), False),
    "gpt scan": (gpt_block, lambda width, heads: attention_shapes(width, heads) | feed_shapes(width), True),
    "vit": (
        vit_block,
        lambda width, heads: attention_shapes(width, heads) | feed_shapes(width) | {"gate": (width, 4 * width)},
        False,
    ),
    "encoder-decoder": (
        cross_block,
        lambda width, heads: attention_shapes(width, heads) | attention_shapes(width, heads, "c") | feed_shapes(width),
        True,
    ),
    "experts": (
        moe_block,
        lambda width, heads: (
            attention_shapes(width, heads)
            | {"router": (width, 8), "expert_up": (8, width, width), "expert_down": (8, width, width)}
        ),
        False,
    ),
    "u-net": (
        unet_block,
        lambda width, heads: {
            "first": (3, 3, width, width // 2),
            "low": (3, 3, width // 2, width // 2),
            "last": (3, 3, width, width),
        },
        False,
    ),
}


def arguments(shapes, rows, tokens, width):
    """Return the shapes of a block's parameters and of its input."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return {name: array(*shape) for name, shape in shapes.items()}, array(rows, tokens, width)


def measure(block, shapes, scan: bool) -> dict[str, float]:
    """Compile the gradient of a stack of blocks, and return the figures of the program."""
    mesh = absent_mesh(TOPOLOGY)

    def loss(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
        for p in [] if scan else params:
            x = block(p, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    layer = lambda *leading: {name: jax.ShapeDtypeStruct((*leading, *s), jnp.bfloat16) for name, s in shapes.items()}
    params = layer(LAYERS) if scan else [layer() for _ in range(LAYERS)]
    tx = zerojax.zero_shard(optax.adamw(1e-4), stage=3, mesh=mesh)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((ROWS, TOKENS, WIDTH), jnp.bfloat16, sharding=rows)
    compiled: Any = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), x).compile()
    plan = read_plan(CompiledStep(compiled), TOPOLOGY, batch=ROWS)
    return {
        "memory": plan.memory["temporary"] / 2**20,
        "flops": sum(product_flops(kernels(read(plan.text))).values()) / 1e9,
        "milliseconds": 1e3 * (plan.roofline.kernels + sum(plan.waits.values())),
    }


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


def leanest(choice_of, saved: int) -> int:
    """Return the smallest budget with which a call repeats at most 1% of its FLOPs more than with `saved` bytes."""
    enough = choice_of(saved).flops + choice_of(0).most_flops // 100
    low, high = -1, saved
    while high - low > max(saved // 200, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if choice_of(middle).flops <= enough else (middle, high)
    return high


def study(name: str, budgets: int, policies: dict[str, Any]) -> dict[str, Any]:
    """Measure one model with every budget, and with every policy that is not in `policies`. Print each row."""
    block, shapes_of, scan = MODELS[name]
    shapes = shapes_of(WIDTH, HEADS)
    given = arguments(shapes, ROWS, TOKENS, WIDTH)
    cse: Any = {"prevent_cse": not scan}
    choice_of = lambda budget: zerojax.remat_within(block, budget=budget).choice(*given)
    most = choice_of(0).most_bytes
    found: dict[str, Any] = {"policies": dict(policies), "budgets": []}
    chosen = {0, *(most * (i + 1) // budgets for i in range(budgets))}
    for policy, rule in POLICIES.items():
        theirs = jax.checkpoint(block, policy=rule, **cse)
        if policy not in found["policies"]:
            found["policies"][policy] = measure(theirs, shapes, scan)
        print(f"  {policy:34s} {columns(found['policies'][policy])}", flush=True)
        saved = min(most, saved_bytes(theirs, *given))
        chosen.add(leanest(choice_of, saved))
    for budget in sorted(chosen):
        ours = zerojax.remat_within(block, budget=budget, **cse)
        choice = ours.choice(*given)
        row = {"budget": budget, "saved": choice.saved_bytes, "repeated": choice.flops}
        found["budgets"].append(row | measure(ours, shapes, scan))
        print(f"  {f'{budget / 2**20:,.0f} MiB':34s} {columns(found['budgets'][-1])}", flush=True)
    return found


def columns(row: dict[str, Any]) -> str:
    return f"{row['memory']:9.1f} {row['flops']:9.2f} {row['milliseconds']:9.3f}"


def dominating(found: dict[str, Any], policy: str) -> dict[str, Any] | None:
    """Return the smallest budget that dominates a policy, or None."""
    theirs = found["policies"][policy]
    limits = {"memory": 1.02, "flops": 1.005}
    better = lambda b: all(b[figure] <= factor * theirs[figure] for figure, factor in limits.items())
    return next(filter(better, found["budgets"]), None)


def show(models: dict[str, Any]) -> None:
    """Print a table in Markdown: the memory and the FLOPs of the budget that dominates, as shares of the policy's."""
    print(f"\n| | {' | '.join(f'`{policy}`' for policy in POLICIES)} |\n|---{'|---' * len(POLICIES)}|")
    for name, found in models.items():
        cells = []
        for policy, theirs in found["policies"].items():
            ours = dominating(found, policy)
            shares = [] if ours is None else [f"{ours[key] / theirs[key]:.2f}" for key in ("memory", "flops")]
            cells.append(", ".join(shares) or "not dominated")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measure the models, merge them into the file of results, and show the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", type=int, default=6)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only-budgets", action="store_true", help="keep the figures of policies that the file has")
    parser.add_argument("--only-show", action="store_true", help="show the results of the file, and compile nothing")
    args = parser.parse_args()
    known = json.loads(args.json.read_text())["models"] if args.json and args.json.exists() else {}
    for name in [] if args.only_show else args.models:
        print(f"\n{name}: MiB of memory, GFLOP, ms", flush=True)
        known[name] = study(name, args.budgets, known.get(name, {}).get("policies", {}) if args.only_budgets else {})
        if args.json:
            versions = {"jax": jax.__version__, "zerojax": zerojax.__version__}
            result = {"date": f"{datetime.date.today()}", "versions": versions, "hardware": f"{TOPOLOGY}, absent"}
            args.json.write_text(json.dumps({**result, "models": known}, indent=1) + "\n")
    show(known)


if __name__ == "__main__":
    main()
