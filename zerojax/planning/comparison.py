"""Record the results of steps, compare them with one device leaf by leaf, and report the differences."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.inspect.nonfinite import Origin
from zerojax.layout.tree import is_numeric

QUANTITIES = ("value", "gradient", "parameters", "mutable", "aux")
MOST_SHOWN, WIDTH = 12, 100
MARGIN = 8  # on the mesh, rounding changes a leaf at most this many times as much as on one device
CANCELLED = 1e-7  # rounding error of terms that cancel, relative to the largest leaf
HINTS = {
    "value": "The loss of all rows is not the mean over devices and microbatches: rows meet in it (batch statistics, "
    "in-batch negatives), rows count differently (weighted=True), or it draws random numbers, which differ there. "
    'Take view="global" and no microbatches.',
    "gradient": "The loss is the same and its gradient is not: a rule for derivatives (a clipped cotangent, say) sees "
    'the rows of one device or microbatch. Take view="global" and no microbatches.',
    "parameters": "The gradients are the same and the update is not: please report the optimizer.",
    "mutable": "The mutable state is averaged over the devices, or passed from one microbatch to the next.",
    "aux": "aux is averaged over devices and microbatches: wrap sums in zerojax.Sum and rows in zerojax.Rows.",
}

Key = tuple[str, str]
Snapshot = dict[Key, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between a leaf on the mesh and the same leaf on one device, after one step.

    `difference` and `allowed` are relative to the leaf's largest magnitude on one device, or absolute if this is 0.
    """

    stage: int  # ZeRO stage on the mesh
    step: int  # 1 or 2
    quantity: str  # `"value"` (of the loss), `"gradient"`, `"parameters"`, `"mutable"` or `"aux"`
    path: str  # the path of the leaf, as returned by `jax.tree_util.keystr`. Empty for the value
    difference: float  # the largest difference; NaN if one of the two values is not finite
    allowed: float  # the largest difference that rounding explains
    shapes: str = ""  # both shapes if they differ

    @property
    def ok(self) -> bool:
        """Return whether rounding explains the difference."""
        return self.difference <= self.allowed

    @property
    def share(self) -> float:
        return self.difference / self.allowed if self.allowed else (0.0 if self.ok else math.inf)


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first leaf that is not finite."""

    stage: int | None  # ZeRO stage, or None if the leaf is not finite on one device either
    step: int  # 1 or 2
    quantity: str  # `"value"`, `"gradient"` or `"parameters"`
    path: str  # the path of the leaf. Empty for the value
    origins: tuple[Origin, ...]  # where the loss computes its first NaN, and its first inf if that is earlier

    def __str__(self) -> str:
        where = "on one device" if self.stage is None else f"at stage {self.stage}, and finite on one device"
        by_line = {origin.where: origin for origin in self.origins}  # for a line with an inf and a NaN, keep the NaN
        begins = "; ".join(map(str, by_line.values())) or "made by the update, not by the loss"
        return f"not finite: {self.quantity}{self.path} of step {self.step} {where}: {begins}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Steps on the mesh, compared with the same steps on one device.

    Attributes:
        stages: ZeRO stages that were compared.
        devices: Number of data-parallel workers of the mesh.
        steps: Number of updates.
        tolerance: Relative difference that is allowed for every leaf. It depends on the narrowest type in the loss's
            computation. If rounding on one device changes a leaf by more, the leaf may differ more.
        leaves: Every leaf of every step and stage. Empty if a leaf on one device is not finite.
        nonfinite: The first leaf that is not finite. None if all are finite.
    """

    stages: tuple[int, ...]
    devices: int
    steps: int
    tolerance: float
    leaves: tuple[Difference, ...]
    nonfinite: NonFinite | None

    @property
    def ok(self) -> bool:
        """Return whether the mesh and one device agree, and all leaves are finite."""
        return self.nonfinite is None and not self.differing

    @property
    def differing(self) -> tuple[Difference, ...]:
        """Return the leaves that differ by more than rounding, in the order in which a step computes them."""
        bad = [leaf for leaf in self.leaves if not leaf.ok]
        return tuple(sorted(bad, key=lambda leaf: (leaf.step, QUANTITIES.index(leaf.quantity))))

    def __str__(self) -> str:
        present = [q for q in QUANTITIES if any(leaf.quantity == q for leaf in self.leaves)]
        if not self.leaves:
            return str(self.nonfinite)
        lines = [
            f"{self.steps} steps on {self.devices} devices and on one; largest differences as shares of what rounding",
            f"explains, {self.tolerance:.1e} of a leaf's largest magnitude or more where one device measures more",
            f"{'stage':8s}{''.join(f'{q:>12s}' for q in present)}",
        ]
        for stage in self.stages:
            mine = [leaf for leaf in self.leaves if leaf.stage == stage]
            worst = [np.max([leaf.share for leaf in mine if leaf.quantity == q], initial=0.0) for q in present]
            verdict = "same" if all(leaf.ok for leaf in mine) else "DIFFERS"
            lines.append(f"{stage:<8d}{''.join(f'{x:12.2g}' for x in worst)}   {verdict}")
        if self.nonfinite is not None:
            lines.append(str(self.nonfinite))
        return "\n".join([*lines, *self._differing_lines()])

    def _differing_lines(self) -> list[str]:
        """Return a line of text per step and differing leaf, with the stages at which the leaf differs."""
        groups: dict[tuple, list[Difference]] = {}
        for leaf in self.differing:
            groups.setdefault((leaf.step, leaf.quantity, leaf.path), []).append(leaf)
        if not groups:
            return []
        width = max(len(quantity + path) for _, quantity, path in groups)
        lines = ["differing, relative to the leaf's largest magnitude:"]
        for (step, quantity, path), same in list(groups.items())[:MOST_SHOWN]:
            worst = max(same, key=lambda leaf: (leaf.difference != leaf.difference, leaf.difference))
            amount = worst.shapes or f"{worst.difference:.1e} (allowed {worst.allowed:.1e})"
            stages = f"stage{'s' * (len(same) > 1)} {', '.join(str(leaf.stage) for leaf in same)}"
            lines.append(f"  step {step}  {quantity + path:{width}s}  {amount}  {stages}")
        if len(groups) > MOST_SHOWN:
            lines.append(f"  and {len(groups) - MOST_SHOWN} more")
        return [*lines, *textwrap.wrap(HINTS[self.differing[0].quantity], WIDTH)]


def snapshot(**trees: Any) -> Snapshot:
    """Copy results to the host. `trees` has the tree of each quantity, by its name."""
    return {
        (quantity, jax.tree_util.keystr(path)): np.asarray(jax.device_get(x))
        for quantity in QUANTITIES
        for path, x in jax.tree_util.tree_flatten_with_path(trees.get(quantity))[0]
        if is_numeric(jnp.result_type(x))
    }


def differences(
    stage: int, step: int, found: Snapshot, expected: Snapshot, noise: dict[Key, float], tolerance: float
) -> Iterator[Difference]:
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
    """Return the largest absolute difference. Return NaN if two elements differ and one of them is not finite."""
    with np.errstate(invalid="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        off = np.abs(np.where(same, 0, wide(x) - wide(y)))
    return float(np.max(np.where(np.isfinite(off), off, np.nan), initial=0.0))


def largest(x: np.ndarray) -> float:
    size = np.abs(wide(x))
    return float(np.max(size, initial=0.0, where=np.isfinite(size)))


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def first_nonfinite(found: Snapshot, before: Snapshot) -> Key | None:
    """Return the first loss, gradient or parameter that is not finite. Skip parameters not finite in `before`."""
    for key, x in found.items():
        given = before.get(key) if key[0] == "parameters" else None
        watched = key[0] in ("value", "gradient", "parameters") and jnp.issubdtype(x.dtype, jnp.inexact)
        if watched and not np.isfinite(wide(x)).all() and (given is None or np.isfinite(wide(given)).all()):
            return key
    return None
