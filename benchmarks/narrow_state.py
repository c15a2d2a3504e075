"""Train a small GPT with wide and narrow optimizer state, and compare the losses.

    python benchmarks/narrow_state.py                      1,000 steps, and results/narrow_state.json
    python benchmarks/narrow_state.py --picture            also docs/narrow_state.png

It trains the GPT of examples/gpt.py on the source of Python's standard library, on one device. All ways of storing the
state see the same data and initial weights. The seeds are trained side by side: their parameters are stacked, which is
exact, because these optimizers are elementwise. The result is the training loss in nats per byte, averaged over the last
100 steps. Runs that are in the file already are not repeated, so an interrupted command continues.
"""

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import Narrow, zero_shard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

from gpt import GPT, next_byte_loss  # noqa: E402
from text import load, random_windows  # noqa: E402
from train_gpt import schedule  # noqa: E402

WIDTH, LAYERS, HEADS, ROWS, LENGTH = 64, 1, 1, 4, 16
LAST = 100  # steps whose mean loss is the result
POINTS = 40  # of a curve in the file
OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda rate: optax.adamw(rate, b2=0.999, weight_decay=0.1),
    "lion": lambda rate: optax.lion(lambda step: rate(step) / 5, weight_decay=0.5),
    "adam, additive decay": lambda rate: optax.chain(optax.add_decayed_weights(1e-4), optax.adam(rate, b2=0.999)),
}
WAYS = {
    "wide": None,
    "int8": Narrow("int8"),
    "float8": Narrow("float8"),
    "bfloat16": Narrow("bfloat16"),
    "bfloat16, nearest": Narrow("bfloat16", rounding="nearest"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of Adam (default: %(default)s)")
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "narrow_state.json")
    parser.add_argument("--picture", action="store_true", help="draw docs/narrow_state.png")
    asked = parser.parse_args()
    sizes = {"width": WIDTH, "layers": LAYERS, "batch": [ROWS, LENGTH], "peak rate": asked.rate}
    sizes |= {"steps": asked.steps, "seeds": asked.seeds}
    found = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    runs = found["runs"] if found.get("sizes") == sizes else {}
    text = load().train
    for optimizer in asked.optimizers:
        for way in asked.ways:
            if way in runs.setdefault(optimizer, {}):
                continue
            start = time.process_time()
            losses = learn(OPTIMIZERS[optimizer](schedule(asked.rate, asked.steps)), WAYS[way], text, asked)
            runs[optimizer][way] = {"last": losses[-LAST:].mean(0).round(5).tolist(), "curve": thinned(losses)}
            print(f"{optimizer:22} {way:18} {runs[optimizer][way]['last']}  ", end="")
            print(f"{time.process_time() - start:.0f} s of CPU", flush=True)
            asked.json.write_text(json.dumps(written(sizes, runs)) + "\n")
    for optimizer, ways in written(sizes, runs)["last"].items():
        for way, row in ways.items():
            print(f"{optimizer:22} {way:18} {row['mean']:.4f} over a range of {row['range']:.4f}", row["minus wide"])
    if asked.picture:
        draw(runs, HERE.parent / "docs" / "narrow_state.png")


def learn(optimizer: optax.GradientTransformation, way: Any, text: np.ndarray, asked: argparse.Namespace) -> np.ndarray:
    """Train one model per seed. Return their losses, by step and seed."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    tx = zero_shard(optimizer, stage=3, mesh=mesh, state=way)
    model, seeds = GPT(WIDTH, LAYERS, HEADS), range(asked.seeds)

    def init():
        keys = jax.vmap(jax.random.key)(jnp.arange(asked.seeds))
        return jax.vmap(lambda key: model.init(key, jnp.zeros((1, LENGTH), jnp.int32)))(keys)

    def loss(params, windows):  # windows: rows, seeds, bytes
        losses = jax.vmap(next_byte_loss(model), (0, 1))(params, windows)
        return jnp.sum(losses), losses

    step, state, found = tx.train_step(loss, has_aux=True), tx.create(tx.init_params(init)), []
    for i in range(asked.steps):
        windows = [random_windows(text, rows=ROWS, length=LENGTH, seed=seed, step=i) for seed in seeds]
        state, metrics = step(state, np.stack(windows, 1))
        found.append(np.asarray(metrics["aux"]))
    return np.stack(found).astype(np.float64)


def thinned(losses: np.ndarray) -> list[list[float]]:
    """Return a list per point: the number of steps, and each seed's mean loss since the previous point."""
    ends = np.linspace(0, len(losses), POINTS + 1).astype(int)
    return [[int(b), *losses[a:b].mean(0).round(4).tolist()] for a, b in zip(ends, ends[1:], strict=False) if b > a]


def written(sizes: dict, runs: dict) -> dict:
    """Return what the file contains: where it was measured, the result of each way, and the curves."""
    last = {}
    for optimizer, ways in runs.items():
        for way, run in ways.items():
            row = {"mean": round(statistics.fmean(run["last"]), 4), "range": round(np.ptp(run["last"]), 4)}
            if "wide" in ways:
                pairs = zip(run["last"], ways["wide"]["last"], strict=True)
                row["minus wide"] = [round(narrow - wide, 4) for narrow, wide in pairs]
            last.setdefault(optimizer, {})[way] = row
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "optax": optax.__version__,
        "hardware": f"one {jax.devices()[0].device_kind} device, {platform.machine()}",
        "sizes": sizes,
        "last": last,
        "runs": runs,
    }


def draw(runs: dict, path: Path) -> None:
    """Draw the mean loss of the seeds by step, and how far each way of storing the state is above wide state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(runs), 6), layout="constrained")
    panels = figure.subplots(2, len(runs), squeeze=False, sharex=True)
    for (above, below), (optimizer, ways) in zip(panels.T, runs.items(), strict=True):
        wide = np.array(ways["wide"]["curve"])
        for k, (way, run) in enumerate(ways.items()):
            curve = np.array(run["curve"])
            above.plot(curve[:, 0], curve[:, 1:].mean(1), color=f"C{k}", label=way)
            if way != "wide":
                apart = curve[:, 1:] - wide[:, 1:]
                below.plot(curve[:, 0], apart.mean(1), color=f"C{k}", label=way)
                below.fill_between(curve[:, 0], apart.min(1), apart.max(1), color=f"C{k}", alpha=0.15, linewidth=0)
        below.axhline(0, color="black", linewidth=0.8)
        above.set(title=optimizer, ylabel="loss, nats per byte")
        below.set(xlabel="step", ylabel="loss minus loss with wide state")
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
