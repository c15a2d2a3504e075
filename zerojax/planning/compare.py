"""Run training steps on one device and on the mesh, and report leaf by leaf where the results differ."""

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.comm.mesh import auto_context
from zerojax.config import STAGES, Config
from zerojax.layout.leaf import is_chunked
from zerojax.offload.options import Offload
from zerojax.planning.reference import QUANTITIES, Key, Reference, Snapshot, largest, snapshot, wide
from zerojax.train.arguments import batch_shardings, packed
from zerojax.train.checked import check_batch
from zerojax.train.nan_lines import Origin, origins
from zerojax.train.params import logical_of_stored
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.zero import ZeroTransformation

STEPS = 2
# The relative error of a long sum in another order, in float32. For narrower types, the same error in rounding units.
FLOAT32_TOLERANCE, NARROW_UNITS = 1e-5, 2
MOST_SHOWN, WIDTH = 12, 100
MARGIN = 8  # rounding may change a leaf on the mesh by this many times the change that it causes on one device
CANCELLED = 1e-7  # rounding error of terms that cancel, relative to the largest leaf
HINTS = {
    "value": "The loss of all rows is not the mean over devices and microbatches: rows meet in it (batch statistics, "
    "in-batch negatives), rows count differently (weighted=True), or it draws random numbers, which differ there. "
    'Take view="global" and no microbatches.',
    "gradient": "The loss is the same and its gradient is not: a rule for derivatives (a clipped cotangent, say) sees "
    'the rows of one device or microbatch. Take view="global" and no microbatches.',
    "parameters": "The gradients are the same and the update is not: please report the optimizer.",
    "mutable": "The mutable state is averaged over the devices, or passed from one microbatch to the next.",
    "aux": "aux is averaged over devices and microbatches: wrap sums in zerojax.metrics.Sum and rows in PerRow.",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between a leaf on the mesh and the same leaf on one device, after one step.

    `difference` and `allowed` are relative to the leaf's largest magnitude on one device, or absolute if that is 0.
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

    stage: int | None  # ZeRO stage of the run on the mesh, or None for the run on one device
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
            computation. A leaf may differ by more if rounding alone changes it by more on one device.
        leaves: A `Difference` per leaf, step and stage. Empty if a leaf on one device is not finite.
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


def first_nonfinite(found: Snapshot, before: Snapshot) -> Key | None:
    """Return the first non-finite loss, gradient or parameter, or None. Skip those already non-finite in `before`."""
    is_finite = lambda x: np.isfinite(wide(x)).all()
    for key, x in found.items():
        watched = key[0] in ("value", "gradient", "parameters") and jnp.issubdtype(x.dtype, jnp.inexact)
        if watched and not is_finite(x) and (key[0] != "parameters" or key not in before or is_finite(before[key])):
            return key
    return None


@auto_context()
def compare(
    step: Step, state: ZeroState, batch: Any, *args: Any, stages: int | Sequence[int] = tuple(STAGES)
) -> Comparison:
    """Run two training steps on one device and on the mesh, and report leaf by leaf where the results differ.

    One device runs plain JAX and optax on the entire batch, without microbatches. `compare` compares the loss, the
    gradients that the optimizer receives, the parameters after each update, and the loss's mutable state and aux. All
    products are computed in full float32. If the loss, a gradient or a parameter is not finite, the result names the
    leaf, and the line of the model that produces the first NaN.

    Args:
        step: A step of `tx.train_step`. It runs at each of `stages`, without offloads that a stage does not support.
        state: A state of `tx.create`, which is not changed. All runs start from its parameters and its mutable state.
            Make the model small: one device holds all parameters, their gradients and their optimizer state.
        batch: The global batch, as arrays. Both steps take the same batch.
        *args: Further arguments of the loss.
        stages: ZeRO stages to compare, one or several.

    Returns:
        A `Comparison`. Its `ok` says whether the results agree up to rounding.

    Raises:
        TypeError: If `step` is not a step, or `state` is not a `ZeroState`.
        ValueError: If an argument has shapes instead of arrays, `stages` is empty or has an unknown stage, the mesh has
            devices that this machine does not have, or devices and microbatches do not divide the batch.
    """
    if not (isinstance(step, Step) and isinstance(state, ZeroState)):
        raise TypeError(
            f"compare takes a step of tx.train_step and a state of tx.create, not {type(step).__name__} and "
            f"{type(state).__name__}."
        )
    stages, workers = (stages,) if isinstance(stages, int) else tuple(stages), step.config.data.workers
    given = {"params": state.params, "mutable": state.mutable, "batch": batch, "args": packed(args)}
    configs = [at_stage(step.config, stage) for stage in stages]
    check_given(step, given, stages)
    # By default, a GPU rounds float32 operands of products to 10 bits, which would look like a difference.
    with jax.default_matmul_precision("highest"):
        reference = Reference.of(step, **given)
        tolerance = max(FLOAT32_TOLERANCE, NARROW_UNITS * reference.unit)
        states, expected = reference.run(reference.start, STEPS)
        if (nonfinite := find_nonfinite(reference, states, {None: expected})) is not None:
            return Comparison(stages, workers, STEPS, tolerance, (), nonfinite)  # every leaf would differ from a NaN
        noise = reference.noise(expected)
        runs = {config.stage: run_sharded(step.under(config), **given) for config in configs}
        nonfinite = find_nonfinite(reference, states, runs)
    leaves = [
        difference
        for stage, snapshots in runs.items()
        for k, found in enumerate(snapshots)
        for difference in differences(stage, k + 1, found, expected[k], noise[k], tolerance)
    ]
    return Comparison(stages, workers, STEPS, tolerance, tuple(leaves), nonfinite)


def check_given(step: Step, given: dict[str, Any], stages: Sequence[int]) -> None:
    for path, x in jax.tree_util.tree_flatten_with_path(given)[0]:
        if isinstance(x, jax.ShapeDtypeStruct):
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
            raise ValueError(f"{name} is a shape, {x.dtype}{list(x.shape)}, and compare runs the loss. Give arrays.")
    if not stages:
        raise ValueError("stages= names no ZeRO stage. Give one or several of 0, 1, 2 and 3.")
    if not set(step.config.mesh.devices.flat) <= set(jax.devices()):
        raise ValueError("The mesh of tx is of absent devices, and compare runs the loss. Give a mesh of real devices.")
    check_batch(given["batch"], step.config.data, step.options.accumulate)
    batch_shardings(step.config, step.config.mesh, given["batch"])


def at_stage(config: Config, stage: int) -> Config:
    """Return `config` at `stage`, without unsupported offloads, and with an optimizer that stores its gradients."""
    offload = config.offload if stage else None
    if isinstance(offload, Offload) and stage != 3:
        offload = dataclasses.replace(offload, params=None)
    return dataclasses.replace(config, stage=stage, offload=offload, tx=keeping_gradients(config.tx))


def keeping_gradients(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a chain of two transformations: one that stores the latest gradients as its state, and then `tx`."""
    init = lambda params: jax.tree.map(jnp.zeros_like, params)
    update = lambda updates, state, params=None: (updates, updates)
    return optax.chain(optax.GradientTransformation(init, update), tx)


def run_sharded(step: Step, params: Any, mutable: Any, batch: Any, args: tuple) -> list[Snapshot]:
    tx, snapshots = ZeroTransformation.of(step.config), []
    state = tx.create(params, mutable=mutable)
    for _ in range(STEPS):
        state, metrics = step(state, batch, *args)
        results = {"value": metrics["loss"], "gradient": kept_gradients(state), "aux": metrics.get("aux")}
        snapshots.append(snapshot(parameters=tx.unshard(state.params), mutable=state.mutable, **results))
    return snapshots


def kept_gradients(state: ZeroState) -> Any:
    """Return the gradients that `keeping_gradients` stored, in logical shapes: the first leaves of the state."""
    trained = state.plan.trained
    stored = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)[: len(trained.params)]
    return trained.treedef.unflatten(map(logical_of_stored, stored, state.plan.state))


def find_nonfinite(reference: Reference, states: Sequence[Any], runs: Mapping[Any, list[Snapshot]]) -> NonFinite | None:
    """Return the first leaf that is not finite, with the lines of its first NaN. Return None if all are finite.

    `states` has the reference's state before each step. `runs` has the results by stage, or by None for the reference.
    """
    workers = reference.plain.program.config.data.workers
    for stage, snapshots in runs.items():
        for k, found in enumerate(snapshots):
            if (leaf := first_nonfinite(found, reference.before)) is None:
                continue
            begins = ()
            if leaf[0] != "parameters":  # at a stage, search the rows of each device
                shares = range(workers) if stage is not None else [None]
                each = (origins(reference.plain.value_and_grad, **reference.inputs(states[k], i)) for i in shares)
                begins = next(filter(None, each), ())
            return NonFinite(stage, k + 1, *leaf, begins)
    return None
