"""Read and write the files of parameters and gradients. Some of the chunks stay in host memory instead."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from zerojax.comm.mesh import replicated
from zerojax.offload.chunked import Chunked, ChunkedLayout, concrete_mesh
from zerojax.offload.chunks import ChunkSpec
from zerojax.offload.disk import Lease
from zerojax.offload.state_files import LeafFiles, StateFiles, number_of

if TYPE_CHECKING:
    from jaxtyping import Array, Int

# The number of chunks that are read ahead at a time. As many chunks can wait to be written.
READ_AHEAD = 8
# The folder, within `Offload(path=)`, of parameters that no run uses yet.
GIVEN = "given"
# The largest number of arrays that are copied from the devices to host memory while Python goes on.
COPYING = 2


class ModelFiles(StateFiles):
    """The files of one process's shards of parameters and gradients.

    The files store a version per chunk, because a gradient is written more often than a parameter, and a frozen
    parameter only once. As many chunks as fit into `host_bytes` stay in host memory, and always the same ones. Every
    step reads all chunks in the same order, so a cache of recently used chunks would drop each just before its use.

    Attributes:
        host_bytes: The bytes of host memory that all buffers and the chunks in host memory take.
    """

    part: ClassVar[str] = "params"

    def __init__(
        self,
        path: str | os.PathLike,
        leaves: Mapping[int, ChunkedLayout],
        *,
        name: str,
        params: int,
        host_bytes: int | None,
        state_buffers: int = 0,
    ):
        """Name the files, which are in the folder `name` of `path`.

        The first `params` of `leaves` are parameters, and the others gradients. `host_bytes` is for all buffers, of
        which those of the optimizer state have `state_buffers` bytes, and for chunks. If it is None, only the buffers
        are in host memory. Chunks of earlier leaves are the first to be kept in host memory.
        """
        super().__init__(path, leaves, in_flight=READ_AHEAD, name=name)
        self._given_bytes = host_bytes
        self._copying: collections.deque[tuple[int, int, Array]] = collections.deque()
        self._held: dict[int, tuple[np.ndarray, ...]] = {}
        self._params, self._saved = frozenset(list(leaves)[:params]), set[int]()
        self._next: int | None = None  # the version while parameters are written outside of a step
        buffers = self.buffer_bytes + state_buffers
        if host_bytes is not None and host_bytes < buffers:
            raise ValueError(
                f"Offload(host_bytes={host_bytes}) is less than the {buffers} bytes of the buffers that read "
                f"and write: {2 * READ_AHEAD} buffers with the size of the largest chunk, and {state_buffers} bytes of "
                f"buffers for the optimizer state. Allow at least that many, or make the chunks smaller with "
                f"chunk_bytes=."
            )
        self.host_bytes, left = buffers, (host_bytes or 0) - buffers
        for index, spec in enumerate(self._specs):
            if spec.bytes <= left:
                left -= spec.bytes
                self.host_bytes += spec.bytes
                self._held[index] = ()
        self._specs = [ChunkSpec(x.name, () if i in self._held else x.arrays) for i, x in enumerate(self._specs)]

    def given(self, types: Sequence[Any]) -> ModelFiles:
        """Return files for the same parameters, which no run uses yet. `types` are the parameters' types by number."""
        wide = {}
        for k in sorted(self._params):
            of = self.leaves[k]
            wide[k] = dataclasses.replace(of, leaf=dataclasses.replace(of.leaf, dtype=np.dtype(types[k])))
        return ModelFiles(self.root, wide, name=GIVEN, params=len(wide), host_bytes=self._given_bytes)

    def nodes(self, *, is_shape: bool = False) -> dict[int, Chunked]:
        """Return a `Chunked` node per parameter, by number. If `is_shape`, nodes contain shapes instead of arrays."""
        found = {}
        for k in sorted(self._params):
            of = self.leaves[k]
            where = replicated(concrete_mesh(of.sharding))
            version: Any = jax.ShapeDtypeStruct((), np.int32, sharding=where)
            if not is_shape:
                version = jax.device_put(np.array(self._version, np.int32), where)
            found[k] = Chunked(of.leaf, of.chunking, of.sharding, (version,), LeafFiles(self, k))
        return found

    def read(self, k: int, n: int) -> Future[Lease]:
        """Begin to read chunk `n` of leaf `k` from host memory or its file; see `StateFiles.read`."""
        if any((k, n) == (other, m) for other, m, _ in self._copying):
            self.copy_all()
        index = self._index[k, n]
        if index in self._held:
            done: Future[Lease] = Future()
            done.set_result(Lease(self._held[index], lambda: None))
            return done
        return super().read(k, n)

    def write(self, k: int, n: int, array: Array) -> None:
        """Begin to copy chunk `n` of leaf `k` to host memory. If more than `COPYING` copies wait, write the oldest."""
        self.writes += 1
        array.copy_to_host_async()
        self._copying.append((k, n, array))
        if len(self._copying) > COPYING:
            super().write(*self._copying.popleft())

    def copy(self, k: int, n: int, put: Callable[[tuple[np.ndarray, ...]], None]) -> Future[None]:
        """Begin to pass a chunk's shards to `put`; see `StateFiles.copy`. A chunk in host memory is passed at once."""
        self.copy_all()
        index = self._index[k, n]
        if index not in self._held:
            return super().copy(k, n, put)
        put(self._held[index])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def copy_all(self) -> None:
        while self._copying:
            super().write(*self._copying.popleft())

    def write_shards(self, k: int, n: int, shards: Sequence[np.ndarray]) -> None:
        """Copy a chunk's shards to a buffer, and begin to write them; see `StateFiles.write_shards`."""
        index = self._index[k, n]
        if index in self._held:
            self._held[index] = tuple(map(np.copy, shards))
            return
        self._versions[index] += 1
        self._store.write(index, shards, version=self._versions[index])

    @contextlib.contextmanager
    def writing(self, k: int) -> Iterator[Int[np.ndarray, ""]]:
        """Mark the parameters as half written until all of them are in the files; see `StateFiles.writing`."""
        self.copy_all()  # otherwise an array of the last step could overwrite the new one
        if k in self._saved:  # an earlier restore failed
            self._saved.clear()
        if self._next is None:
            self._next, self._version = self._version + 1, -1
        yield np.array(self._next, np.int32)
        self.flush()
        self._saved.add(k)
        if self._saved == self._params:
            self._saved.clear()
            self._version, self._next = self._next, None

    def advance(self) -> None:
        """Add one to the version of the parameters. States of earlier versions can then no longer be read."""
        self._version += 1

    def require(self, version: Any) -> None:
        """Raise a `ValueError` if a state's version is not the version of the files; see `StateFiles.require`."""
        if self._version < 0:
            raise ValueError(
                f"The parameters on disk in {self.path} are half written or closed: a step, a restore or an import was "
                f"interrupted or failed, or zerojax.offload.close was called. Make a state with tx.create, or restore "
                f"the last checkpoint into one."
            )
        if (given := number_of(version, self.path)) != self._version:
            raise ValueError(
                f"The parameters on disk in {self.path} are of version {self._version}, and this state is of "
                f"{given}: a copy of a state shares its files, and a step changes them. Go on with the state "
                f"that the last step returned; save what is to be kept in a checkpoint."
            )

    def abandon(self) -> None:
        """Give up the files after an interrupted step, which wrote only some chunks; see `StateFiles.abandon`."""
        self._copying.clear()
        self._version = -1
        super().abandon()

    def flush(self) -> None:
        """Block until everything written so far is in the files, and raise the error of a write that failed."""
        self.copy_all()
        if "_store" in self.__dict__:
            self._store.flush()
