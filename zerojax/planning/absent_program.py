"""A step, or any jitted function, lowered for absent GPUs: its arguments become shapes on their mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.comm.explicit import auto_context
from zerojax.gpus.topology import absent_mesh_like
from zerojax.inspect.memory import peak_bytes
from zerojax.layout.tree import Layout
from zerojax.offload.measure import Choice
from zerojax.planning.read_plan import STATE_PARTS, StepFacts
from zerojax.planning.shapes import abstract, named_sharding, on_mesh
from zerojax.planning.stage_bytes import estimate_stage
from zerojax.train.state import ZeroState
from zerojax.train.step import Step
from zerojax.units import format_bytes
from zerojax.zero import ZeroTransformation


class AbsentProgram(NamedTuple):
    """A program for absent GPUs.

    Attributes:
        lower: Lowers it for a batch, of which shapes are enough.
        row_multiple: Rows of a batch are a multiple of this.
        facts: What the program does not say.
    """

    lower: Callable[[Any], Any]
    row_multiple: int
    facts: StepFacts

    def compile(self, batch: Any) -> Any:
        """Compile the program for a batch."""
        return self.lower(batch).compile()


def program_of_step(step: Step, state: Any, batch: Any, args: tuple, topology: str) -> AbsentProgram:
    """Return a step of `train_step` on absent GPUs. Its state is sharded anew for them.

    Raises:
        TypeError: If `state` is no `ZeroState`.
    """
    if not isinstance(state, ZeroState):
        raise TypeError(
            f"A step of train_step is planned with its ZeroState, not {type(state).__name__}. Make one with "
            f"tx.create(params), of which shapes are enough: tx.create(jax.eval_shape(init))."
        )
    mesh = absent_mesh_like(step.config.mesh, topology, axes=step.config.axis)
    config = dataclasses.replace(step.config, user_mesh=mesh)
    moved, shapes = step.under(config), state_shapes(ZeroTransformation.of(config), state)
    accumulate = step.options.accumulate
    row = estimate_stage(config, shapes.plan, accumulate)
    facts = StepFacts(
        parts={**STATE_PARTS, "batch": "batch"},
        # The formula does not count what other axes shard and move.
        sent_formula=None if config.data.compiler_axes else row.sent,
        host=row.host,
        disk=row.disk,
        notes=(*shapes.plan.update_in_words, *offload_notes(moved, shapes)),
    )
    lower = lambda batch: moved.lower(shapes, abstract(batch), *abstract(args))
    return AbsentProgram(auto_context()(lower), config.data.workers * accumulate, facts)


def state_shapes(tx: ZeroTransformation, state: ZeroState) -> ZeroState:
    """Return a state of any mesh as shapes on the mesh of a transformation."""
    params = params_on_mesh(state.plan.layout, tx.config.mesh)
    shapes = tx.create(params, mutable=abstract(state.mutable))
    if not any(shapes.plan.chunkings):
        return shapes
    # Where the update runs is measured on live devices, which these are not.
    choice = state.plan.choice or Choice("device", "as long as nothing was measured")
    return shapes.replace(plan=dataclasses.replace(shapes.plan, choice=choice))


def params_on_mesh(layout: Layout, mesh: Mesh) -> Any:
    """Return logical shapes of parameters, sharded over other mesh axes only, as a user gives them."""
    leaves = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, PartitionSpec(*leaf.others)) if any(leaf.others) else None,
        )
        for leaf in layout.grads
    ]
    return jax.tree.unflatten(layout.treedef, leaves)


def offload_notes(step: Step, state: ZeroState) -> tuple[str, ...]:
    """Describe what a plan does not show of offloaded state, if there is any."""
    if not any(state.plan.chunkings):
        return ()
    most = max(peak_bytes(lowered.compile()) for lowered in step.lower_update(state))
    return (
        "The program, its collectives and its time end with the gradients; the formula is of the whole step. The "
        f"offloaded state is updated afterwards, chunk by chunk, in programs of up to {format_bytes(most)} each.",
        "The compiler does not see memory kinds of absent devices: host memory is an estimate, and parameters in host "
        "memory count as the device's.",
    )


def program_of_function(f: Any, state: Any, batch: Any, args: tuple, topology: str) -> AbsentProgram:
    """Return a jitted function on absent GPUs. Its arguments keep their specs.

    Raises:
        TypeError: If `f` is not jitted.
        ValueError: If arguments are on meshes of different axes, or the function names devices.
    """
    if not callable(getattr(f, "lower", None)):
        raise TypeError(
            f"plan takes a step of tx.train_step or a jitted function, not {type(f).__name__}. Give jax.jit(f)."
        )
    shardings = filter(None, map(named_sharding, jax.tree.leaves((state, batch, args))))
    meshes = {sharding.mesh for sharding in shardings}
    if len({(mesh.axis_names, tuple(mesh.shape.values())) for mesh in meshes}) > 1:
        raise ValueError(
            f"The arguments are on meshes of different axes: {', '.join(sorted(str(dict(m.shape)) for m in meshes))}. "
            f"Put all of them on one mesh."
        )
    given = next(iter(meshes)) if meshes else Mesh(np.array(jax.devices()[:1]), ("data",))
    axes = given.axis_names if len(given.axis_names) == 1 else batch_axes(batch)
    mesh = absent_mesh_like(given, topology, axes=axes)
    context = jax.sharding.get_abstract_mesh()
    move = functools.partial(on_mesh, mesh)

    def lower(batch: Any) -> Any:
        try:
            with contextlib.nullcontext() if context.empty else jax.set_mesh(mesh):
                return f.lower(move(state), move(batch), *move(args))
        except ValueError as error:
            if not re.search("incompatible devices|memory kind", str(error), re.IGNORECASE):
                raise
            raise ValueError(
                "The function names devices of its own, in in_shardings, out_shardings or a sharding constraint, and "
                "cannot be moved to absent ones. Leave shardings to its arguments, or give specs alone."
            ) from error

    sharded = [sharding for x in jax.tree.leaves(move(batch)) if (sharding := named_sharding(x))]
    unsharded = "No argument has a NamedSharding, so every device does the same. Give arguments NamedShardings."
    facts = StepFacts() if meshes or mesh.size == 1 else StepFacts(notes=(unsharded,))
    return AbsentProgram(lower, math.lcm(*map(row_shards, sharded)), facts)


def batch_axes(batch: Any) -> tuple[str, ...]:
    """Return the mesh axes that the rows of a batch are sharded over, if all leaves agree on them."""
    specs = [sharding.spec for x in jax.tree.leaves(batch) if (sharding := named_sharding(x))]
    entries = {spec[0] for spec in specs if len(spec)}
    return entry_axes(entries.pop()) if len(entries) == 1 else ()


def row_shards(sharding: NamedSharding) -> int:
    """Return the number of shards into which a sharding divides dim 0."""
    axes = entry_axes(sharding.spec[0]) if len(sharding.spec) else ()
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
