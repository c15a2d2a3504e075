"""Read and write offloaded state chunk by chunk, in host memory or on disk."""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zerojax.config import Config
from zerojax.layout.leaf import is_chunked, replace_at
from zerojax.offload.chunked import Chunked, chunked
from zerojax.offload.host import host_kind, to_memory
from zerojax.offload.state_files import LeafFiles, StateFiles
from zerojax.optim.partition import UpdateGroup
from zerojax.optim.sharding_plan import ShardingPlan, state_shapes

# The number of chunks on the device at a time: one is fetched, one is updated, and one is written.
IN_FLIGHT = 3


class StoredNodes:
    """The base class of both stores of a state. Steps donate the `nodes`, the state's offloaded leaves by index."""

    writes = 0  # the number of chunks that were written to files so far

    def __init__(self, nodes: dict[int, Chunked]):
        self._nodes = nodes

    def unchanged(self, group: UpdateGroup) -> list[Chunked]:
        return [self._nodes[k] for k in group.state]

    def abandon(self) -> None:
        """Give up the state after a failed step. The chunks that the step wrote will not be read."""


class HostStateStore(StoredNodes):
    """Keep state in host memory, in `Chunked` nodes.

    Chunks in `kept_on_device` stay on the device instead. In a restored state, these chunks are in host memory until
    their first update. For a first state, `nodes` is empty.
    """

    def __init__(self, config: Config, plan: ShardingPlan, nodes: Sequence[Any] = ()):
        super().__init__({k: node for k, node in enumerate(nodes) if is_chunked(node)})
        self._config, self._plan, self._kept = config, plan, kept_on_device(config, plan)
        self._kind = host_kind(config.mesh)
        self._new: dict[int, list[Array]] = collections.defaultdict(list)
        self._writing: collections.deque[tuple[list[Array], list[Array]]] = collections.deque()

    def fetch(self, group: UpdateGroup, n: int, kind: str) -> list[Array]:
        """Begin to copy the state of a group's chunk `n` to this kind of memory. Return a ticket for `receive`."""
        return [to_memory(self._nodes[k].chunks[n], kind) for k in group.state]

    def receive(self, ticket: Any) -> list[Array]:
        """Return the state that `fetch` began to copy, one array per leaf."""
        return ticket

    def write(self, group: UpdateGroup, n: int, arrays: Sequence[Array]) -> None:
        """Begin to write the new state of a group's chunk `n`. If too many writes have begun, wait for the oldest."""
        kept = (group.state, n) in self._kept
        new = list(arrays) if kept else [to_memory(x, self._kind) for x in arrays]
        for k, x in zip(group.state, new, strict=True):
            self._new[k].append(x)
        chunks = [self._nodes[k].chunks[n] for k in group.state if k in self._nodes]
        old = [x for x in chunks if not x.is_deleted()]
        # If the chunk was on the device, its update has donated the old arrays. Nobody needs to wait for the new ones.
        self._writing.append(([] if kept and not old else new, old))
        self._complete(most=IN_FLIGHT - 1)

    def _complete(self, *, most: int) -> None:
        """Block until at most `most` writes are unfinished. Free the old chunks of the finished writes."""
        while len(self._writing) > most:
            new, old = self._writing.popleft()
            jax.block_until_ready(new)
            for x in old:  # the state is donated
                x.delete()

    def advance(self) -> None:
        """End a step that wrote every chunk."""
        self._complete(most=0)

    def nodes(self, group: UpdateGroup) -> list[Chunked]:
        """Return the nodes of the group's new state, one per leaf. All chunks must have been written before."""
        plan = self._plan
        return [chunked(self._config, self._new.pop(k), plan.state[k], plan.offloaded[k]) for k in group.state]


class DiskStateStore(StoredNodes):
    """Keep state in files; see `HostStateStore` for the methods. There is at least one node."""

    def __init__(self, nodes: dict[int, Chunked]):
        super().__init__(nodes)
        self._files: StateFiles = next(iter(nodes.values())).leaf_files.state_files
        self._next = jnp.asarray(self._files.next_version)

    def fetch(self, group: UpdateGroup, n: int, kind: str) -> list:
        return [(k, n, self._files.read(k, n), kind) for k in group.state]

    def receive(self, ticket: list) -> list[Array]:
        return [self._files.receive(*reading) for reading in ticket]

    def write(self, group: UpdateGroup, n: int, arrays: Sequence[Array]) -> None:
        for k, x in zip(group.state, arrays, strict=True):
            self._files.write(k, n, x)

    def nodes(self, group: UpdateGroup) -> list[Chunked]:
        return [dataclasses.replace(node, chunks=(self._next,)) for node in self.unchanged(group)]

    @property
    def writes(self) -> int:
        return self._files.writes

    def advance(self) -> None:
        self._files.advance()

    def abandon(self) -> None:
        self._files.abandon()


StateStore = HostStateStore | DiskStateStore


@contextlib.contextmanager
def abandoned_on_error(store: Any) -> Iterator[None]:
    """Enter a context that writes to `store`, which is a state's store or the files of parameters.

    After an error, abandon `store`. Otherwise, the error's traceback would keep `store` alive and its folder locked.
    """
    try:
        yield
    except BaseException:
        store.abandon()
        raise


def store_for(config: Config, plan: ShardingPlan, nodes: Sequence[Any] | None = None) -> StateStore:
    """Return the store of a state. `nodes` has one entry per leaf of the state, and is None for a first state."""
    assert config.offload is not None
    if config.offload.optimizer == "host" or not plan.offloaded:
        return HostStateStore(config, plan, nodes or ())
    if nodes is None:
        return DiskStateStore(disk_nodes(config, plan))
    on_disk = {k: x for k, x in enumerate(nodes) if is_chunked(x)}
    for node in on_disk.values():
        node.leaf_files.state_files.require(*node.chunks)
    return DiskStateStore(on_disk)


@functools.lru_cache
def kept_on_device(config: Config, plan: ShardingPlan) -> Mapping[tuple[tuple[int, ...], int], int]:
    """Return the chunks that stay on the device, with their bytes per device. A key is `(group.state, n)`.

    The last chunks of the update stay, so that their updates overlap with the writes of the chunks before them.
    """
    room = 0 if config.offload is None else config.offload.device_bytes or 0
    kept: dict[tuple[tuple[int, ...], int], int] = {}
    for group in reversed(plan.analysis(config).partition.groups if room else ()):
        for n in reversed(range(len(group.chunks))):
            size = sum(chunk_bytes(plan, k, n) for k in group.state)
            if size <= room:
                kept[group.state, n] = size
                room -= size
    return MappingProxyType(kept)


def chunk_bytes(plan: ShardingPlan, k: int, n: int) -> int:
    """Return the bytes per device of chunk `n` of leaf `k`."""
    leaf, chunking = plan.state[k], plan.offloaded[k]
    return math.prod(replace_at(leaf.local_shape, chunking.dim, chunking.extents[n])) * leaf.dtype.itemsize


def state_buffer_bytes(config: Config, plan: ShardingPlan) -> int:
    """Return the bytes of the buffers that read and write a state on disk, or 0 if no state is on disk."""
    nodes = disk_nodes(config, plan) if plan.offloaded else {}
    return next((node.leaf_files.state_files.buffer_bytes for node in nodes.values() if node.leaf_files is not None), 0)


def disk_nodes(config: Config, plan: ShardingPlan) -> dict[int, Chunked]:
    """Return nodes for the offloaded leaves of a first state. The files are made when a chunk is first written."""
    assert config.offload is not None
    assert config.offload.path is not None
    found = enumerate(jax.tree.leaves(state_shapes(config, plan), is_leaf=is_chunked))
    nodes = {k: node for k, node in found if is_chunked(node)}
    most = max(len(group.state) for group in plan.analysis(config).partition.groups)
    files = StateFiles(config.offload.path, nodes, in_flight=IN_FLIGHT * most, copying=(IN_FLIGHT - 1) * most)
    return {k: dataclasses.replace(node, leaf_files=LeafFiles(files, k)) for k, node in nodes.items()}
