"""The results of one step, as host arrays by leaf, and the differences of two such results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.layout.tree import is_numeric
from zerojax.planning.comparison import Difference

MARGIN = 8  # rounding may move a leaf this many times as far as on one device, because sums have another order
CANCELLED = 1e-7  # rounding error of terms that cancel, relative to the largest leaf

Key = tuple[str, str]
Snapshot = dict[Key, np.ndarray]


def snapshot(metrics: Mapping[str, Any], grads: Any, params: Any, mutable: Any) -> Snapshot:
    """Return the results of one step, by quantity and leaf."""
    trees = {"value": metrics.get("loss"), "gradient": grads, "parameters": params, "mutable": mutable}
    trees["aux"] = metrics.get("aux")
    return {
        (quantity, jax.tree_util.keystr(path)): np.asarray(jax.device_get(x))
        for quantity, tree in trees.items()
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        if is_numeric(jnp.result_type(x))
    }


def differences(
    stage: int, step: int, found: Snapshot, expected: Snapshot, noise: dict[Key, float], tolerance: float
) -> Iterator[Difference]:
    """Yield the difference of each leaf of one step from the reference."""
    sizes = {key: largest(x) for key, x in expected.items()}
    of_all = {quantity: max(size for key, size in sizes.items() if key[0] == quantity) for quantity, _ in expected}
    for key, y in expected.items():
        quantity, path = key
        x = found[key]
        if x.shape != y.shape:
            shapes = f"shape {list(x.shape)}, on one device {list(y.shape)}"
            yield Difference(stage, step, quantity, path, np.inf, tolerance, shapes)
            continue
        allowed = max(tolerance * sizes[key], MARGIN * noise[key], CANCELLED * of_all[quantity])
        off, size = off_by(x, y.astype(x.dtype)), sizes[key] or 1.0
        yield Difference(stage, step, quantity, path, off / size, allowed / size)


def off_by(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference. NaN if an element is not finite and its counterpart differs."""
    with np.errstate(invalid="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        off = np.abs(np.where(same, 0, wide(x) - wide(y)))
    return float(np.max(np.where(np.isfinite(off), off, np.nan), initial=0.0))


def largest(x: np.ndarray) -> float:
    """Return the largest finite magnitude, or 0 if there is none."""
    size = np.abs(wide(x))
    return float(np.max(size, initial=0.0, where=np.isfinite(size)))


def wide(x: np.ndarray) -> np.ndarray:
    """Return the array in double precision, which is precise enough to subtract every type."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def first_nonfinite(found: Snapshot, before: Snapshot) -> Key | None:
    """Return the first loss, gradient or parameter that is not finite, but was finite in `before`."""
    for key, x in found.items():
        given = before.get(key) if key[0] == "parameters" else None
        watched = key[0] in ("value", "gradient", "parameters") and jnp.issubdtype(x.dtype, jnp.inexact)
        if watched and not np.isfinite(wide(x)).all() and (given is None or np.isfinite(wide(given)).all()):
            return key
    return None
