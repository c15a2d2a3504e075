"""Make an optimizer's first state that is offloaded, group by group, so the device never holds all state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.comm.mesh import to_storage
from zerojax.config import Config
from zerojax.layout.leaf import is_chunked
from zerojax.offload.chunked import split_chunks
from zerojax.offload.host import check_host_memory
from zerojax.optim.offloaded import is_on_disk
from zerojax.optim.sharding_plan import ShardingPlan, state_shapes
from zerojax.optim.traced import trace_inlined
from zerojax.optim.update import first_leaves
from zerojax.placement.storage import named, to_device
from zerojax.streaming.stores import disk_nodes, kept_on_device, store_for

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A parameter that is copied to the devices when it is needed."""

    load: Callable[[], Array]  # a function that copies the parameter to the devices, and returns it in storage shape
    shape: tuple[int, ...]  # the parameter's storage shape
    dtype: Any  # the parameter's type


def check_state_room(config: Config, plan: ShardingPlan) -> None:
    """Raise a `MemoryError` if the state that is offloaded to host memory does not fit there."""
    if config.offload is not None and config.offload.optimizer == "host" and plan.offloaded:
        needed = sum(plan.state[k].local_bytes for k in plan.offloaded) - sum(kept_on_device(config, plan).values())
        check_host_memory(config.mesh, needed, "The offloaded optimizer state")


def init_state_by_group(
    config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"] | Deferred]
) -> PyTree:
    """Make the state with one program for all leaves that stay on the device, and one program per offloaded group."""
    check_state_room(config, plan)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored]
    jaxpr, consts = trace_inlined(lambda *xs: first_leaves(config, plan, xs), *shapes)
    inputs = dict(zip(jaxpr.invars, stored, strict=True)) | dict(zip(compat.constvars_of(jaxpr), consts, strict=True))

    def init(leaves: Sequence[int]) -> list[list[Array]]:
        """Return a list of chunks, on the device, for each index in `leaves`."""
        outvars = [jaxpr.outvars[k] for k in leaves]
        eqns, read = jaxprs.needed_for(jaxpr.eqns, outvars)
        invars = [var for var in inputs if var in read]
        equations = compat.part_of(jaxpr, eqns, invars, outvars)

        def program(values):
            state = jax.core.eval_jaxpr(equations, (), *values)
            state = {k: to_storage(config.mesh, x, plan.state[k]) for k, x in zip(leaves, state, strict=True)}
            return [
                split_chunks(config.mesh, x, plan.state[k], plan.offloaded[k]) if k in plan.offloaded else [x]
                for k, x in state.items()
            ]

        shardings = [
            [named(config, plan.state[k])] * (len(plan.offloaded[k].extents) if k in plan.offloaded else 1)
            for k in leaves
        ]
        values = [inputs[var] for var in invars]
        loaded = [x.load() if isinstance(x, Deferred) else to_device(x) for x in values]
        return jax.jit(program, out_shardings=shardings)(loaded)

    return store_by_group(config, plan, init)


def store_by_group(config: Config, plan: ShardingPlan, make: Callable[[Sequence[int]], list[list[Array]]]) -> PyTree:
    """Return a state whose offloaded leaves are written to its store, group by group.

    `make(indices)` returns a list of chunks, on the device, for each of these leaves of the state.
    """
    store = store_for(config, plan)
    resident = [k for k, chunking in enumerate(plan.chunkings) if chunking is None]
    try:
        state: dict[int, Any] = {k: x for k, (x,) in zip(resident, make(resident), strict=True)}
        for group in plan.analysis(config).partition.groups:
            for n, chunks in enumerate(zip(*make(group.state), strict=True)):
                store.complete(store.write(group, n, chunks))
            state |= zip(group.state, store.nodes(group), strict=True)
    except BaseException:
        store.abandon()  # the traceback refers to the store, whose folder would stay locked as long as it exists
        raise
    return jax.tree.unflatten(plan.state_def, [state[k] for k in range(len(plan.state))])


def first_shapes(config: Config, plan: ShardingPlan) -> PyTree:
    """Return `state_shapes` of a first state. Do not create the files of state on disk."""
    nodes = disk_nodes(config, plan) if is_on_disk(config) else {}
    leaves = jax.tree.leaves(state_shapes(config, plan), is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, [nodes.get(k, x) for k, x in enumerate(leaves)])
