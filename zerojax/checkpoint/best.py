"""Choose the best checkpoint of a directory by the metrics that were saved with the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.directory import step_name, steps_in
from zerojax.checkpoint.manifest import Manifest, read_manifest

BestFn = Callable[[dict[str, float]], float]


def check_metrics(metrics: Mapping[str, Any], best_fn: BestFn | None) -> None:
    """Raise an error if `metrics` are not numbers by name, or `best_fn` fails for metrics with these names."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics= is {metrics!r}. Give numbers by name, such as {{'loss': loss}}.")
    for name, x in metrics.items():
        if np.ndim(x) or not jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.number):
            raise TypeError(f"metrics[{name!r}] is {x!r}, and metrics are numbers. Give a number, or leave it out.")
    if best_fn is not None:
        best_fn(dict.fromkeys(metrics, 0.5))  # not the values, because this would wait for the devices


def best_step(root: Path, best_fn: BestFn, mode: str) -> int | None:
    """Return the step with the best score, the earliest of equal ones. None if no step has a score other than NaN."""
    manifests = [(step, read_manifest(root / step_name(step))) for step in steps_in(root)]
    found = [(step, one.metrics) for step, one in manifests if isinstance(one, Manifest) and one.metrics is not None]
    scores = {step: score for step, metrics in found if not math.isnan(score := float(best_fn(metrics)))}
    return (min if mode == "min" else max)(scores, key=scores.__getitem__, default=None)
