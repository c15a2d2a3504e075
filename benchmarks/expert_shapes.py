"""Compile two layers of a mixture of experts with 359 billion parameters for 64 absent GPUs, in several ways.

    python benchmarks/expert_shapes.py                   all ways, some minutes each; writes results/expert_shapes.json
    python benchmarks/expert_shapes.py --ways quarters   replaces one way

It needs the extra `aot`, and no GPU. Nothing runs. Widths, experts, tokens and types are those of the published run in
`public_shapes.py`, at stage 3 with AdamW. The two layers are unrolled and under remat, and attention is a loop in plain
JAX. docs/experts.md shows the figures.

gathered      all experts of a layer are gathered at once
quarters      a loop over four groups of experts, each of which is gathered by itself
parallel 8    experts stay on an axis of 8 of 8 × 8 devices, and tokens are sent to them
parallel 64   experts stay on an axis of all 64 devices
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from llama import negative_log_likelihood, rotate
from long_context import blockwise
from public_shapes import AXES, MIXTURE, computed, dispatch, gated, norm, send, shapes_of

from zerojax import plan, tiled, zero_shard
from zerojax.gpus.devices import absent_mesh

RESULTS = pathlib.Path(__file__).parent / "results" / "expert_shapes.json"
WAYS = {"gathered": 1, "quarters": 1, "parallel 8": 8, "parallel 64": 64}  # the devices along the axis "expert"
ROWS, TOKENS, GROUPS = 16, 4096, 4  # rows of a device
CONFIG = dataclasses.replace(MIXTURE, layers=2)


def chosen_by(h, router):
    """Return the tokens that each expert takes of each row, and their shares, both (rows, experts, slots)."""
    shares, chosen = lax.top_k(jax.nn.sigmoid(h.astype(jnp.float32) @ router), CONFIG.top)

    def of_row(shares, chosen):
        taken, used = dispatch(chosen, CONFIG)
        return taken // CONFIG.top, jnp.where(used, shares.reshape(-1)[taken], 0).astype(h.dtype)

    return jax.vmap(of_row)(shares / shares.sum(-1, keepdims=True), chosen)


def mixed(h, tokens, shares, weights, run=computed):
    """Add up what the experts return for their tokens."""
    weights = [w.astype(h.dtype) for w in weights]
    found = run(jax.vmap(lambda row, tokens: row[tokens])(h, tokens), *weights) * shares[..., None]
    return jax.vmap(lambda found, tokens: jnp.zeros(h.shape[1:], h.dtype).at[tokens].add(found))(found, tokens)


def experts_of(way: str, mesh: Mesh):
    """Return `experts(h, router, weights)` of a way. In `quarters`, each weight has its groups on dim 0."""

    def gathered(h, router, weights):
        return mixed(h, *chosen_by(h, router), weights)

    def quarters(h, router, weights):
        group = lambda x: jnp.moveaxis(x.reshape(len(x), GROUPS, -1, x.shape[-1]), 1, 0)
        body = jax.checkpoint(lambda total, one: (total + mixed(h, *one), None), prevent_cse=False)
        return lax.scan(body, jnp.zeros_like(h), (*map(group, chosen_by(h, router)), weights))[0]

    def parallel(h, router, weights):
        local = lambda h, router, *weights: mixed(h, *chosen_by(h, router), weights, send)
        specs = P(AXES), P(), *[P("expert")] * 3
        run = jax.shard_map(local, mesh=mesh.abstract_mesh, in_specs=specs, out_specs=P(AXES), check_vma=False)
        return run(h, router, *(w.astype(h.dtype) for w in weights))  # in the shard_map, gathers would be in float32

    return {"gathered": gathered, "quarters": quarters}.get(way, parallel)


def loss_of(way: str, mesh: Mesh):
    experts = experts_of(way, mesh)

    def before(x, w):
        narrow = {name: jax.tree.map(lambda leaf: leaf.astype(x.dtype), w[name]) for name in w if name != "router"}
        h = norm(x, w["norms"][0])
        q, k, v = (jnp.einsum("rtd,dhc->rthc", h, narrow[name]) for name in ("query", "key", "value"))
        attended = blockwise(rotate(q, CONFIG), rotate(k, CONFIG), v)
        x = x + jnp.einsum("rthc,hcd->rtd", attended, narrow["out"])
        h = norm(x, w["norms"][1])
        return x + gated(h, *narrow["shared"]), h

    def layer(x, w, weights):
        x, h = before(x, w)
        return x + experts(h, w["router"], weights)

    def in_groups(x, w, weights):
        """Compute the loop over groups outside of the remat, which would gather all that is in it at once."""
        x, h = jax.checkpoint(before, prevent_cse=False)(x, {name: w[name] for name in w if name != "router"})
        return x + experts(h, w["router"], weights)

    step = in_groups if way == "quarters" else jax.checkpoint(layer, prevent_cse=False)

    def loss(params, tokens):
        x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
        for w in params["layers"]:
            x = step(x, {name: w[name] for name in w if name != "experts"}, w["experts"])
        head = params["head"].astype(jnp.bfloat16)
        return jnp.mean(tiled(negative_log_likelihood, tiles=64)(head, norm(x, params["norm"]), tokens[:, 1:]))

    return loss


def params_of(way: str, mesh: Mesh) -> Any:
    """Return the shapes of the parameters, with a list of layers."""
    shapes = shapes_of(CONFIG)
    layer = jax.tree.map(lambda x: x.update(shape=x.shape[1:]), shapes["layers"])
    if way == "quarters":
        split = lambda x: x.update(shape=(GROUPS, x.shape[0] // GROUPS, *x.shape[1:]))
    else:
        split = lambda x: x if WAYS[way] == 1 else x.update(sharding=NamedSharding(mesh, P("expert")))
    layer["experts"] = [split(x) for x in layer["experts"]]
    return shapes | {"layers": [layer] * CONFIG.layers}


def measure(way: str) -> dict[str, Any]:
    """Compile a step, and read its figures off the program. Bytes are those of one device, in GB."""
    # A plan makes the mesh of a topology: 8 × 8 devices are eight hosts. All others are one rack.
    topology = "b200:8x8" if WAYS[way] == 8 else "b200:1x64"
    mesh, options = absent_mesh("b200:1x64"), {}
    if (size := WAYS[way]) > 1:
        mesh = Mesh(mesh.devices.reshape(-1, size), AXES, axis_types=(AxisType.Auto,) * 2)
        options = {"axis": AXES, "expert_axis": "expert"}
    tx, batch = zero_shard(optax.adamw(3e-4), stage=3, mesh=mesh, **options), (ROWS * 64, TOKENS + 1)
    step, state = tx.train_step(loss_of(way, mesh)), tx.create(params_of(way, mesh))
    found = plan(step, state, jax.ShapeDtypeStruct(batch, jnp.int32), topology=topology)
    gigabytes = lambda size: round(size / 1e9, 1)
    kinds = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
    return {
        "topology": topology,
        "peak": gigabytes(found.peak),
        "temporary": gigabytes(found.memory["temporary"]),
        "sent": {kind: gigabytes(found.collectives.moved(kind, unknown_once=True).bytes) for kind in kinds},
        "kernels s": round(found.roofline.kernels, 3),
        "communication s": round(found.roofline.communication, 3),
        "kernels wait s": round(sum(found.waits.values()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="JSON file (default: %(default)s)")
    args = parser.parse_args()
    for way in args.ways:
        found = measure(way)
        print(f"{way}: {found}", flush=True)
        kept = json.loads(args.out.read_text())["ways"] if args.out.exists() else {}
        record = {"jax": jax.__version__, "layers": CONFIG.layers, "ways": kept | {way: found}}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
