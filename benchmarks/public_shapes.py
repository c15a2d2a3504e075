"""Compile published training runs at stage 3 for absent GPUs, and set memory and exposed time beside published figures.

    python benchmarks/public_shapes.py                       all runs, some minutes; writes results/public_shapes.json
    python benchmarks/public_shapes.py --runs "8B" --layers 2         one run, with fewer layers

It needs the extra `aot`, and no GPU. Nothing runs: memory, bytes and overlap are read from the compiled step, and the
time is a lower bound at peak rates (docs/plan.md). Each run has the shape, the batch, the types and the remat of a
published run, and AdamW. The models are those of a user: a Llama of examples/llama.py, and a mixture of experts in
plain JAX below. Both scan over their layers.

`differs` says what differs from the published programs. Attention is cuDNN's, in global view. The plan does not know
the FLOPs of cuDNN's kernels, so they are computed: `attention s` at the peak rate. In `MoE, parallel`, the experts are
on the mesh axis "expert", and tokens are sent to them.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama import Config, Llama, negative_log_likelihood, next_token_loss, rotate
from long_context import LLAMA_8B

from zerojax import Offload, Precision, plan, tiled, zero_shard
from zerojax.gpus.devices import Device, Topology, absent_mesh
from zerojax.planning.compiled_plan import Plan

RESULTS = pathlib.Path(__file__).parent / "results" / "public_shapes.json"
ROOT = f"{pathlib.Path(__file__).parents[1]}/"
AXES = "data", "expert"
cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


@dataclasses.dataclass(frozen=True)
class Experts(Config):
    """Sizes of a mixture of experts; `hidden` is the width of one expert.

    `slots` is the number of tokens that an expert takes, over the number that it would get if all got equally many.
    """

    experts: int = 128
    top: int = 4
    shared: int = 2
    slots: float = 1.25


def shapes_of(c: Experts) -> Any:
    """Return the shapes of the parameters, in float32."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    stacked = functools.partial(shape, c.layers)
    routed = functools.partial(stacked, c.experts)
    return {
        "embed": shape(c.vocabulary, c.width),
        "head": shape(c.width, c.vocabulary),
        "norm": shape(c.width),
        "layers": {
            "norms": stacked(2, c.width),
            "query": stacked(c.width, c.heads, c.head),
            "key": stacked(c.width, c.kv_heads, c.head),
            "value": stacked(c.width, c.kv_heads, c.head),
            "out": stacked(c.heads, c.head, c.width),
            "router": stacked(c.width, c.experts),
            "shared": [
                stacked(c.width, c.shared * c.hidden),
                stacked(c.width, c.shared * c.hidden),
                stacked(c.shared * c.hidden, c.width),
            ],
            "experts": [
                routed(c.width, c.hidden),
                routed(c.width, c.hidden),
                routed(c.hidden, c.width),
            ],
        },
    }


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def dispatch(chosen, c: Experts):
    """For one row: the assignments that each expert takes, as (expert, slot), and which of these slots are in use.

    An expert takes the first assignments of the row, until its slots are full.
    """
    flat = chosen.reshape(-1)
    slots = int(c.slots * flat.size / c.experts)
    order, counts = jnp.argsort(flat, stable=True), jnp.bincount(flat, length=c.experts)
    first = jnp.cumsum(counts) - counts
    taken = jnp.minimum(first[:, None] + jnp.arange(slots), flat.size - 1)
    return order[taken], jnp.arange(slots) < counts[:, None]


def computed(inputs, gate, up, down):
    """Compute what experts return for their inputs, both (rows, experts, slots, width)."""
    inner = jax.nn.silu(jnp.einsum("resd,edh->resh", inputs, gate)) * jnp.einsum("resd,edh->resh", inputs, up)
    return jnp.einsum("resh,ehd->resd", inner, down)


def routed(x, router, weights, c: Experts, run=computed):
    """Send each token to its `top` experts, and add up what they return. Rows are independent of each other."""
    shares, chosen = lax.top_k(jax.nn.sigmoid(x.astype(jnp.float32) @ router), c.top)
    shares = shares / shares.sum(-1, keepdims=True)

    def prepared(x, shares, chosen):
        taken, used = dispatch(chosen, c)
        return x[taken // c.top], taken // c.top, jnp.where(used, shares.reshape(-1)[taken], 0).astype(x.dtype)

    inputs, tokens, shares = jax.vmap(prepared)(x, shares, chosen)  # (rows, experts, slots, ...)
    results = run(inputs, *weights) * shares[..., None]
    return jax.vmap(lambda results, tokens: jnp.zeros(x.shape[1:], x.dtype).at[tokens].add(results))(results, tokens)


def send(inputs, *weights):
    """Send the inputs to the devices of their experts along the axis "expert", and the results back."""
    there = lax.all_to_all(inputs, "expert", 1, 0, tiled=True)
    return lax.all_to_all(computed(there, *weights), "expert", 0, 1, tiled=True)


def parallel(mesh: Mesh, c: Experts):
    """Return `routed` for experts that are divided over the axis "expert" of a mesh."""
    local = lambda x, router, *weights: routed(x, router, weights, c, send)
    specs = P(AXES), P(), *[P("expert")] * 3
    run = jax.shard_map(local, mesh=mesh.abstract_mesh, in_specs=specs, out_specs=P(AXES), check_vma=False)
    return lambda x, router, weights, _: run(x, router, *weights)


def mixture_loss(c: Experts, attention: Callable = cudnn, experts: Callable = routed):
    """Return `loss(params, tokens)`: the mean negative log-likelihood of all tokens but the first."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, w):
        narrow = {name: jax.tree.map(lambda leaf: leaf.astype(x.dtype), w[name]) for name in w if name != "router"}
        h = norm(x, w["norms"][0])
        q, k, v = (jnp.einsum("rtd,dhc->rthc", h, narrow[name]) for name in ("query", "key", "value"))
        attended = attention(rotate(q, c), rotate(k, c), v)
        x = x + jnp.einsum("rthc,hcd->rtd", attended, narrow["out"])
        h = norm(x, w["norms"][1])
        return x + gated(h, *narrow["shared"]) + experts(h, w["router"], narrow["experts"], c), None

    def loss(params, tokens):
        x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x, _ = lax.scan(layer, x, params["layers"])
        head = params["head"].astype(jnp.bfloat16)
        each = tiled(negative_log_likelihood, tiles=64)(head, norm(x, params["norm"]), tokens[:, 1:])
        return jnp.mean(each)

    return loss


MIXTURE = Experts(
    vocabulary=128_256, width=6144, hidden=3072, layers=48, heads=48, kv_heads=12, head=128, epsilon=1e-5, theta=1e4
)
LLAMA_70B = dataclasses.replace(LLAMA_8B, width=8192, hidden=28_672, layers=80, heads=64)


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run: GPUs, shape, the rows and tokens per row of a device, and what was published about it."""

    topology: str
    config: Config
    rows: int
    tokens: int
    published: dict[str, Any]
    source: str
    differs: str
    offload: Offload | None = None
    accumulate: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    attention: Callable = cudnn
    parallel: bool = False  # whether experts are on a mesh axis of all devices


TITAN = "https://github.com/pytorch/torchtitan/blob/main/"
MARIN = "https://github.com/marin-community/marin/"
MOE = {
    "topology": "b200:1x64",
    "config": MIXTURE,
    "rows": 16,
    "tokens": 4096,
    "published": {
        "step s": 18.02,
        "collectives alone s": {"first": 3.17, "corrected": 1.02, "with those on the compute stream": 3.06},
        "hidden": {"first": 0.53, "corrected": 0.77},
        "peak GB": 147.3,
        "peak of": "a later configuration of the same run, with its optimizer state in host memory",
    },
    "source": f"{MARIN}issues/8053, {MARIN}issues/8054, {MARIN}blob/main/experiments/grug/moe_hero_fsdp/README.md",
    "differs": (
        "AdamW instead of Muon; all layers attend to all 4096 positions, published: 5 of 6 layers to the last 512; no "
        "gated norms, short convolutions and attention gates (0.1% of the parameters); no dropped token is published, "
        "here an expert takes 1.25 times its equal share of a row; experts of a layer are gathered at once, published: "
        "a quarter at a time"
    ),
}
LLAMA = {
    "topology": "h100:8",
    "config": LLAMA_8B,
    "rows": 2,
    "tokens": 8192,
    "published": {"peak GB": 82.7, "peak GB, eager": 88.5, "tokens/s of a GPU": 6667},
    "source": f"{TITAN}benchmarks/llama3_h100_202412_torchtitan.md",
    "differs": (
        "full remat, and a head in tiles of 1024 tokens; published: selective remat, and logits of all tokens at once. "
        "The published H100 has 96 GB and 500 W"
    ),
}
# XLA's scheduler hides no collective where a program takes more than 76% of the memory; these GPUs may give it 95%.
HIGHER_LIMIT = {"xla_gpu_memory_limit_slop_factor": 125}
RUNS = {
    "8B": Run(**LLAMA),
    "70B": Run(
        topology="h100:64",
        config=LLAMA_70B,
        rows=1,
        tokens=8192,
        published={"peak GB": "below 80 (no figure), on 64 x A100", "tokens/s of a GPU, A100": 331},
        source=f"{TITAN}docs/performance.md, before December 2024",
        differs="H100 instead of A100; no memory of 70B with FSDP alone is published",
    ),
    "MoE, parallel": Run(**MOE | {"differs": MOE["differs"].partition("; experts of a layer")[0]}, parallel=True),
    "MoE": Run(**MOE),
    "MoE, offload": Run(**MOE, offload=Offload(optimizer="host"), accumulate=2),
    "MoE, offload, higher limit": Run(**MOE, offload=Offload(optimizer="host"), accumulate=2, options=HIGHER_LIMIT),
}


def exposed_of(found: Plan) -> list[str]:
    """Return the collectives that no product hides, if they are at least 1% of all bytes sent, largest first."""
    large = sorted(
        (c for c in found.collectives.exposed if c.sent * c.times_if_once > 0.01 * found.sent), key=lambda c: -c.sent
    )
    return [f"{c.kind} {c.dtype} {c.sent / 1e9:.2f} GB, {c.times_if_once} times: {c.op_name[-150:]}" for c in large]


def measure(run: Run, *, layers: int | None = None) -> dict:
    """Compile one step of a run, and read its figures off the program."""
    config = run.config if layers is None else dataclasses.replace(run.config, layers=layers)
    mesh, device = absent_mesh(run.topology), Device.of(Topology.parse(run.topology))
    begin = time.perf_counter()
    options: dict[str, Any] = {"offload": run.offload}
    if isinstance(config, Experts):
        shapes, experts = shapes_of(config), routed
        if run.parallel:
            mesh = Mesh(mesh.devices.reshape(1, -1), AXES, axis_types=(AxisType.Auto,) * 2)
            options |= {"axis": AXES, "expert_axis": "expert"}
            divided = NamedSharding(mesh, P(None, "expert"))
            shapes["layers"]["experts"] = [x.update(sharding=divided) for x in shapes["layers"]["experts"]]
            experts = parallel(mesh, config)
        loss = mixture_loss(config, run.attention, experts)
    else:
        model = Llama(config, loss_tiles=run.tokens // 1024 * run.rows, attention=run.attention)
        plain = Llama(config)  # the local machine may have no GPU that answers cuDNN's questions
        shapes = jax.eval_shape(plain.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        loss = next_token_loss(model)
        options["precision"] = Precision.bf16()
    tx = zero_shard(optax.adamw(3e-4), stage=3, mesh=mesh, **options)
    batch = jax.ShapeDtypeStruct((run.rows * mesh.size, run.tokens + 1), jnp.int32)
    step = tx.train_step(loss, accumulate=run.accumulate)
    compiler_options = {**step.compiler_options, **run.options}
    step = tx.train_step(loss, accumulate=run.accumulate, compiler_options=compiler_options)
    found = plan(step, tx.create(shapes), batch, topology=run.topology)
    took = time.perf_counter() - begin
    count = sum(x.size for x in jax.tree.leaves(shapes))
    moved = {
        kind: found.collectives.moved(kind, unknown_once=True).bytes / (2 * count)
        for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    }
    least, gigabytes = found.roofline, lambda size: round(size / 1e9, 2)
    tokens = run.rows * run.tokens
    # Two products with causal scores. The backward pass takes 2.5 times their FLOPs, and remat computes them again.
    attention = 4.5 * 2 * tokens * run.tokens * config.layers * config.heads * config.head
    return {
        "topology": run.topology,
        "layers": config.layers,
        "tokens per GPU": tokens,
        "parameters": count,
        "peak GB": gigabytes(found.peak),
        "usable GB": gigabytes(found.usable),
        "fits": found.fits,
        "host GB": gigabytes(found.host),
        "microbatches": run.accumulate,
        "compiler options": compiler_options,
        "memory GB": {part: gigabytes(size) for part, size in found.memory.items()},
        "passes": {kind: round(passes, 3) for kind, passes in moved.items()},
        "sent GB": gigabytes(found.sent),
        "across hosts GB": gigabytes(found.across_hosts),
        "hidden": round(found.hidden, 4),
        "exposed, most first": exposed_of(found),
        "products s": round(least.products, 3),
        "kernels s": round(least.kernels, 3),
        "communication s": round(least.communication, 3),
        "exposed s": round(least.exposed, 4),
        "waiting s": round(sum(found.waits.values()), 4),
        "waits": {cause.replace(ROOT, ""): round(seconds, 4) for cause, seconds in list(found.waits.items())[:4]},
        "step s": round(found.seconds, 3),
        "attention s": round(attention / device.rate("bf16"), 3) if run.attention is cudnn else "in kernels s",
        "TFLOP per GPU": round(sum(least.operations.values()) / 1e12, 1),
        "notes": found.notes,
        "trace and compile s": round(took, 1),
        "largest process GB": gigabytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10),
        "published": run.published,
        "source": run.source,
        "differs": run.differs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--layers", type=int, help="instead of the published number; a try, which writes no file")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="JSON file (default: %(default)s)")
    args = parser.parse_args()
    rows = {}
    for name in args.runs:
        made = {"date": datetime.date.today().isoformat(), "jax": jax.__version__}
        rows[name] = made | measure(RUNS[name], layers=args.layers)
        print(f"{name}:", *(f"  {key}: {value}" for key, value in rows[name].items()), sep="\n", flush=True)
    if args.layers is None:
        kept = json.loads(args.out.read_text()) if args.out.exists() else {"runs": {}}
        found = kept | {"compiled only": True, "runs": kept["runs"] | rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
