"""Compile the GPT yardstick at stage 3 for absent GPUs, and read off memory, bytes and overlap exactly.

    python benchmarks/aot_gpt.py                            both styles, 8 x H200, prefetch 0 and 1
    python benchmarks/aot_gpt.py --topology h200:8x8        64 GPUs
    python benchmarks/aot_gpt.py --size 13B --ways fp8 --styles scan --prefetch 1     GPT-3 13B
    python benchmarks/aot_gpt.py --topology h200:2x8 --ways hybrid hybrid-device      shards within a host (HSDP)
    python benchmarks/aot_gpt.py --ways tensor           ZeRO over 4, tensor and sequence parallel over 2 (Megatron)
    python benchmarks/aot_gpt.py --ways stage3 device gspmd replicated gathered gathered-O1 gathered-double
    python benchmarks/aot_gpt.py --prefetch 1 --ways stage3 pipelined pipelined-unordered      ours, and the best rival

It needs the extra `aot`, and no GPU. The ways:

- `stage3` and `device` are zerojax in global and device view.
- `gspmd` gives `jax.jit` sharded parameters and nothing else, `replicated` full ones.
- `gathered` is the strongest simple rival: `jax.jit` of a model that gathers each layer by hand in its rematerialised
  body. `-O1` adds XLA's level O1, which overlaps collectives within a loop. `-double` adds double buffered loops and
  combined collectives.
- `pipelined` is the strongest rival: stage 3 written out by hand for this model (`pipelined.py`), its parts ordered by
  JAX's `program_order`, and the collectives of a layer combined. `-unordered` is without `program_order`, `-unroll` the
  same with two layers per iteration of a scan, `-uncombined` with XLA's default sizes of collectives.
- `hybrid` shards everything within hosts, `inside` only the parameters. They are compiled so that two collectives may
  be in flight, one over NVLink and one over the network. Otherwise XLA's scheduler takes them one after the other.
- `tensor` has a second mesh axis for the model.
- `fp8` and `fp8-device` have Flax's FP8 layers. Their passes are also relative to the parameters in bfloat16.

The figures:

- `passes`: bytes all-gathered over the bytes of the sharded parameters in the compute type.
- `hidden`: the share of all collective bytes with a matrix product in flight. `inside` and `across` are the same within
  hosts and between them. With `tensor` these cover ZeRO's collectives, and `beside` the model's, for which its next
  product waits.
- `float8`: the share of the products' FLOPs that have float8 operands.
- `waiting`: the share of the step, simulated at peak rates, in which kernels wait for collectives. `for` is what they
  wait for most.
- `step ms` and `exposed ms`: the expected time of the program, and its exposed time, simulated at the rates that such
  GPUs usually achieve (docs/plan.md). `waits ms` is the part of the exposed time in which kernels wait. In the other
  part, collectives slow products.
- `lines`: lines of code that a user adds to the plain model.
- `all-in`: temporary memory, arguments and results over the parameters.
"""

import argparse
import ast
import dataclasses
import datetime
import functools
import inspect
import json
import os
import pathlib
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
import pipelined
import yardstick
from flax.linen import fp8_ops
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import Wire, zero_shard
from zerojax.comm.collectives import LABEL
from zerojax.gpus.devices import Device
from zerojax.gpus.rates import Rates
from zerojax.gpus.topology import Topology, absent_mesh
from zerojax.inspect.expected import Expected
from zerojax.inspect.hlo import read
from zerojax.inspect.overlap import Overlap, overlap
from zerojax.inspect.roofline import roofline
from zerojax.planning.compiled_plan import waits_by_cause

OURS = {
    "stage3": "global",
    "device": "device",
    "hybrid": "global",
    "hybrid-device": "device",
    "inside": "global",
    "inside-device": "device",
    "tensor": "global",
    "wire": "global",
    "wire-inside": "global",
    "fp8": "global",
    "fp8-device": "device",
}
WIRE = Wire(gather="int8", reduce="int4")
AXES = {
    "hybrid": {"shard_axis": "gpu"},
    "hybrid-device": {"shard_axis": "gpu"},
    "inside": {"params_axis": "gpu"},
    "inside-device": {"params_axis": "gpu"},
    "wire": {"wire": WIRE},
    "wire-inside": {"wire": WIRE, "params_axis": "gpu"},
}
TWO_AT_ONCE = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
COMBINED = {
    "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**26,
}
DOUBLE = {"xla_gpu_enable_while_loop_double_buffering": True, **COMBINED}
COMPILER_OPTIONS = {
    **dict.fromkeys(AXES, TWO_AT_ONCE),
    "tensor": TWO_AT_ONCE,
    **dict.fromkeys(("pipelined", "pipelined-unordered", "pipelined-unroll"), COMBINED),
    "gathered-O1": {"optimization_level": "O1"},
    "gathered-double": {"xla_gpu_enable_latency_hiding_scheduler": True, **DOUBLE},
}
PIPELINED = {
    "pipelined": {},
    "pipelined-uncombined": {},
    "pipelined-unordered": {"ordered": False},
    "pipelined-unroll": {"ordered": False, "unroll": 2},
}
WAYS = [*OURS, "gspmd", "replicated", "gathered", "gathered-O1", "gathered-double", *PIPELINED]


# A bucket holds the gradients of one layer, as it does for the other sizes by default.
BUCKETS = {"13B": {"bucket_bytes": 2**30}}


def measure(
    style: str, way: str = "stage3", *, prefetch: int = 1, topology: str = "h200:8", size: str = "gpu", **changes
) -> dict:
    """Compile one training gradient and read its figures off the program."""
    scan, axes = style == "scan", ("host", "gpu") if way in AXES else ("data",)
    mesh = absent_mesh(topology, axes=axes)
    tensor_parallel = way == "tensor"
    if way in ("fp8", "fp8-device"):
        changes["dot_general"] = fp8_ops.Fp8DirectDotGeneralOp
    if tensor_parallel:
        mesh = Mesh(mesh.devices.reshape(-1, 2), (*axes, "model"))
    init, loss, (rows, length) = yardstick.build(size, scan=scan, **changes)
    if tensor_parallel:
        loss = yardstick.tensor_parallel(loss, mesh)
    if way.startswith("gathered"):
        loss = yardstick.gathered_by_hand(dataclasses.replace(yardstick.SIZES[size], **changes), scan, mesh)
    stage = 0 if way == "replicated" else 3
    options = {"mesh": mesh, "axis": axes, "prefetch": prefetch, "view": OURS.get(way, "global")}
    options |= BUCKETS.get(size, {})
    tx = zero_shard(optax.adamw(1e-4), stage=stage, **AXES.get(way, {}), **options)
    shapes = jax.eval_shape(init, jax.random.key(0))
    if tensor_parallel:
        shapes = yardstick.over_model(shapes)
    batch = NamedSharding(mesh, PartitionSpec(axes))
    workers = mesh.size // mesh.shape.get("model", 1)
    tokens = jax.ShapeDtypeStruct((rows * workers, length), jnp.int32, sharding=batch)
    start = time.perf_counter()
    if way in OURS:
        lowered = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(shapes), tokens)
    else:
        where = tx.shardings(shapes).params
        gradient = jax.value_and_grad(loss)
        if way in PIPELINED:
            chosen, specs = dataclasses.replace(yardstick.SIZES[size], **changes), jax.tree.map(lambda s: s.spec, where)
            gradient = pipelined.value_and_grad(chosen, scan, mesh, specs, **PIPELINED[way])
        program = jax.jit(
            gradient,
            in_shardings=(where, batch),
            out_shardings=(NamedSharding(mesh, PartitionSpec()), where),
        )
        lowered = program.lower(shapes, tokens)
    traced = time.perf_counter() - start
    compiled = lowered.compile(compiler_options=COMPILER_OPTIONS.get(way))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    held = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    parts = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, axis=axes).create(shapes).plan.grads
    gpu = Device.of(Topology.parse(topology))
    module, moved = read(text), overlap(text)
    across = [one for one in moved.in_flight if gpu.ring_bandwidth(one.collective.group) < gpu.links.link]
    beside = [one for one in moved.in_flight if tensor_parallel and not LABEL.search(one.collective.op_name)]
    own = [one for one in moved.in_flight if one not in beside]
    inside = [one for one in own if one not in across]
    waits = waits_by_cause(module, gpu)
    expected = Expected.of(module, moved, Rates().of(gpu, Topology.parse(topology).kind))
    least = roofline(module, moved, gpu)
    kernels, operations = least.kernels, least.operations
    float8 = sum(count for dtype, count in operations.items() if dtype.startswith("f8"))
    width = jnp.dtype(yardstick.SIZES[size].dtype).itemsize
    sharded = sum(leaf.along_others(mesh.shape).size for leaf in parts if leaf.kind == "sharded") * width
    return {
        "style": style,
        "way": way,
        "size": size,
        "topology": topology,
        "prefetch": prefetch,
        "passes": round(Overlap(tuple(own)).of("all-gather").bytes / sharded, 4),
        "hidden": round(Overlap(tuple(own)).hidden_share, 4),
        "inside": round(Overlap(tuple(inside)).hidden_share, 4),
        "across": round(Overlap(tuple(across)).hidden_share, 4),
        "beside": round(Overlap(tuple(beside)).hidden_share, 4),
        "sent across MiB": round(sum(one.collective.sent * one.collective.times_if_once for one in across) / 2**20, 1),
        "float8": round(float8 / sum(operations.values()), 4),
        "waiting": round(sum(waits.values()) / (kernels + sum(waits.values())), 4),
        "for": next(iter(waits), "").replace(f"{pathlib.Path(__file__).parents[1]}/", ""),
        "step ms": round(1e3 * expected.seconds, 1),
        "exposed ms": round(1e3 * expected.exposed, 2),
        "waits ms": round(1e3 * expected.waits, 2),
        "lines": code_lines(way),
        "all-in": round(held / sum(leaf.bytes for leaf in parts), 4),
        "temp MiB": round(memory.temp_size_in_bytes / 2**20, 1),
        "trace s": round(traced, 1),
        "compile s": round(time.perf_counter() - start - traced, 1),
    }


def code_lines(way: str) -> int:
    """Lines of code, without comments and docstrings, that a user adds to the plain model for one way."""
    if way in OURS:
        return 3  # zero_shard(...), tx.shard(params), and tx.value_and_grad(loss)
    written = {"gathered": yardstick.gathered_by_hand, "pipelined": pipelined}.get(way.partition("-")[0])
    if written is None:
        return 2  # the shardings, and those of jax.jit
    tree = ast.parse(inspect.getsource(written))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).split("\n"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--styles", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--ways", nargs="+", default=["stage3"], choices=WAYS)
    parser.add_argument("--size", default="gpu", choices=yardstick.SIZES)
    parser.add_argument("--prefetch", nargs="+", type=int, default=[1, 0])
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    rows = []
    show = functools.partial(print, sep="  ", flush=True)
    for style in args.styles:
        for way in args.ways:
            for prefetch in args.prefetch if way in OURS else [0]:
                row = measure(style, way, prefetch=prefetch, topology=args.topology, size=args.size)
                rows.append(row)
                show(*(f"{key} {value}" for key, value in row.items()))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {"date": datetime.date.today().isoformat(), "jax": jax.__version__, "compiled only": True, "rows": rows}
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
