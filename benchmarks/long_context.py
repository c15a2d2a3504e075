"""Find the longest sequence that fits a Llama of 8 billion parameters, one row per device, compiled for absent GPUs.

    python benchmarks/long_context.py                                 8 x H200: four ways, each searched
    python benchmarks/long_context.py --ways plain loss --lengths 65536       peaks at one length

It needs the extra `aot`, and no GPU. The model trains at stage 3 with AdamW, bfloat16 compute and float32 master
weights. Layers are scanned, each under `jax.checkpoint`. Attention is blockwise, by `lax.scan`: its peak
is close to that of a kernel (8B on 8 x H100 with 16,384 tokens per GPU: 25.4 and 25.2 GB). The ways:

- `plain`: logits and feed-forward layers of all positions at once;
- `loss`: the head and its cross entropy in tiles of 1024 positions;
- `loss+mlp`: the feed-forward layers too, in tiles of 4096;
- `offload`: the same, with each layer's input in host memory between the passes; `host GB` are needed per device.

A length fits if the compiled step needs at most 95% of the GPU's memory. `a token` is the additional memory per token,
between the two longest lengths that were compiled.
"""

import argparse
import datetime
import functools
import json
import math
import os
import pathlib
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import optax
from jax import lax
from llama import Config, Llama, next_token_loss
from yardstick import offloading

from zerojax import Precision, plan, zero_shard
from zerojax.gpus.devices import Device, Topology, absent_mesh
from zerojax.planning.plan import largest_that_fits

LLAMA_8B = Config(
    vocabulary=128_256,
    width=4096,
    hidden=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head=128,
    epsilon=1e-5,
    theta=500_000.0,
)
UNIT = 4096  # lengths are multiples of it
# Positions a tile: of the head, of the feed-forward layers.
TILES = {"plain": (None, None), "loss": (1024, None), "loss+mlp": (1024, 4096), "offload": (1024, 4096)}
GUESSES = {"plain": 32, "loss": 72, "loss+mlp": 104, "offload": 560}  # where the search begins, in units
QUERIES, KEYS = 512, 4096  # of a block of attention


def blockwise(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention without a matrix of (positions, positions), forward or backward.

    A block of queries at a time, over blocks of keys with a running maximum and sum (Rabe and Staats 2021,
    arXiv 2112.05682); both loops are recomputed in the backward pass.
    """
    rows, length, heads, depth = q.shape
    groups, queries, keys = k.shape[2], math.gcd(length, QUERIES), math.gcd(length, KEYS)
    blocks = lambda x, size: jnp.moveaxis(x.reshape(rows, -1, size, *x.shape[2:]), 1, 0)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_keys(start, q, carry, at, k, v):
        largest, total, weighted = carry
        scores = jnp.einsum("rqghd,rkgd->rghqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(depth)
        scores = jnp.where(start + jnp.arange(queries)[:, None] >= at + jnp.arange(keys), scores, -1e30)
        maximum = lax.stop_gradient(jnp.maximum(largest, scores.max(-1)))
        shares, shrunk = jnp.exp(scores - maximum[..., None]), jnp.exp(largest - maximum)
        product = jnp.einsum("rghqk,rkgd->rghqd", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return maximum, total * shrunk + shares.sum(-1), weighted * shrunk[..., None] + product

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_queries(start, q, k, v):
        shape = (rows, groups, heads // groups, queries)
        first = (jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, depth)))
        step = lambda carry, block: (of_keys(start, q, carry, *block), None)
        (_, total, weighted), _ = lax.scan(step, first, (jnp.arange(0, length, keys), k, v))
        return (weighted / total[..., None]).astype(q.dtype)

    k, v = blocks(k, keys), blocks(v, keys)
    each = (jnp.arange(0, length, queries), blocks(q.reshape(rows, length, groups, -1, depth), queries))
    _, attended = lax.scan(lambda _, block: (None, of_queries(*block, k, v)), None, each)
    return jnp.moveaxis(attended, (0, 4), (1, 2)).reshape(q.shape)


def model_of(way: str, length: int, config: Config) -> Llama:
    """The model with the tiles of a way."""
    loss, mlp = (1 if size is None else -(-length // size) for size in TILES[way])
    policy = offloading("layer_input") if way == "offload" else None
    return Llama(config, loss_tiles=loss, mlp_tiles=mlp, attention=blockwise, policy=policy)


def planned(way: str, length: int, *, config: Config = LLAMA_8B, topology: str = "h200:8", view="global"):
    """The plan of a step on one row of `length` tokens a device."""
    mesh = absent_mesh(topology)
    tx = zero_shard(optax.adamw(3e-4), stage=3, mesh=mesh, precision=Precision.bf16(), view=view)
    model = model_of(way, length, config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    batch = jax.ShapeDtypeStruct((mesh.size, length + 1), jnp.int32)
    return plan(tx.train_step(next_token_loss(model)), tx.create(shapes), batch, topology=topology)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--ways", nargs="+", default=[*TILES], choices=[*TILES])
    parser.add_argument("--lengths", nargs="+", type=int, help="peaks at these lengths; nothing is searched")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    usable, rows = Device.of(Topology.parse(args.topology)).usable(None), []
    for way in args.ways:
        peaks = {}

        def peak(count, way=way, peaks=peaks):
            start = time.perf_counter()
            found = planned(way, count * UNIT, topology=args.topology)
            peaks[count * UNIT] = found.peak
            took = f"compiled in {time.perf_counter() - start:.0f} s"
            least = f"{found.seconds:.2f} s at peak rates, waiting {found.waiting:.3%}"
            print(f"  {way}: {count * UNIT:,} tokens, {found.peak / 1e9:.1f} GB, {least}, {took}", flush=True)
            return found.peak

        if args.lengths:
            _ = [peak(length // UNIT) for length in args.lengths]
            longest = max((n for n, found in peaks.items() if found <= usable), default=0)
        else:
            longest = UNIT * largest_that_fits(peak, usable, start=GUESSES[way])
        last = sorted(peaks)[-2:]
        row = {"way": way, "longest": longest, "GB": {n: round(peaks[n] / 1e9, 2) for n in sorted(peaks)}}
        if len(last) == 2:
            row["KB a token"] = round((peaks[last[1]] - peaks[last[0]]) / (last[1] - last[0]) / 1e3, 1)
        if way == "offload":
            row["host GB"] = round(LLAMA_8B.layers * longest * LLAMA_8B.width * 2 / 1e9, 1)
        rows.append(row)
        print(f"{way}: {longest:,} tokens a row fit", row.get("KB a token", ""), "KB a token", flush=True)
    if args.out:
        found = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "compiled only": True}
        found |= {"topology": args.topology, "usable GB": round(usable / 1e9, 1), "rows": rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
