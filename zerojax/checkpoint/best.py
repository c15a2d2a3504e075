"""Choose the best checkpoint of a directory by the metrics that were saved with the checkpoints."""

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.directory import step_name, steps_in
from zerojax.checkpoint.errors import CheckpointError, in_one_line
from zerojax.checkpoint.manifest import Manifest, read_manifest

log = logging.getLogger("zerojax.checkpoint")
BestFn = Callable[[dict[str, float]], float]


def check_metrics(metrics: Mapping[str, Any], best_fn: BestFn | None) -> None:
    """Raise an error if `metrics` are not numbers by name, or `best_fn` reads one that is missing."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics= is {metrics!r}. Give numbers by name, such as {{'loss': loss}}.")
    for name, x in metrics.items():
        if np.ndim(x) or np.iscomplexobj(x) or not jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.number):
            raise TypeError(f"metrics[{name!r}] is {x!r}, and metrics are real numbers. Give one, or leave it out.")
    try:
        if best_fn is not None:
            best_fn(dict.fromkeys(metrics, 0.5))  # not the values, because this would wait for the devices
    except KeyError:
        raise
    except Exception:  # a function can be undefined at 0.5
        pass


def copied_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Copy metrics without waiting for devices. The caller may then change the dict and donate its arrays."""
    return {name: jnp.copy(x) if isinstance(x, jax.Array) else float(x) for name, x in metrics.items()}


def best_and_unread(root: Path, best_fn: BestFn, mode: str) -> list[int | None]:
    """Return the step with the best score, the earliest of equal ones, and then the steps whose manifest is unreadable.

    The best step is None if no step has a score other than NaN. A step whose metrics have other names has no score.
    """
    scores, unread, lacking = {}, [], None
    for step in steps_in(root):
        manifest = read_manifest(root / step_name(step))
        if not isinstance(manifest, Manifest):
            log.warning("The metrics of step %d in %s cannot be read: %s.", step, root, manifest)
            unread.append(step)
        elif manifest.metrics is not None:
            try:
                scores[step] = float(best_fn(manifest.metrics))
            except KeyError as error:
                lacking = error
            except Exception as error:
                raise CheckpointError(f"best_fn fails for the metrics of step {step}: {in_one_line(error)}") from error
    if lacking is not None and not scores:
        raise CheckpointError(f"best_fn reads the metric {lacking}, and no step in {root} has it. Change best_fn.")
    comparable = [step for step, score in scores.items() if not math.isnan(score)]
    return [(min if mode == "min" else max)(comparable, key=scores.__getitem__, default=None), *unread]
