"""Move the full optimizer state between device and host memory, for programs that need all of it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.layout.chunked import Chunking, is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.offload.host import host_sharding
from zerojax.optim.plan import ShardingPlan
from zerojax.placement.chunking import chunked, join_chunks, split_chunks
from zerojax.placement.storage import named

if TYPE_CHECKING:
    from jaxtyping import PyTree

ON_DISK = (
    "The optimizer state is on disk, which a jitted program cannot reach. Make it with tx.create(params), and update "
    "it with the step of tx.train_step, both called as they are, outside of jax.jit."
)


def state_to_device(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Return the state with every offloaded leaf joined on the device, all at once.

    Raises:
        TypeError: If a part is on disk, which a traced program cannot read.
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


def state_to_host(config: Config, plan: ShardingPlan, state: PyTree) -> PyTree:
    """Undo `state_to_device`."""

    def one(x, leaf: Leaf, chunking: Chunking | None):
        if chunking is None:
            return x
        if is_on_disk(config):
            raise TypeError(ON_DISK)
        where = host_sharding(config.mesh, leaf.spec)
        chunks = [jax.device_put(chunk, where) for chunk in split_chunks(config.mesh, x, leaf, chunking)]
        return chunked(config, chunks, leaf, chunking)

    return jax.tree.unflatten(plan.state_def, list(map(one, jax.tree.leaves(state), plan.state, plan.chunkings)))


def state_shardings(config: Config, plan: ShardingPlan) -> PyTree:
    """Return the shardings of the state: a tree of `NamedSharding`, in `Chunked` nodes where it is offloaded."""

    def one(leaf: Leaf, chunking: Chunking | None):
        if chunking is None:
            return named(config, leaf)
        in_memory = [host_sharding(config.mesh, leaf.spec)] * len(chunking.extents)
        return chunked(config, [replicated(config.mesh)] if is_on_disk(config) else in_memory, leaf, chunking)

    return jax.tree.unflatten(plan.state_def, list(map(one, plan.state, plan.chunkings)))


def is_on_disk(config: Config) -> bool:
    """Return whether offloaded state is on disk."""
    return config.offload is not None and config.offload.optimizer == "disk"
