"""Copy all offloaded optimizer state to device memory and back, for programs that need all of it at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from zerojax.config import Config
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.offload.chunked import join_chunks, split_chunks
from zerojax.optim.returned_state import as_returned
from zerojax.optim.sharding_plan import ShardingPlan, state_shapes, state_shardings
from zerojax.placement.storage import named

if TYPE_CHECKING:
    from jaxtyping import PyTree

ON_DISK = (
    "The optimizer state is on disk, which a jitted program cannot reach. Make it with tx.create(params), and update "
    "it with the step of tx.train_step, both called as they are, outside of jax.jit."
)


def is_on_disk(config: Config) -> bool:
    return config.offload is not None and config.offload.optimizer == "disk"


def all_on_device(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with the chunks of all offloaded leaves copied to the device and joined.

    Raises:
        TypeError: If a leaf is on disk, because a traced program cannot read files.
    """

    def one(x, leaf: Leaf):
        if not is_chunked(x):
            return x
        if x.store is not None:
            raise TypeError(ON_DISK)
        chunks = [jax.device_put(chunk, named(config, leaf)) for chunk in x.chunks]
        return join_chunks(config.mesh, chunks, leaf, x.chunking)

    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, list(map(one, leaves, plan.state)))


def all_on_host(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `all_on_device`."""

    def one(x, where):
        if not is_chunked(where):
            return x
        if is_on_disk(config):
            raise TypeError(ON_DISK)
        chunks = split_chunks(config.mesh, x, where.leaf, where.chunking)
        return dataclasses.replace(where, chunks=tuple(map(jax.device_put, chunks, where.chunks)))

    shardings = jax.tree.leaves(state_shardings(config, plan), is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, list(map(one, jax.tree.leaves(state), shardings)))


def rechunked(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Put `Chunked` nodes back into a state from which Flax's `nnx.update` has removed them.

    `nnx.Optimizer` stores each node as nested dicts of its chunks after its first update. Any other state is returned
    unchanged.
    """
    if is_on_disk(config):
        return state
    found = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(state)]
    paths = lambda leaf, one: [f"{leaf.path}['chunks'][{n}]" for n in range(len(one.extents))] if one else [leaf.path]
    wanted = [path for pair in zip(plan.state, plan.chunkings, strict=True) for path in paths(*pair)]
    if [path for path, _ in found] != wanted:
        return state
    planned = jax.tree.structure(state_shapes(config, plan))
    return as_returned(config, plan, jax.tree.unflatten(planned, [x for _, x in found]))
