"""Train a small GPT with wide and narrow optimizer state, and compare the losses.

    python benchmarks/narrow_state.py                      2,000 steps, and results/narrow_state.json
    python benchmarks/narrow_state.py --picture            also docs/narrow_state.png

It trains the GPT of examples/gpt.py on the source of Python's standard library, on one device, and a linear regression
for three times the steps. All ways of storing the state see the same data and initial weights. The seeds are trained
side by side: their parameters are stacked, which is exact, because these optimizers are elementwise. The result is the
training loss (of the GPT: in nats per byte), averaged over the last 100 steps. Runs that are in the file are not
repeated, so an interrupted command continues.
"""

import argparse
import datetime
import itertools
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
    "adam, regression": lambda rate: optax.adam(rate, b2=0.999),
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
    parser.add_argument("--steps", type=int, default=2000)
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
            losses = learn(optimizer, WAYS[way], text, asked)
            runs[optimizer][way] = {"last": [short(x) for x in losses[-LAST:].mean(0)], "curve": thinned(losses)}
            print(f"{optimizer:22} {way:18} {runs[optimizer][way]['last']}  ", end="")
            print(f"{time.process_time() - start:.0f} s of CPU", flush=True)
            asked.json.write_text(json.dumps(written(sizes, runs)) + "\n")
    for optimizer, ways in written(sizes, runs)["last"].items():
        for way, row in ways.items():
            print(f"{optimizer:22} {way:18} {row['mean']:.4g} over a range of {row['range']:.4g}", row["minus wide"])
    if asked.picture:
        draw(runs, HERE.parent / "docs" / "narrow_state.png")


def gpt(seeds: range, text: np.ndarray) -> tuple[Callable, Callable, Callable]:
    """Return functions of a GPT per seed: `init()`, `losses(params, batch)`, and `batch(step)`, whose dim 0 is rows."""
    model = GPT(WIDTH, LAYERS, HEADS)
    first = jax.vmap(lambda key: model.init(key, jnp.zeros((1, LENGTH), jnp.int32)))
    init = lambda: first(jax.vmap(jax.random.key)(jnp.arange(len(seeds))))
    windows = lambda seed, step: random_windows(text, rows=ROWS, length=LENGTH, seed=seed, step=step)
    batch = lambda step: np.stack([windows(seed, step) for seed in seeds], 1)
    return init, jax.vmap(next_byte_loss(model), (0, 1)), batch


def regression(seeds: range, text: np.ndarray) -> tuple[Callable, Callable, Callable]:
    """Return the same functions for a linear regression, whose gradients become smaller and smaller."""
    goal = jnp.stack([jax.random.normal(jax.random.key(seed), (64, 256)) for seed in seeds])
    scales = np.logspace(0, -1, 64)
    losses = lambda params, x: jnp.mean(jnp.einsum("rsi,sio->rso", x, params["w"] - goal) ** 2, (0, 2))
    batch = lambda step: (np.random.default_rng(step).normal(size=(32, len(seeds), 64)) * scales).astype(np.float32)
    return lambda: {"w": jnp.zeros((len(seeds), 64, 256))}, losses, batch


def learn(run: str, way: Any, text: np.ndarray, asked: argparse.Namespace) -> np.ndarray:
    """Train one model per seed. Return their losses, by step and seed."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    is_gpt = run != "adam, regression"
    rate = schedule(asked.rate, asked.steps) if is_gpt else asked.rate
    tx = zero_shard(OPTIMIZERS[run](rate), stage=3, mesh=mesh, state=way)
    init, losses, batch = (gpt if is_gpt else regression)(range(asked.seeds), text)

    def loss(params, rows):
        found = losses(params, rows)
        return jnp.sum(found), found

    step, state, found = tx.train_step(loss, has_aux=True), tx.create(tx.init_params(init)), []
    for i in range(asked.steps if is_gpt else 3 * asked.steps):
        state, metrics = step(state, batch(i))
        found.append(np.asarray(metrics["aux"]))
    return np.stack(found).astype(np.float64)


def short(x: float) -> float:
    return float(f"{x:.4g}")


def thinned(losses: np.ndarray) -> list[list[float]]:
    """Return a list per point: the number of steps, and each seed's mean loss since the previous point."""
    ends = np.linspace(0, len(losses), POINTS + 1).astype(int)
    return [[int(b), *map(short, losses[a:b].mean(0))] for a, b in itertools.pairwise(ends) if b > a]


def written(sizes: dict, runs: dict) -> dict:
    """Return what the file contains: where it was measured, the result of each way, and the curves."""
    last = {}
    for optimizer, ways in runs.items():
        for way, run in ways.items():
            row = {"mean": short(statistics.fmean(run["last"])), "range": short(np.ptp(run["last"]))}
            if "wide" in ways:
                pairs = zip(run["last"], ways["wide"]["last"], strict=True)
                row["minus wide"] = [short(narrow - wide) for narrow, wide in pairs]
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
    """Draw the mean loss of the seeds by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(runs), 3.4), layout="constrained")
    for axes, (optimizer, ways) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for k, (way, run) in enumerate(ways.items()):
            curve = np.array(run["curve"])
            axes.plot(curve[:, 0], curve[:, 1:].mean(1), color=f"C{k}", label=way, linestyle=("-", "--")[k % 2])
        axes.set(title=optimizer, xlabel="step", ylabel="loss", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
