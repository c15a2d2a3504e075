"""Run a loss on one device and on the mesh, and report leaf by leaf where the two differ.

One device is the reference: plain JAX and optax. The values that are compared are those of
real steps, so the gradients are read out of the optimizer, which is chained to one that
keeps them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import compat
from zerojax.config import STAGES, Config
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import is_numeric, layout_of
from zerojax.placement.chunking import joined
from zerojax.planning.comparison import Comparison, Difference, NonFinite
from zerojax.planning.nonfinite import is_float, origins
from zerojax.planning.plain_step import PlainState, PlainStep
from zerojax.train.batch import check_batch
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.zero import ZeroTransformation

STEPS = 2
# Sums over many rows in another order differ by this in float32; in a narrower type by two of its units.
FLOAT32_TOLERANCE, NARROW_UNITS = 1e-5, 2
# The reference is run again from parameters moved by one unit: what that changes, rounding may change.
REPEATS, MARGIN = 3, 8

Snapshot = dict[tuple[str, str], np.ndarray]


def compare(
    tx: ZeroTransformation,
    loss_fn: Callable,
    params: Any,
    batch: Any,
    *args: Any,
    stages: int | Sequence[int] = tuple(STAGES),
    mutable: Any = None,
    has_aux: bool = False,
    weighted: bool = False,
    accumulate: int = 1,
) -> Comparison:
    """Take two steps on one device and on the mesh, and say leaf by leaf where they differ.

    One device runs plain JAX and optax on the entire batch. Compared are the loss, the
    gradients that the optimizer is given, the parameters after each update, and where the
    loss has them its mutable state and aux. All products are computed in full float32.
    Where the loss, a gradient or a parameter is not finite, the result names the leaf and
    the line of the model that makes the first NaN.

    Args:
        tx: From `zero_shard`; its stage is replaced, and its offload dropped where a stage has none.
        loss_fn: As for `train_step`.
        params: Parameters in any form; arrays, as small as the model allows. One device
            holds all of them, their gradients and their optimizer state.
        batch: The global batch; arrays. The same for both steps.
        *args: Further arguments of the loss.
        stages: ZeRO stages to compare, one or several.
        mutable: As for `create`; if it is given, the loss is as for `train_step(mutable=True)`.
        has_aux: As for `train_step`.
        weighted: As for `train_step`.
        accumulate: As for `train_step`; one device takes all rows at once.

    Returns:
        A `Comparison`; its `ok` says whether both give the same, but for rounding.

    Raises:
        TypeError: If `tx` is not of `zero_shard`, or the loss is no function.
        ValueError: If an argument is of shapes, no stage is given or one is unknown, the mesh
            is of absent devices, or devices and microbatches do not divide the batch.
    """
    if not isinstance(tx, ZeroTransformation):
        raise TypeError(f"compare takes a transformation of zero_shard, not {type(tx).__name__}. Wrap it: zero_shard(tx, stage=3).")
    if not callable(loss_fn):
        raise TypeError(f"compare takes a loss function after tx, not {type(loss_fn).__name__}.")
    step = tx.train_step(loss_fn, has_aux=has_aux, weighted=weighted, mutable=mutable is not None, accumulate=accumulate)
    return compare_step(step, params, mutable, batch, args, stages=stages)


def compare_step(
    step: Step, params: Any, mutable: Any, batch: Any, args: tuple, *, stages: int | Sequence[int] = tuple(STAGES)
) -> Comparison:
    """`compare` for a training step, with its options.

    Args:
        step: Of `train_step`.
        params: Parameters in any form.
        mutable: What the loss updates beside; None if nothing.
        batch: The global batch.
        args: Further arguments of the loss.
        stages: ZeRO stages to compare, one or several.
    """
    stages = (stages,) if isinstance(stages, int) else tuple(stages)
    config = step.config
    check_given(config, {"params": params, "mutable": mutable, "batch": batch, "args": args}, stages)
    check_batch(batch, config.data, step.options.accumulate)
    configs = [at_stage(config, stage) for stage in stages]  # raises before anything is run
    with jax.default_matmul_precision("highest"):
        plain, start, rows, more = reference_of(step, params, mutable, batch, args)
        unit = narrowest_unit(plain, start, rows, more)
        states, expected = run_plain(plain, start, rows, more)
        noise = rounding(plain, start, expected, rows, more, unit)
        runs = {c.stage: run_sharded(step.under(c), params, mutable, batch, args) for c in configs}
        found = find_nonfinite(plain, states, expected, runs, rows, more)
    tolerance = max(FLOAT32_TOLERANCE, NARROW_UNITS * unit)
    leaves = [
        difference
        for stage, snapshots in runs.items()
        for k, snapshot in enumerate(snapshots)
        for difference in differences(stage, k + 1, snapshot, expected[k], noise[k], tolerance, unit)
    ]
    return Comparison(stages, config.data.workers, STEPS, tolerance, tuple(leaves), found)


def check_given(config: Config, given: dict[str, Any], stages: Sequence[int]) -> None:
    """Refuse what cannot be run.

    Raises:
        ValueError: If an argument has shapes, there is no stage, or the mesh is of absent devices.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(given)[0]:
        if isinstance(x, jax.ShapeDtypeStruct):
            name = f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
            raise ValueError(f"{name} is a shape, {x.dtype}{list(x.shape)}, and compare runs the loss. Give arrays.")
    if not stages:
        raise ValueError("stages= names no ZeRO stage. Give one or several of 0, 1, 2 and 3.")
    if not set(config.mesh.devices.flat) <= set(jax.devices()):
        raise ValueError("The mesh of tx is of absent devices, and compare runs the loss. Give a mesh of real devices.")


def at_stage(config: Config, stage: int) -> Config:
    """The configuration at another stage, that keeps the gradients; offloaded is what the stage can offload.

    Raises:
        ValueError: If the stage is unknown.
    """
    offload = config.offload if stage else None
    if offload is not None and stage != 3:
        offload = dataclasses.replace(offload, params=None)
    return dataclasses.replace(config, stage=stage, offload=offload, tx=optax.chain(keep_gradients(), config.tx))


def keep_gradients() -> optax.GradientTransformation:
    """A transformation that changes nothing, and whose state is the last gradients."""
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    return optax.GradientTransformation(zeros, lambda grads, state, params=None: (grads, grads))


def reference_of(
    step: Step, params: Any, mutable: Any, batch: Any, args: tuple
) -> tuple[PlainStep, PlainState, Any, tuple]:
    """The reference, its first state, and batch and arguments free of any mesh."""
    program = step._program
    program = dataclasses.replace(program, config=at_stage(dataclasses.replace(program.config, offload=None), 0))
    given = to_host(ZeroTransformation.of(step.config).unshard(params))
    plain = PlainStep(program, layout_of(program.config, given))
    rows, more = to_host(batch), to_host(args)
    start = plain.init(given, to_host(mutable))
    try:
        jax.eval_shape(plain.step, start, rows, more)
    except NameError:  # in device view a loss may name the mesh axes
        plain = dataclasses.replace(plain, axes=program.config.data.batch)
    return plain, start, rows, more


def to_host(tree: Any) -> Any:
    """Arrays of NumPy, which jit puts on the default device; PRNG keys as they are."""
    return jax.tree.map(lambda x: jax.device_get(x) if is_numeric(jnp.result_type(x)) else x, tree)


def narrowest_unit(plain: PlainStep, state: PlainState, batch: Any, args: tuple) -> float:
    """The unit in the last place of 1, in the narrowest floating type that the gradient is computed in."""
    closed = jax.make_jaxpr(plain.value_and_grad)(state.params, state.mutable, batch, args)
    dtypes = set(dtypes_in(compat.opened(closed)[0]))
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)), default=0.0)


def dtypes_in(jaxpr: Any) -> Iterator[Any]:
    """Types of the results of a jaxpr's equations, and of the jaxprs inside."""
    for eqn in jaxpr.eqns:
        yield from (var.aval.dtype for var in eqn.outvars if hasattr(var.aval, "dtype"))
        for inner in compat.inner_jaxprs(eqn):
            yield from dtypes_in(inner)


def run_plain(
    plain: PlainStep, state: PlainState, batch: Any, args: tuple
) -> tuple[list[PlainState], list[Snapshot]]:
    """The reference: the state before each step, and what each step gave."""
    step, states, snapshots = jax.jit(plain.step), [], []
    for _ in range(STEPS):
        states.append(state)
        state, metrics = step(state, batch, args)
        snapshots.append(snapshot(metrics, state.opt_state[0], state.params, state.mutable))
    return states, snapshots


def run_sharded(step: Step, params: Any, mutable: Any, batch: Any, args: tuple) -> list[Snapshot]:
    """What each step gives on the mesh."""
    tx, snapshots = ZeroTransformation.of(step.config), []
    state = tx.create(params, mutable=mutable)
    for _ in range(STEPS):
        state, metrics = step(state, batch, *args)
        snapshots.append(snapshot(metrics, kept_gradients(state), tx.unshard(state.params), state.mutable))
    return snapshots


def kept_gradients(state: ZeroState) -> Any:
    """What `keep_gradients` kept, the first leaves of the optimizer's state; logical shapes."""
    trained, plan = state.plan.trained, state.plan
    arrays = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)[: len(trained.params)]
    values = [logical(joined(x) if is_chunked(x) else x, leaf) for x, leaf in zip(arrays, plan.state, strict=False)]
    return trained.treedef.unflatten(values)


def logical(stored: Any, leaf: Leaf) -> np.ndarray:
    """An array in storage without its padding, on the host; logical shape."""
    x = np.asarray(stored)
    return x[: leaf.size].reshape(leaf.shape) if leaf.kind == "flat" else x[tuple(slice(n) for n in leaf.shape)]


def snapshot(metrics: dict, grads: Any, params: Any, mutable: Any) -> Snapshot:
    """What one step gave, by quantity and leaf."""
    trees = {"value": metrics["loss"], "gradient": grads, "parameters": params, "mutable": mutable}
    trees["aux"] = metrics.get("aux")
    return {
        (quantity, jax.tree_util.keystr(path)): np.asarray(jax.device_get(x))
        for quantity, tree in trees.items()
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        if is_numeric(jnp.result_type(x))
    }


def rounding(
    plain: PlainStep, start: PlainState, expected: Sequence[Snapshot], batch: Any, args: tuple, unit: float
) -> list[dict[tuple[str, str], float]]:
    """For each step and leaf, how far rounding the parameters by one unit moves the reference.

    It is large where terms cancel, as in the gradient of a bias before a normalisation, and where
    an optimizer divides such a gradient by its own size.
    """
    noise = [dict.fromkeys(s, 0.0) for s in expected]
    before = snapshot({"loss": 0.0}, None, start.params, None)
    for seed in range(REPEATS):
        random = np.random.default_rng(seed)

        def rounded(x, random=random):
            return (x * (1 + unit * random.choice([-1, 1], x.shape))).astype(x.dtype) if is_float(x) else x

        params = jax.tree.map(rounded, to_host(start.params))
        moved = snapshot({"loss": 0.0}, None, params, None)
        _, snapshots = run_plain(plain, plain.init(params, start.mutable), batch, args)
        for k, found in enumerate(snapshots):
            for key, x in found.items():
                shift = wide(moved[key]) - wide(before[key]) if key in before and key[0] == "parameters" else 0
                noise[k][key] = max(noise[k][key], largest(wide(x) - shift - wide(expected[k][key])))
    return noise


def differences(
    stage: int,
    step: int,
    found: Snapshot,
    expected: Snapshot,
    noise: dict[tuple[str, str], float],
    tolerance: float,
    unit: float,
) -> Iterator[Difference]:
    """Each leaf of one step beside the reference."""
    sizes = {key: largest(x) for key, x in expected.items()}
    of_all = {quantity: max(size for key, size in sizes.items() if key[0] == quantity) for quantity, _ in expected}
    for key, y in expected.items():
        quantity, path = key
        x = found[key]
        if x.shape != y.shape:
            shapes = f"shape {list(x.shape)}, on one device {list(y.shape)}"
            yield Difference(stage, step, quantity, path, np.inf, tolerance, shapes)
            continue
        # The last: a sum that cancels is left with the rounding of its terms.
        allowed = max(tolerance * sizes[key], MARGIN * noise[key], unit * of_all[quantity])
        off, size = off_by(x, y.astype(x.dtype)), sizes[key] or 1.0
        yield Difference(stage, step, quantity, path, off / size, allowed / size)


def off_by(x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference; NaN where one is not finite and the other is another value."""
    with np.errstate(invalid="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        off = np.abs(np.where(same, 0, wide(x) - wide(y)))
    return float(np.max(np.where(np.isfinite(off), off, np.nan), initial=0.0))


def largest(x: np.ndarray) -> float:
    """The largest finite magnitude; 0 of none."""
    size = np.abs(wide(x))
    return float(np.max(size, initial=0.0, where=np.isfinite(size)))


def wide(x: np.ndarray) -> np.ndarray:
    """In double precision, which subtracts every type exactly enough."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def find_nonfinite(
    plain: PlainStep,
    states: Sequence[PlainState],
    expected: Sequence[Snapshot],
    runs: dict[int, list[Snapshot]],
    batch: Any,
    args: tuple,
) -> NonFinite | None:
    """The first leaf that is not finite, on one device or else on the mesh, and where that begins."""
    start = snapshot({"loss": 0.0}, None, states[0].params, None)
    workers = plain.program.config.data.workers
    for stage, snapshots in {None: expected, **runs}.items():
        for k, found in enumerate(snapshots):
            leaf = first_nonfinite(found, start)
            if leaf is None:
                continue
            quantity, path = leaf
            shares = [batch] if stage is None else [share(batch, i, workers) for i in range(workers)]
            begins = ()
            for rows in shares if quantity != "parameters" else ():
                given = {"params": states[k].params, "mutable": states[k].mutable, "batch": rows, "args": args}
                begins = begins or origins(plain.value_and_grad, **given)
            return NonFinite(stage, k + 1, quantity, path, begins)
    return None


def first_nonfinite(found: Snapshot, start: Snapshot) -> tuple[str, str] | None:
    """The loss, gradient or parameter that is not finite, unless the parameter was given so."""
    for key, x in found.items():
        given = start.get(key) if key[0] == "parameters" else None
        watched = key[0] in ("value", "gradient", "parameters") and jnp.issubdtype(x.dtype, jnp.inexact)
        if watched and not np.isfinite(wide(x)).all() and (given is None or np.isfinite(wide(given)).all()):
            return key
    return None


def share(batch: Any, index: int, workers: int) -> Any:
    """The rows of one device."""
    return jax.tree.map(lambda x: x[len(x) // workers * index : len(x) // workers * (index + 1)], batch)
