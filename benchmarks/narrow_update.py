"""Compare updates of narrow optimizer state with updates of wide state: seconds on this machine, bytes on absent GPUs.

    python benchmarks/narrow_update.py                     AdamW and Lion, on one CPU device
    python benchmarks/narrow_update.py --topology h200:8   also bytes that the update's kernels move (extra `aot`)
    python benchmarks/narrow_update.py --json benchmarks/results/narrow_update.json

The loss is a weighted sum of the parameters, so nearly all of the step is its update. All ways run in turn in each
round, so that a slow moment of the machine affects all of them. The bytes are those that the compiled step's kernels
read and write for the update, from its HLO.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import machine
import optax

from zerojax import Narrow, Precision, names, plan, zero_shard
from zerojax.comm.collectives import UPDATE
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels

ROWS = 8
MATRIX = (2048, 1024)
MATRICES = 8
OPTIMIZERS: dict[str, Callable] = {"adamw": lambda: optax.adamw(1e-3), "lion": lambda: optax.lion(1e-3)}
WAYS: dict[str, Narrow | None] = {
    "wide": None,
    "int8": Narrow("int8"),
    "float8": Narrow("float8"),
    "bfloat16": Narrow("bfloat16"),
    "int8, compensated": Narrow("int8", masters="compensated"),
    "int8, rounded": Narrow("int8", masters="rounded"),
    "int8, in chunks": Narrow("int8", block=200),  # no power of two, as the kernel of GPUs needs
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--topology", help="absent GPUs to compile for, such as h200:8")
    parser.add_argument("--json", type=Path, help="write the figures to this JSON file")
    asked = parser.parse_args()
    found: dict[str, Any] = {**machine.described(), "rounds": asked.rounds, "parameters": [MATRICES, *MATRIX]}
    found["seconds"] = {name: seconds_of(OPTIMIZERS[name], asked) for name in asked.optimizers if asked.rounds}
    if asked.topology:
        found["topology"] = asked.topology
        found["bytes"] = {
            name: {way: bytes_of(OPTIMIZERS[name], WAYS[way], asked.topology) for way in asked.ways}
            for name in asked.optimizers
        }
        for name, row in found["bytes"].items():
            print(f"{name}: bytes per element that kernels of the update move on {asked.topology}: {row}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


def transformation(optimizer: Callable, way: Narrow | None, devices: int) -> Any:
    mesh = jax.make_mesh(
        (devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    return zero_shard(optimizer(), stage=3, mesh=mesh, precision=Precision.bf16(), state=way)


def loss(params: dict, x: Any) -> Any:
    return sum(jnp.mean((w * jnp.mean(x, 0).astype(w.dtype)).astype(jnp.float32)) for w in params.values())


def seconds_of(optimizer: Callable, asked: argparse.Namespace) -> dict[str, dict]:
    """Return the seconds of a step of each way, and their ratio to those of the wide state in the same round."""
    steps = {}
    for way in asked.ways:
        tx = transformation(optimizer, WAYS[way], 1)
        params = {f"w{i}": jax.random.normal(jax.random.key(i), MATRIX) / 32 for i in range(MATRICES)}
        steps[way] = [tx.train_step(loss), tx.create(params)]
    x, seconds = jax.random.normal(jax.random.key(0), (ROWS, MATRIX[1])), {way: [] for way in steps}
    for i in range(asked.rounds + 2):
        for way, (step, state) in steps.items():
            start = time.perf_counter()
            steps[way][1] = jax.block_until_ready(step(state, x)[0])
            if i > 1:  # the first rounds compile
                seconds[way].append(time.perf_counter() - start)
    rows = {}
    for way, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["wide"], strict=True)]
        rows[way] = {"median": statistics.median(times), "least": min(times), "most": max(times)}
        rows[way]["times wide"] = statistics.median(ratios)
        print(
            f"{way:20} {rows[way]['median'] * 1e3:7.1f} ms ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}), ", end=""
        )
        print(f"{rows[way]['times wide']:.2f} x wide", flush=True)
    return rows


def bytes_of(optimizer: Callable, way: Narrow | None, topology: str, size: int = 8192) -> dict[str, float]:
    """Return the bytes that kernels read and write on each device, per element of its part of a matrix.

    The norm of the gradients is a metric of the step. XLA computes it in a kernel of the wide update, but before a
    narrow one.
    """
    tx, x = transformation(optimizer, way, 1), jax.ShapeDtypeStruct((ROWS, size), jnp.bfloat16)
    state = jax.eval_shape(tx.create, {"w": jax.ShapeDtypeStruct((size, size), jnp.float32)})
    square = lambda params, x: jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)
    found = plan(tx.train_step(square), state, x, topology=topology)
    module, elements = read(found.text), size**2 // found.devices
    scopes = {i.name: i.op_name for c in module.computations.values() for i in c.instructions}
    of = lambda scope: sum(k.traffic * k.times for k in kernels(module) if scope in scopes[k.name]) / elements
    update, norm = of(UPDATE), of(names.GRAD_NORM)
    return {"update": round(update, 2), "with norm": round(update + norm, 2)}


if __name__ == "__main__":
    main()
