"""Compile the GPT yardstick at stage 3 for absent GPUs, and read off memory, bytes and overlap exactly.

    python benchmarks/aot_gpt.py                            both styles, 8 x H200, prefetch 0 and 1
    python benchmarks/aot_gpt.py --topology h200:8x8        64 GPUs
    python benchmarks/aot_gpt.py --size 13B --ways fp8 --styles scan --prefetch 1     GPT-3 13B
    python benchmarks/aot_gpt.py --topology h200:2x8 --ways hybrid hybrid-device      shards within a host (HSDP)
    python benchmarks/aot_gpt.py --ways tensor           ZeRO over 4, tensor and sequence parallel over 2 (Megatron)
    python benchmarks/aot_gpt.py --ways stage3 device gspmd replicated gathered gathered-O1 gathered-double
    python benchmarks/aot_gpt.py --prefetch 1 --ways stage3 pipelined pipelined-unordered      ours, and the best rival
    python benchmarks/aot_gpt.py --prefetch 1 --attention xla cudnn pallas shard_map custom_partitioning
    python benchmarks/aot_gpt.py --prefetch 1 --layers 4 --attention cudnn --precision bf16        sums in float32
    python benchmarks/aot_gpt.py --kernels --prefetch 1 --layers 8 --ways stage3 gathered pipelined-unordered

It needs the extra `aot`, and no GPU. The ways:

- `stage3` and `device` are zerojax in global and device view.
- `gspmd` gives `jax.jit` sharded parameters and nothing else, `replicated` full ones.
- `gathered` is the strongest simple rival: `jax.jit` of a model that gathers each layer by hand in its rematerialised
  body. `-O1` adds XLA's level O1, which overlaps collectives within a loop. `-double` adds double buffered loops and
  combined collectives.
- `rules` shards by rules for logical axes, as MaxText does (`by_rules.py`). `-options` adds MaxText's options.
- `pipelined` is the strongest rival: stage 3 written out by hand for this model (`pipelined.py`), its parts ordered by
  JAX's `program_order`, and the collectives of a layer combined. `-unordered` is without `program_order`, `-unroll` the
  same with two layers per iteration of a scan, `-uncombined` with XLA's default sizes of collectives.
- `hybrid` shards everything within hosts, `inside` only the parameters. They are compiled so that two collectives may
  be in flight, one over NVLink and one over the network. Otherwise XLA's scheduler takes them one after the other.
- `tensor` has a second mesh axis for the model.
- `fp8` and `fp8-device` have Flax's FP8 layers. Their passes are also relative to the parameters in bfloat16.

The figures:

- `passes`: bytes all-gathered over the bytes of the sharded parameters in the compute type.
- `reduced MiB`: what a device sends to reduce gradients, by kind and type.
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

`--kernels` prints no figures, but the kernels that the first way launches beyond each other way, and the times of all
kernels (`aot_kernels.py`).
"""

import argparse
import ast
import dataclasses
import datetime
import functools
import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import aot_kernels
import by_rules
import jax
import jax.numpy as jnp
import optax
import pipelined
import yardstick
from flax.linen import fp8_ops
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax import Precision, Tuning, Wire, zero_shard
from zerojax.comm.collectives import LABEL
from zerojax.gpus.devices import Device, Rates, Topology, absent_mesh
from zerojax.inspect.compiled_collectives import CompiledCollectives
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import overlap, roofline
from zerojax.inspect.timeline import Expected, simulate
from zerojax.planning.absent_program import kernels_for

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
    "wire": {},
    "wire-inside": {"params_axis": "gpu"},
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
    "rules-options": by_rules.OPTIONS,
    "gathered-O1": {"optimization_level": "O1"},
    "gathered-double": {"xla_gpu_enable_latency_hiding_scheduler": True, **DOUBLE},
}
PIPELINED = {
    "pipelined": {},
    "pipelined-uncombined": {},
    "pipelined-unordered": {"ordered": False},
    "pipelined-unroll": {"ordered": False, "unroll": 2},
}
RULES = ("rules", "rules-options")
WAYS = [*OURS, "gspmd", "replicated", *RULES, "gathered", "gathered-O1", "gathered-double", *PIPELINED]


# A bucket holds the gradients of one layer, as it does for the other sizes by default.
BUCKETS = {"13B": {"bucket_bytes": 2**30}}


class Built(NamedTuple):
    """A gradient of the yardstick, compiled.

    Attributes:
        compiled: The program.
        mesh: The mesh of absent GPUs.
        axes: The data axes.
        shapes: The shapes of the parameters.
        traced: Seconds of the processor to trace and lower it.
        seconds: Seconds of the processor to compile it, in all threads and processes.
    """

    compiled: Any
    mesh: Mesh
    axes: tuple[str, ...]
    shapes: Any
    traced: float
    seconds: float


def measure(style: str, way: str = "stage3", *, topology: str = "h200:8", **options) -> dict:
    """Compile one training gradient, and read its figures off the program. `options` are those of `build`."""
    with kernels_for(absent_mesh(topology)):
        return figures(build(style, way, topology=topology, **options), style, way, topology=topology, **options)


def build(
    style: str,
    way: str = "stage3",
    *,
    prefetch: int = 1,
    topology: str = "h200:8",
    size: str = "gpu",
    attention: str = "xla",
    precision: Precision | None = None,
    **changes,
) -> Built:
    """Compile one training gradient.

    Without a `precision`, the model casts its own parameters, and gradients are summed in its type, bfloat16.
    """
    axes = ("host", "gpu") if way in AXES else ("data",)
    mesh = absent_mesh(topology, axes=axes)
    if way == "tensor":
        mesh = Mesh(mesh.devices.reshape(-1, 2), (*axes, "model"))
    tuning = {"prefetch": prefetch, **AXES.get(way, {}), **BUCKETS.get(size, {})}
    options = {"size": size, "attention": attention, "precision": precision, "tuning": tuning}
    program, shapes, args = program_of(style, way, mesh, axes=axes, **options, **changes)
    jax.clear_caches()
    start = processor_seconds()
    lowered = program.lower(*args)
    traced = processor_seconds() - start
    compiled = lowered.compile(compiler_options=COMPILER_OPTIONS.get(way))
    seconds = processor_seconds() - start - traced
    return Built(compiled, mesh, axes, shapes, traced, seconds)


def program_of(
    style: str,
    way: str,
    mesh: Mesh,
    *,
    axes: tuple[str, ...] = ("data",),
    size: str = "gpu",
    attention: str = "xla",
    precision: Precision | None = None,
    tuning: Mapping[str, Any] = MappingProxyType({}),
    **changes,
) -> tuple[Any, Any, tuple]:
    """Return the jitted gradient, the shapes of the parameters, and the gradient's arguments."""
    scan = style == "scan"
    if way in ("fp8", "fp8-device"):
        changes["dot_general"] = fp8_ops.Fp8DirectDotGeneralOp
    init, loss, (rows, length) = yardstick.build(size, scan=scan, attention=attention, mesh=mesh, **changes)
    shapes = jax.eval_shape(init, jax.random.key(0))
    if way == "tensor":
        loss, shapes = yardstick.tensor_parallel(loss, mesh), yardstick.over_model(shapes)
    tx = zero_shard(
        optax.adamw(1e-4),
        stage=0 if way == "replicated" else 3,
        mesh=mesh,
        axis=axes,
        precision=precision,
        view=OURS.get(way, "global"),
        wire=WIRE if way.startswith("wire") else None,
        tuning=Tuning(**tuning),
    )
    batch = NamedSharding(mesh, PartitionSpec(axes))
    workers = mesh.size // mesh.shape.get("model", 1)
    tokens = jax.ShapeDtypeStruct((rows * workers, length), jnp.int32, sharding=batch)
    if way in OURS:
        return jax.jit(tx.value_and_grad(loss)), shapes, (tx.shard(shapes), tokens)
    where, chosen = tx.shardings(shapes).params, dataclasses.replace(yardstick.SIZES[size], **changes)
    if way.startswith("gathered"):
        loss = yardstick.gathered_by_hand(chosen, scan, mesh)
    if way in RULES:
        where, loss = by_rules.shardings(shapes, mesh), by_rules.constrained(loss, mesh)
    gradient = jax.value_and_grad(loss)
    if way in PIPELINED:
        specs = jax.tree.map(lambda s: s.spec, where)
        gradient = pipelined.value_and_grad(chosen, scan, mesh, specs, **PIPELINED[way])
    program = jax.jit(
        gradient,
        in_shardings=(where, batch),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), where),
    )
    return program, shapes, (shapes, tokens)


def processor_seconds() -> float:
    """Return the processor time of this process, and of processes that it started and that have ended."""
    return sum(os.times()[:4])


def figures(
    built: Built,
    style: str,
    way: str,
    *,
    topology: str,
    prefetch: int = 1,
    size: str = "gpu",
    attention: str = "xla",
    precision: Precision | None = None,
    **changes,
) -> dict:
    """Return the figures of a compiled gradient, with the options that it was built with."""
    compiled, mesh, tensor_parallel = built.compiled, built.mesh, way == "tensor"
    memory, text = compiled.memory_analysis(), compiled.as_text()
    held = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    parts = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, axis=built.axes).create(built.shapes).plan.grads
    gpu = Device.of(Topology.parse(topology))
    module, moved = read(text), overlap(text)
    across = [one for one in moved if gpu.ring_bandwidth(one.group) < gpu.link]
    beside = [one for one in moved if tensor_parallel and not LABEL.search(one.op_name)]
    own = [one for one in moved if one not in beside]
    inside = [one for one in own if one not in across]
    waits = simulate(module, gpu).waits
    expected = Expected.of(module, moved, Rates().of(Topology.parse(topology)))
    least = roofline(module, moved, gpu)
    kernels, operations = least.kernels, least.operations
    float8 = sum(count for dtype, count in operations.items() if dtype.startswith("f8"))
    width = jnp.dtype(yardstick.SIZES[size].dtype).itemsize
    sharded = sum(leaf.along_others(mesh.shape).size for leaf in parts if leaf.kind == "sharded") * width
    return {
        "style": style,
        "way": way,
        "attention": attention,
        **({"precision": "bf16"} if precision else {}),
        "size": size,
        "topology": topology,
        "prefetch": prefetch,
        "passes": round(CompiledCollectives(own).moved("all-gather", unknown_once=True).bytes / sharded, 4),
        "reduced MiB": reduced_by_type(moved),
        "hidden": round(CompiledCollectives(own).hidden_share, 4),
        "inside": round(CompiledCollectives(inside).hidden_share, 4),
        "across": round(CompiledCollectives(across).hidden_share, 4),
        "beside": round(CompiledCollectives(beside).hidden_share, 4),
        "sent across MiB": round(sum(one.sent * one.times_if_once for one in across) / 2**20, 1),
        "float8": round(float8 / sum(operations.values()), 4),
        "waiting": round(sum(waits.values()) / (kernels + sum(waits.values())), 4),
        "for": max(waits, key=lambda cause: waits[cause], default="").replace(
            f"{pathlib.Path(__file__).parents[1]}/", ""
        ),
        "step ms": round(1e3 * expected.seconds, 1),
        "kernels ms": round(1e3 * expected.roofline.kernels, 1),
        "exposed ms": round(1e3 * expected.exposed, 2),
        "waits ms": round(1e3 * expected.waits, 2),
        "lines": code_lines(way),
        "all-in": round(held / sum(leaf.bytes for leaf in parts), 4),
        "temp MiB": round(memory.temp_size_in_bytes / 2**20, 1),
        "trace processor s": round(built.traced, 1),
        "compile processor s": round(built.seconds, 1),
    }


def compare_kernels(styles: Sequence[str], ways: Sequence[str], *, topology: str, **options) -> dict[str, dict]:
    """Return, for each style, the kernels that the first way has beyond each other way, at achievable rates."""
    gpu, found = Rates().of(Topology.parse(topology)), {}
    for style in styles:
        with kernels_for(absent_mesh(topology)):
            texts = {way: build(style, way, topology=topology, **options).compiled.as_text() for way in ways}
        found[style] = aot_kernels.compare(texts, gpu)
    return found


def reduced_by_type(moved: CompiledCollectives) -> dict[str, float]:
    """MiB per device that are reduce-scattered and all-reduced, by type."""
    found: dict[str, float] = {}
    for kind in ("reduce-scatter", "all-reduce"):
        for one in moved.of(kind):
            key = f"{kind} {one.dtype}"
            found[key] = found.get(key, 0) + one.sent * one.times_if_once / 2**20
    return {key: round(size, 1) for key, size in found.items()}


def code_lines(way: str) -> int:
    """Lines of code, without comments and docstrings, that a user adds to the plain model for one way."""
    if way in OURS:
        return 3  # zero_shard(...), tx.shard(params), and tx.value_and_grad(loss)
    by_hand = {"gathered": yardstick.gathered_by_hand, "pipelined": pipelined, "rules": by_rules}
    written = by_hand.get(way.partition("-")[0])
    if written is None:
        return 2  # the shardings, and those of jax.jit
    tree = ast.parse(inspect.getsource(written))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).split("\n"))


def write(out: pathlib.Path, **figures) -> None:
    """Write figures to a JSON file, with the date and the versions."""
    out.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "jax-cuda13-plugin", "flax")}
    found = {"date": datetime.date.today().isoformat(), **versions, "compiled only": True, **figures}
    out.write_text(json.dumps(found, indent=2) + "\n")


def show_kernels(args: argparse.Namespace) -> None:
    """Print what the first way launches beyond the others, and write it to `args.out`."""
    changes = {} if args.layers is None else {"layers": args.layers}
    options = {"prefetch": args.prefetch[0], "size": args.size, "attention": args.attention[0]}
    options["precision"] = Precision.bf16() if args.precision else None
    styles = compare_kernels(args.styles, args.ways, topology=args.topology, **options, **changes)
    print(json.dumps(styles, indent=2))
    if args.out:
        write(args.out, topology=args.topology, layers=args.layers, styles=styles)
    print(aot_kernels.totals(styles))
    if "gathered" in args.ways[1:]:
        print(aot_kernels.table(styles))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="h200:8")
    parser.add_argument("--styles", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--ways", nargs="+", default=["stage3"], choices=WAYS)
    parser.add_argument("--size", default="gpu", choices=yardstick.SIZES)
    parser.add_argument("--prefetch", nargs="+", type=int, default=[1, 0])
    parser.add_argument("--attention", nargs="+", default=["xla"], choices=yardstick.ATTENTION)
    parser.add_argument("--precision", choices=["bf16"], help="Precision.bf16(): gradients are summed in float32")
    parser.add_argument("--layers", type=int, help="layers of the model, if not those of its size")
    parser.add_argument("--kernels", action="store_true", help="list the kernels that only the first of the ways has")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.kernels:
        show_kernels(args)
        return
    rows: list[dict] = []
    show = functools.partial(print, sep="  ", flush=True)
    changes = {} if args.layers is None else {"layers": args.layers}
    for style, way, attention in itertools.product(args.styles, args.ways, args.attention):
        for prefetch in args.prefetch if way in OURS else [0]:
            options = {"prefetch": prefetch, "topology": args.topology, "size": args.size, "attention": attention}
            row = measure(style, way, **options, precision=Precision.bf16() if args.precision else None, **changes)
            rows.append(row)
            if args.out:  # after each row, because the next one may take minutes
                write(args.out, rows=rows)
            show(*(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
