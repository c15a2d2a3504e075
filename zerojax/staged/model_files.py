"""The files of parameters and gradients, of which a part is kept in host memory."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.comm.mesh import replicated
from zerojax.layout.chunked import Chunked, Chunking
from zerojax.layout.leaf import Leaf
from zerojax.offload import folder
from zerojax.offload.chunks import ChunkSpec
from zerojax.offload.disk import DiskStore, Lease
from zerojax.offload.state_files import LeafFiles, StateFiles, close_store, shards_of

if TYPE_CHECKING:
    from jaxtyping import Array, Int

# Chunks that are read ahead, and as many that are written behind.
READ_AHEAD = 8
# Arrays on the devices that wait until they are copied to a buffer.
_COPYING = 2


class ModelFiles(StateFiles):
    """The files of one process's shards of parameters and gradients.

    Each chunk has a version of its own: a gradient is written more often than a parameter, and a frozen parameter once.
    Chunks that fit into `host_bytes` are kept in memory. Which ones is decided once, because every step reads all
    chunks in the same order: a cache that drops the oldest chunk would drop each one just before it is needed.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        leaves: dict[int, tuple[Leaf, Chunking, NamedSharding]],
        *,
        host_bytes: int | None,
        first: Sequence[int],
        params: Collection[int],
    ):
        """Name the files.

        Args:
            path: The folder in which each process makes its own.
            leaves: Layout, chunking and sharding of each parameter and gradient, by a number.
            host_bytes: Host memory for buffers and for chunks that are kept there; None: for buffers alone.
            first: The numbers of the leaves in the order in which they are kept in host memory.
            params: The numbers of parameters.
        """
        super().__init__(path, leaves, in_flight=READ_AHEAD)
        self._path = path
        self._versions: collections.Counter[int] = collections.Counter()
        self._copying: collections.deque[tuple[int, int, Array]] = collections.deque()
        self._held: dict[int, tuple[np.ndarray, ...]] = {}
        self._params, self._saved = frozenset(params), set[int]()
        left = (host_bytes or 0) - self.buffer_bytes
        for key in sorted(self._index, key=lambda key: (first.index(key[0]), key[1])):
            index = self._index[key]
            if self._specs[index].bytes <= left:
                left -= self._specs[index].bytes
                self._held[index] = ()
        self._disk_specs = [ChunkSpec(x.name, () if i in self._held else x.arrays) for i, x in enumerate(self._specs)]

    @property
    def buffer_bytes(self) -> int:
        """Return the memory of all buffers."""
        return 2 * READ_AHEAD * max(spec.bytes for spec in self._specs)

    @property
    def host_bytes(self) -> int:
        """Return the host memory of buffers and of the chunks that are kept there."""
        return self.buffer_bytes + sum(self._specs[i].bytes for i in self._held)

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(spec.bytes for i, spec in enumerate(self._specs) if i not in self._held)

    @functools.cached_property
    def _store(self) -> DiskStore:
        with folder.writable(self.path.parent.parent):
            self.path.parent.parent.mkdir(exist_ok=True)
            self.path.parent.mkdir(exist_ok=True)
        store = DiskStore(self.path, self._disk_specs, in_flight=READ_AHEAD)
        weakref.finalize(self, close_store, store)
        return store

    def leaf(self, k: int) -> tuple[Leaf, Chunking, NamedSharding]:
        """Return layout, chunking and sharding of a leaf."""
        return self._leaves[k]

    def nodes(self, *, is_shape: bool = False) -> dict[int, Chunked]:
        """Return the nodes that stand for the parameters in a tree; if `is_shape`, of parameters not yet written."""
        found = {}
        for k in sorted(self._params):
            leaf, chunking, sharding = self._leaves[k]
            mesh = sharding.mesh
            assert isinstance(mesh, Mesh)
            version: Any = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(mesh))
            if not is_shape:
                version = jax.device_put(np.array(self._version, np.int32), replicated(mesh))
            store = ModelLeaf(self, k, len(chunking.extents))
            found[k] = Chunked((version,), leaf, chunking, sharding, store)
        return found

    def read(self, k: int, n: int) -> Future[Lease]:
        """Begin to read chunk `n` of leaf `k`; see `StateFiles`."""
        if any((k, n) == (other, m) for other, m, _ in self._copying):
            self.copy_all()
        index = self._index[k, n]
        if index in self._held:
            done: Future[Lease] = Future()
            done.set_result(Lease(self._held[index], lambda: None))
            return done
        return self._store.read(index, version=self._versions[index])

    def write(self, k: int, n: int, array: Array) -> None:
        """Write chunk `n` of leaf `k` behind: its copy to a buffer is begun, and the oldest such copy is awaited."""
        array.copy_to_host_async()
        self._copying.append((k, n, array))
        if len(self._copying) > _COPYING:
            self._write(*self._copying.popleft())

    def copy_all(self) -> None:
        """Block until everything is in buffers."""
        while self._copying:
            self._write(*self._copying.popleft())

    def _write(self, k: int, n: int, array: Array) -> None:
        data = {shard.device: shard.data for shard in array.addressable_shards}
        shards = [np.asarray(data[devices[0]]) for devices in shards_of(array.sharding, array.shape)]
        index = self._index[k, n]
        if index in self._held:
            self._held[index] = tuple(map(np.copy, shards))
            return
        self._versions[index] += 1
        self._store.write(index, shards, version=self._versions[index])

    def advance(self) -> None:
        """Count one more version of the parameters: an earlier state can no longer be read."""
        self._version += 1

    def require(self, version: Any) -> None:
        """Refuse a state of a version that the files no longer have; see `StateFiles`."""
        if self._version < 0:
            raise ValueError(
                f"The parameters on disk in {self.path} are half written, because a step on them was interrupted or "
                f"failed. Make a state with tx.create, or restore the last checkpoint into one."
            )
        if int(version) != self._version:
            raise ValueError(
                f"The parameters on disk in {self.path} are of version {self._version}, and this state is of "
                f"{int(version)}: a copy of a state shares its files, and a step changes them. Go on with the state "
                f"that the last step returned; save what is to be kept in a checkpoint."
            )

    def saved(self, k: int) -> None:
        """Record that a parameter was written outside of a step. When all of them were, their version advances."""
        self._saved.add(k)
        if self._saved == self._params:
            self._saved.clear()
            self.advance()

    def abandon(self) -> None:
        """Give up files that an interrupted step left half written; see `StateFiles`."""
        self._copying.clear()
        self._version = -1
        super().abandon()

    def flush(self) -> None:
        """Block until everything written so far is in the files, and raise the error of a write that failed."""
        self.copy_all()
        if "_store" in self.__dict__:
            self._store.flush()


@dataclasses.dataclass(frozen=True)
class ModelLeaf(LeafFiles):
    """Where a parameter is on disk; see `LeafFiles`."""

    part: ClassVar[str] = "params"

    def save(self, chunks: Sequence[Array]) -> Int[np.ndarray, ""]:
        """Write it anew; see `LeafFiles`."""
        files = self.files
        assert isinstance(files, ModelFiles)
        version = super().save(jax.block_until_ready(list(chunks)))
        files.flush()
        files.saved(self.k)
        return version


def local_bytes(leaf: Leaf, chunking: Chunking, sharding: NamedSharding) -> int:
    """Return the bytes of one process's chunks of a leaf, without the padding to complete blocks."""
    shapes = chunking.chunk_shapes(leaf)
    return sum(
        len(shards_of(sharding, shape)) * int(np.prod(sharding.shard_shape(shape))) * np.dtype(leaf.dtype).itemsize
        for shape in shapes
    )
