"""Where offloaded state waits: fetched and put away piece by piece."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.layout.chunked import Chunked, Chunking, is_chunked
from zerojax.offload.host import host_kind, to_memory
from zerojax.offload.state_files import StateFiles, Stored
from zerojax.optim.offloaded import IN_FLIGHT
from zerojax.optim.partition import Task
from zerojax.optim.plan import ShardingPlan, offloaded_part
from zerojax.placement.chunking import chunked
from zerojax.placement.storage import named

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


class StateStore(Protocol):
    """Where offloaded state waits."""

    def fetch(self, task: Task, chunk: int, kind: str) -> Any:
        """Begin to bring the state of a task's piece into a kind of memory."""
        ...

    def receive(self, ticket: Any) -> list[Array]:
        """What `fetch` brings, one array a leaf."""
        ...

    def stow(self, task: Task, chunk: int, arrays: Sequence[Array]) -> Any:
        """Begin to put the new state of a piece away."""
        ...

    def settle(self, ticket: Any) -> None:
        """Wait until what `stow` began is done."""
        ...

    def nodes(self, task: Task) -> list[PyTree]:
        """The new nodes of the state's tree, one a leaf of the task."""
        ...

    def unchanged(self, task: Task) -> list[PyTree]:
        """The nodes of a task of which nothing was fetched."""
        ...

    def abandon(self) -> None:
        """Something failed: what was stowed will not be used."""
        ...


class HostStateStore:
    """State in host memory, in `Chunked` nodes; those passed in are used up."""

    def __init__(self, config: Config, plan: ShardingPlan, nodes: Sequence[Any] = ()):
        """`nodes` has one node a leaf of the state; none for a first state."""
        self._config = config
        self._plan = plan
        self._kind = host_kind(config.mesh)
        self._nodes = {k: node for k, node in enumerate(nodes) if is_chunked(node)}
        self._new: dict[int, list[Array]] = collections.defaultdict(list)

    def fetch(self, task: Task, chunk: int, kind: str) -> list[Array]:
        """As `StateStore`."""
        return [to_memory(self._nodes[k].chunks[chunk], kind) for k in task.state]

    def receive(self, ticket: list[Array]) -> list[Array]:
        """As `StateStore`."""
        return ticket

    def stow(self, task: Task, chunk: int, arrays: Sequence[Array]) -> tuple[list, list]:
        """As `StateStore`."""
        new = [to_memory(x, self._kind) for x in arrays]
        for k, x in zip(task.state, new, strict=True):
            self._new[k].append(x)
        return new, [self._nodes[k].chunks[chunk] for k in task.state if k in self._nodes]

    def settle(self, ticket: tuple[list, list]) -> None:
        """As `StateStore`; the old pieces are given back, as those of a donated array are."""
        new, old = ticket
        jax.block_until_ready(new)
        for x in old:
            if not x.is_deleted():
                x.delete()

    def nodes(self, task: Task) -> list[Chunked]:
        """As `StateStore`."""
        config, plan = self._config, self._plan
        held = [(k, plan.chunkings[k] or Chunking(0, ())) for k in task.state]
        return [chunked(config, self._new.pop(k), plan.state[k], chunking) for k, chunking in held]

    def unchanged(self, task: Task) -> list[Chunked]:
        """As `StateStore`."""
        return [self._nodes[k] for k in task.state]

    def abandon(self) -> None:
        """As `StateStore`."""


class DiskStateStore:
    """State in files, in `Chunked` nodes that say which version of them they are."""

    def __init__(self, files: StateFiles, nodes: dict[int, Chunked]):
        """`nodes` are those of the offloaded leaves, by index."""
        self._files = files
        self._nodes = nodes
        self._next = jnp.asarray(files.next_version)

    def fetch(self, task: Task, chunk: int, kind: str) -> list:
        """As `StateStore`."""
        return [(k, chunk, self._files.read(k, chunk), kind) for k in task.state]

    def receive(self, ticket: list) -> list[Array]:
        """As `StateStore`."""
        return [self._files.received(*reading) for reading in ticket]

    def stow(self, task: Task, chunk: int, arrays: Sequence[Array]) -> list:
        """As `StateStore`."""
        for x in arrays:
            x.copy_to_host_async()
        return [(k, chunk, x) for k, x in zip(task.state, arrays, strict=True)]

    def settle(self, ticket: list) -> None:
        """As `StateStore`: the state is in a buffer that is being written."""
        for writing in ticket:
            self._files.write(*writing)

    def nodes(self, task: Task) -> list[Chunked]:
        """As `StateStore`."""
        return [dataclasses.replace(self._nodes[k], chunks=(self._next,)) for k in task.state]

    def unchanged(self, task: Task) -> list[Chunked]:
        """As `StateStore`."""
        return [self._nodes[k] for k in task.state]

    def abandon(self) -> None:
        """As `StateStore`."""
        self._files.abandon()


def store_for(config: Config, plan: ShardingPlan, nodes: Sequence[Any] | None = None) -> StateStore:
    """Where the offloaded part of a state waits.

    Args:
        config: Says whether that is host memory or the disk.
        plan: How everything lies.
        nodes: One node a leaf of the state that is there; None to make a first one.
    """
    assert config.offload is not None
    if config.offload.optimizer == "host":
        return HostStateStore(config, plan, nodes or ())
    if nodes is None:
        there = disk_nodes(config, plan)
        return DiskStateStore(next(iter(there.values())).store.files, there)
    there = {k: x for k, x in enumerate(nodes) if is_chunked(x)}
    files = next(iter(there.values())).store.files
    for node in there.values():
        files.require(*node.chunks)
    return DiskStateStore(files, there)


def disk_nodes(config: Config, plan: ShardingPlan) -> dict[int, Chunked]:
    """Nodes for the offloaded leaves of a state whose files are not there yet."""
    leaves = {
        k: (leaf, chunking, named(config, leaf))
        for k, (leaf, chunking) in enumerate(zip(plan.state, plan.chunkings, strict=True))
        if chunking is not None
    }
    most = max(len(task.state) for task in offloaded_part(config, plan).split.tasks)
    assert config.offload is not None
    assert config.offload.path is not None
    files = StateFiles(config.offload.path, leaves, under_way=IN_FLIGHT * most)
    version: Any = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(config.mesh))
    return {
        k: Chunked((version,), leaf, chunking, where, Stored(files, k, len(chunking.extents)))
        for k, (leaf, chunking, where) in leaves.items()
    }
