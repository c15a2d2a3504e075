"""Choose the best checkpoint of a directory by the metrics that were saved with the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.directory import step_name, steps_in
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.manifest import Manifest, read_manifest

BestFn = Callable[[dict[str, float]], float]


def check_metrics(metrics: Mapping[str, Any], best_fn: BestFn | None) -> None:
    """Raise an error if `metrics` are not numbers by name, or `best_fn` fails for metrics with these names."""
    remedy = "Give numbers by name, such as {'loss': loss}."
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics= is a {type(metrics).__name__}. {remedy}")
    for name, x in metrics.items():
        if not isinstance(name, str) or np.ndim(x) or not jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.number):
            found = f"an array of shape {list(np.shape(x))}" if np.ndim(x) else f"a {type(x).__name__}"
            raise TypeError(f"metrics[{name!r}] is {found}. {remedy}")
    if best_fn is not None:
        best_fn(dict.fromkeys(metrics, 0.5))  # not the values, because this would wait for the devices


def as_number(x: Any) -> float:
    """Return a metric as a number. A replicated scalar on a mesh of several processes is read from this process."""
    return float(x.addressable_data(0) if isinstance(x, jax.Array) else x)


def best_step(root: Path, best_fn: BestFn, mode: str) -> int | None:
    """Return the step whose metrics are best, or the earliest of several; None if no step has metrics, or all are NaN.

    Raises:
        CheckpointError: If `best_fn` raises an error for the metrics of a step.
    """
    scores: dict[int, float] = {}
    for step in steps_in(root):
        manifest = read_manifest(root / step_name(step))
        if not isinstance(manifest, Manifest) or manifest.metrics is None:
            continue
        try:
            score = float(best_fn(manifest.metrics))
        except Exception as error:
            raise CheckpointError(
                f"best_fn raised {type(error).__name__}: {error} for the metrics of step {step}, {manifest.metrics}. "
                f"Give a best_fn that accepts the metrics of every step, and returns NaN for a step that is never best."
            ) from error
        if not math.isnan(score):
            scores[step] = score
    return (min if mode == "min" else max)(scores, key=scores.__getitem__, default=None)
