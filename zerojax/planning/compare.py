"""Run training steps on one device and on the mesh, and report leaf by leaf where the results differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.comm.explicit import auto_context
from zerojax.config import STAGES, Config
from zerojax.inspect.nonfinite import origins
from zerojax.layout.chunked import is_chunked
from zerojax.placement.chunking import joined
from zerojax.placement.storage import in_logical_shape
from zerojax.planning.comparison import Comparison, NonFinite, Snapshot, differences, first_nonfinite, snapshot
from zerojax.planning.reference import Reference
from zerojax.train.arguments import batch_shardings, check_batch, packed
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.transformation import ZeroTransformation

STEPS = 2
# The relative error of a long sum in another order, for float32, and in rounding units for narrower types.
FLOAT32_TOLERANCE, NARROW_UNITS = 1e-5, 2


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
        step: A step of `tx.train_step`. Its stage is replaced, and offloads that a stage cannot have are dropped.
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
            return Comparison(stages, workers, STEPS, tolerance, (), nonfinite)  # no leaf equals a NaN
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
    """Return `config` at another stage, with the offloads that it supports, and keeping gradients in the state."""
    offload = config.offload if stage else None
    if offload is not None and stage != 3:
        offload = dataclasses.replace(offload, params=None)
    return dataclasses.replace(config, stage=stage, offload=offload, tx=keeping_gradients(config.tx))


def keeping_gradients(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return `tx` after a transformation that stores the last gradients, as the first leaves of the joint state."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None):
        return updates, updates

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
    """Return the gradients that the optimizer received, in logical shapes, from the first leaves of `state`."""
    plan = state.plan
    arrays = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)[: len(plan.trained.params)]
    stored = [jnp.asarray(np.asarray(joined(x) if is_chunked(x) else x)) for x in arrays]  # on one device
    return plan.trained.treedef.unflatten(map(in_logical_shape, stored, plan.state))


def find_nonfinite(reference: Reference, states: Sequence[Any], runs: Mapping[Any, list[Snapshot]]) -> NonFinite | None:
    """Return the first leaf that is not finite, and the source lines that compute its first NaN.

    `states` has the reference's state before each step. `runs` has results by stage; those of the reference by None.
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
