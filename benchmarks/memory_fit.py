"""Fit steps into the memory of GPUs with `train_step(memory=)`, and print the predicted and the compiled peaks.

    python benchmarks/memory_fit.py                             twelve combinations of model, batch and GPU
    python benchmarks/memory_fit.py --models gpt --json results/memory_fit.json

Each model of remat_budget.py is compiled at stage 3 with AdamW for eight GPUs of 80 and of 141 GB. The number of rows
is such that the plain program would take about 1.7 times the memory. Each line describes one compilation: the share of
their bytes that the blocks save, the predicted peak, and the peak of the compiled program, both in GB per device and as
a share of the memory. `chosen` marks the program that a step would run. `choosing` is the time to analyse the
blocks and to choose what they save, as a share of the time that XLA compiles. Needs the extra `aot`, but no GPU.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import statistics
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.monitoring
import jax.numpy as jnp
import optax
from remat_budget import HEADS, MODELS, TOKENS, WIDTH

import zerojax
from zerojax import zero_shard
from zerojax.budget import blocks
from zerojax.gpus.devices import Device, Topology, absent_mesh

LAYERS, SCANNED = 6, 24
# Rows per device with which the activations that XLA would keep take about 1.7 times the memory of 141 GB.
ROWS = {"gpt": 767, "gpt scan": 202, "vit": 747, "encoder-decoder": 310, "experts": 538, "u-net": 6900}


SPENT = collections.Counter[str]()  # seconds


def timed(function):
    """Return the function, which also adds its time to the seconds of choosing."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        begun = time.perf_counter()
        found = function(*args, **kwargs)
        SPENT["choosing"] += time.perf_counter() - begun
        return found

    return run


def compiled(event: str, seconds: float, **_) -> None:
    """Add the time of one compilation by XLA."""
    SPENT["compiling"] += seconds * ("backend_compile" in event)


for step in ("graph_of", "choose_saved", "least_bytes"):
    setattr(blocks, step, timed(getattr(blocks, step)))
jax.monitoring.register_event_duration_secs_listener(compiled)


def fitted(name: str, topology: str) -> dict:
    """Fit one model into the memory of the GPUs of a topology."""
    block, shapes, scan = MODELS[name]
    device = Device.of(Topology.parse(topology))
    memory = device.fitted(None)  # as a plan takes for "auto"
    rows = 8 * int(ROWS[name] * memory / 107e9)
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=absent_mesh(topology))
    marked = zerojax.block(block)

    def loss(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params)
        else:
            for p in params:
                x = marked(p, x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    layer = {key: array(*shape) for key, shape in shapes(WIDTH, HEADS).items()}
    stacked = {key: array(SCANNED, *x.shape) for key, x in layer.items()}
    state = tx.create(stacked if scan else [layer] * LAYERS)
    SPENT.clear()
    begun = time.perf_counter()
    fit = tx.train_step(loss, memory=memory).memory_fit(state, array(rows, TOKENS, WIDTH))
    return {
        "model": name,
        "topology": topology,
        "memory": memory,
        "rows": rows,
        "trials": [{"share": t.share, "predicted": t.predicted, "peak": t.peak} for t in fit.trials],
        "chosen": fit.trials.index(fit.chosen),
        "blocks": [dataclasses.asdict(block) for block in fit.blocks],
        "seconds": time.perf_counter() - begun,
        "choosing": SPENT["choosing"] / SPENT["compiling"],
    }


def show(found: dict) -> None:
    head = f"{found['model']} on {found['topology']}, {found['rows']} rows, {found['seconds']:.0f} s"
    print(f"\n{head}, choosing {found['choosing']:.1%}")
    for i, trial in enumerate(found["trials"]):
        parts = (trial["predicted"], trial["peak"], found["memory"])
        predicted, peak, _ = (f"{x / 1e9:.2f} GB ({x / found['memory']:.0%})" for x in parts)
        chosen = "  chosen" if i == found["chosen"] else ""
        print(f"  share {trial['share']:.3f}: predicted {predicted:18s} compiled {peak}{chosen}", flush=True)
    for block in found["blocks"]:
        saved = f"{block['saved'] / 1e6:.0f} MB, and repeat {block['share']:.0%} of their FLOPs"
        print(f"  {block['calls']} calls of the block at {block['line']} each save {saved}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--topologies", nargs="+", default=["h100:8", "h200:8"])
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    every = []
    versions = {"jax": jax.__version__, "zerojax": zerojax.__version__}
    result = {"date": f"{datetime.date.today()}", "versions": versions, "hardware": "absent GPUs"}
    for name in args.models:
        for topology in args.topologies:
            every.append(fitted(name, topology))
            show(every[-1])
            if args.json:  # after each combination, because the next one takes minutes
                args.json.write_text(json.dumps({**result, "combinations": every}, indent=1) + "\n")
    error = lambda trial: abs(trial["predicted"] / trial["peak"] - 1)
    wrong = [error(found["trials"][found["chosen"]]) for found in every]
    first = [error(found["trials"][0]) for found in every]
    print(f"\nprediction of the chosen program: median {statistics.median(wrong):.1%} wrong, at most {max(wrong):.1%}")
    print(f"prediction before any compilation: median {statistics.median(first):.1%} wrong, at most {max(first):.1%}")


if __name__ == "__main__":
    main()
