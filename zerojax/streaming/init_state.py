"""The optimizer's first state, laid out; what is offloaded is made task by task, never all of it on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.config import Config
from zerojax.layout.chunked import Chunking, chunk_shapes
from zerojax.layout.leaf import Leaf
from zerojax.offload.host import check_host_memory, host_sharding, to_device
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.partition import carve
from zerojax.optim.plan import ShardingPlan, offloaded_part
from zerojax.optim.state_memory import state_shardings, state_to_host
from zerojax.placement.chunking import chunked, split_chunks
from zerojax.placement.storage import cast, named, to_storage, view
from zerojax.streaming.stores import StateStore, disk_nodes, store_for

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped


def init_opt_state(config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"]]) -> PyTree:
    """The wrapped transformation's first state, sharded and offloaded by a plan.

    Args:
        config: The wrapped transformation.
        plan: How everything is sharded.
        stored: All parameters; storage shape.

    Raises:
        MemoryError: If the offloaded part is for host memory, and there is not enough of it.
    """
    if not any(plan.chunkings) or any(isinstance(x, jax.core.Tracer) for x in stored):
        return state_at_once(config, plan, stored)
    if config.offload is not None and config.offload.optimizer == "host":
        rows = zip(plan.state, plan.chunkings, strict=True)
        needed = sum(leaf.local_bytes for leaf, chunking in rows if chunking is not None)
        check_host_memory(config.mesh, needed, "The offloaded optimizer state")
    return state_by_tasks(config, plan, stored, store_for(config, plan))


def state_at_once(config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"]]) -> PyTree:
    """The state in one program, which may be part of another; what is offloaded passes through the device together."""

    def fresh(stored):
        found = logical_state(config, plan, [to_device(x) for x in stored])
        leaves = [to_storage(config, x, leaf) for x, leaf in zip(found, plan.state, strict=True)]
        return state_to_host(config, plan, jax.tree.unflatten(plan.state_def, leaves))

    return jax.jit(fresh, out_shardings=state_shardings(config, plan))(list(stored))


def state_by_tasks(
    config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"]], store: StateStore
) -> PyTree:
    """The state, one program for what stays on the device and one for each task.

    Args:
        config: The wrapped transformation.
        plan: How everything lies.
        stored: All parameters; storage shape.
        store: Takes what is offloaded.
    """
    seen = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored]
    jaxpr, consts = compat.opened(jax.make_jaxpr(lambda *xs: logical_state(config, plan, xs))(*seen))
    jaxpr, consts = compat.opened(jax.make_jaxpr(functools.partial(jaxprs.inline_calls, jaxpr, consts))(*seen))
    given = dict(zip(jaxpr.invars, stored, strict=True)) | dict(zip(compat.constvars_of(jaxpr), consts, strict=True))
    makers = {var: e for e, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}

    def made(leaves: Sequence[int]) -> list[list[Array]]:
        """Some leaves of the state, each in its pieces, on the device."""
        eqns, inputs = carve(makers, jaxpr, leaves, frozenset())
        part = compat.part_of(jaxpr, [jaxpr.eqns[e] for e in eqns], inputs, [jaxpr.outvars[k] for k in leaves])
        chunkings = [plan.chunkings[k] for k in leaves]

        def program(values):
            found = jax.core.eval_jaxpr(part, (), *values)
            laid = [to_storage(config, x, plan.state[k]) for x, k in zip(found, leaves, strict=True)]
            return [
                [x] if chunking is None else split_chunks(config.mesh, x, plan.state[k], chunking)
                for x, k, chunking in zip(laid, leaves, chunkings, strict=True)
            ]

        where = [
            [named(config, plan.state[k])] * (1 if chunking is None else len(chunking.extents))
            for k, chunking in zip(leaves, chunkings, strict=True)
        ]
        return jax.jit(program, out_shardings=where)([to_device(given[var]) for var in inputs])

    here = [k for k, chunking in enumerate(plan.chunkings) if chunking is None]
    arrays = {k: x for k, (x,) in zip(here, made(here), strict=True)}
    for task in offloaded_part(config, plan).split.tasks:
        for n, chunk in enumerate(zip(*made(task.state), strict=True)):
            store.settle(store.stow(task, n, chunk))
        arrays |= dict(zip(task.state, store.nodes(task), strict=True))
    return jax.tree.unflatten(plan.state_def, [arrays[k] for k in range(len(plan.state))])


def shapes_of_state(config: Config, plan: ShardingPlan) -> PyTree:
    """The state as shapes with their shardings; storage shapes. What is on disk is where it would be written."""
    on_disk = config.offload is not None and config.offload.optimizer == "disk" and any(plan.chunkings)
    nodes: dict[int, Any] = dict(disk_nodes(config, plan)) if on_disk else {}

    def one(leaf: Leaf, chunking: Chunking | None):
        if chunking is None:
            return jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype, sharding=named(config, leaf))
        where = host_sharding(config.mesh, leaf.spec)
        chunks = [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where) for shape in chunk_shapes(leaf, chunking)]
        return chunked(config, chunks, leaf, chunking)

    leaves = enumerate(zip(plan.state, plan.chunkings, strict=True))
    return jax.tree.unflatten(plan.state_def, [nodes.get(k) or one(leaf, chunking) for k, (leaf, chunking) in leaves])


def logical_state(config: Config, plan: ShardingPlan, stored: Sequence[Shaped[Array, "*storage"]]) -> list:
    """The leaves of the wrapped transformation's first state; traced under jit."""
    layout = plan.layout
    params = [view(stored[i], layout.params[i]) for i in layout.trained]
    wide = cast(params, [part.dtype for part in plan.grads])
    return jax.tree.leaves(wrapped_tx(config, plan.trained).init(jax.tree.unflatten(plan.trained.treedef, wide)))
