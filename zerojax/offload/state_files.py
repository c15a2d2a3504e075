"""Read the files of offloaded state leaves into device arrays, and write device arrays to the files."""

import collections
import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.core
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int

from zerojax.offload import folder
from zerojax.offload.chunked import ChunkedLayout, host_shards, parts_of
from zerojax.offload.disk import ChunkSpec, DiskStore, buffer_bytes
from zerojax.offload.folder import DiskError


class StateFiles:
    """The files with one process's shards of a state. They are made at the first read or write.

    The files hold one version of the state. Each `Chunked` node records a version, so that outdated nodes are found.
    A step, or writing every leaf outside of a step, makes the next version.
    """

    part: ClassVar[str] = "opt_state"

    def __init__(
        self,
        path: str | os.PathLike,
        leaves: Mapping[int, ChunkedLayout],
        *,
        in_flight: int,
        copying: int,
        name: str = "",
    ):
        """Name the files of the state leaves in `leaves`, whose keys are indices.

        Each process has a folder in the folder `name` of `path`. At most `in_flight` chunks are read at a time, at most
        `in_flight` chunks wait to be written, and at most `copying` arrays wait to be copied from the devices.
        """
        # Make the path absolute, because the working directory may change.
        self.root, self.leaves = Path(path).expanduser().absolute(), leaves
        self.path = self.root / name / f"process_{jax.process_index()}"
        self._in_flight, self._most_copying = in_flight, copying
        self._copying: collections.deque[tuple[int, int, Array]] = collections.deque()
        self._index: dict[tuple[int, int], int] = {}
        self._version, self._is_whole = 0, True
        self._every, self._saved = frozenset(leaves), set[int]()  # the leaves of a version, and those written so far
        # While leaves are written outside of a step: the previous version, and the leaves whose values differ from it.
        self._before: int | None = None
        self._changed = set[int]()
        self.writes = 0  # a count of the chunks that were written, or are waiting to be
        self._specs: list[ChunkSpec] = []
        self._in_memory: set[int] = set()
        self._close: Callable[[], Any] = lambda: None  # closes the store
        for k, of in leaves.items():
            for n, shape in enumerate(of.chunking.chunk_shapes(of.leaf)):
                self._index[k, n] = len(self._specs)
                array = (of.sharding.shard_shape(shape), np.dtype(of.leaf.dtype))
                self._specs.append(ChunkSpec(f"{of.leaf.path}#{n}", (array,) * len(parts_of(shape, of.sharding))))

    @property
    def buffer_bytes(self) -> int:
        on_disk = [spec for i, spec in enumerate(self._specs) if i not in self._in_memory]
        return buffer_bytes(on_disk, self._in_flight)

    @functools.cached_property
    def _store(self) -> DiskStore:
        for parent in dict.fromkeys([self.root, self.path.parent]):
            with folder.writable(parent):
                parent.mkdir(exist_ok=True)
        store = DiskStore(self.path, self._specs, in_memory=self._in_memory, in_flight=self._in_flight)
        self._close = weakref.finalize(self, close_store, store)
        return store

    def open(self) -> None:
        """Make the files and lock their folder now, instead of at the first read or write.

        Raises:
            DiskError: If the folder is in use, or files cannot be made in it.
        """
        _ = self._store

    def read(self, k: int, n: int) -> Future[tuple[np.ndarray, ...]]:
        if any((k, n) == (other, m) for other, m, _ in self._copying):
            self._copy_all()
        return self._store.read(self._index[k, n])

    def load(self, k: int, n: int) -> Array:
        return self.receive(k, n, self.read(k, n), "device")

    def receive(self, k: int, n: int, reading: Future[tuple[np.ndarray, ...]], kind: str) -> Array:
        """Return the chunk that `read` began to read, as an array in storage shape, in memory of this `kind`."""
        of = self.leaves[k]
        shape = of.chunking.chunk_shape(of.leaf, of.chunking.extents[n])
        shards = [
            jax.device_put(data, SingleDeviceSharding(device, memory_kind=kind))
            for data, devices in zip(reading.result(), parts_of(shape, of.sharding).values(), strict=True)
            for device in devices
        ]
        jax.block_until_ready(shards)
        return jax.make_array_from_single_device_arrays(shape, of.sharding.with_memory_kind(kind), shards)

    def copy(self, k: int, n: int, put: Callable[[tuple[np.ndarray, ...]], None]) -> Future[None]:
        """Begin to pass the shards of chunk `n` of leaf `k` to `put`. Later writes of the chunk wait for this copy."""
        return self._store.copy(self._index[k, n], put)

    def write(self, k: int, n: int, array: Array) -> None:
        """Begin to copy the new chunk `n` of leaf `k` to the host. If too many copies wait, write the oldest."""
        self.writes += 1
        array.copy_to_host_async()
        self._copying.append((k, n, array))
        self._copy_all(but=self._most_copying)

    def write_shards(self, k: int, n: int, shards: Sequence[np.ndarray]) -> None:
        """Copy the shards of the next version of chunk `n` of leaf `k` to a buffer, and begin to write them."""
        self._store.write(self._index[k, n], shards)

    def _copy_all(self, *, but: int = 0) -> None:
        while len(self._copying) > but:
            k, n, array = self._copying.popleft()
            self.write_shards(k, n, host_shards(array))

    @property
    def moved(self) -> tuple[int, int]:
        """Return the number of bytes that were read from the files, and the number that were written to them."""
        return self._store.bytes_read, self._store.bytes_written

    def flush(self) -> None:
        """Block until everything written so far is in the files, and raise the error of a write that failed."""
        self._copy_all()
        if "_store" in self.__dict__:
            self._store.flush()

    @property
    def next_version(self) -> Int[np.ndarray, ""]:
        return np.array(self._version + 1, np.int32)

    def advance(self) -> None:
        """End a step, whose writes made the next version. Afterwards, states of earlier versions cannot be read."""
        self._copy_all()
        self._version += 1

    @contextlib.contextmanager
    def writing(self, k: int, *, changes: bool = True) -> Iterator[Int[np.ndarray, ""]]:
        """Enter a context that writes leaf `k` outside of a step. Yield the version that the leaf will have.

        Until all leaves are written, no leaf can be read. After an error, all leaves can be written again. With
        `changes=False`, the values stay, and only the version is new.
        """
        if self._is_whole:
            self._before, self._changed = self._version, set()
        if self._is_whole or k in self._saved:  # in the second case, earlier writing of all leaves failed
            self._begin_version()
        if changes:  # before the first chunk is written, because an error may follow
            self._changed.add(k)
        yield np.array(self._version, np.int32)
        self._saved.add(k)
        if self._saved == self._every:
            self.flush()
            self._is_whole = True

    def keep(self, k: int, version: Any) -> Int[np.ndarray, ""]:
        """Keep the values of leaf `k` while other leaves are written. Return the version that the leaf will have."""
        if self._is_whole or k in self._changed or number_of(version, self.path) != self._before:
            self.require(version)
        with self.writing(k, changes=False) as new:
            return new

    def _begin_version(self) -> None:
        self._copying.clear()
        self._saved.clear()
        self._version, self._is_whole = self._version + 1, False

    def require(self, version: Any) -> None:
        """Raise a `ValueError` if a state's version is not the version of the files."""
        if not self._is_whole:
            raise ValueError(
                f"The files of {self.part} in {self.path} are half written or closed: a step, a restore or an import "
                f"was interrupted or failed, or zerojax.offload.close was called. Make a state with tx.create, or "
                f"restore the last checkpoint into one."
            )
        if (given := number_of(version, self.path)) != self._version:
            raise ValueError(
                f"The files of {self.part} in {self.path} have version {self._version}, and this state has version "
                f"{given}: a copy of a state shares its files, and a step changes them. Go on with the state "
                f"that the last step returned. To keep a state, save it in a checkpoint."
            )

    def abandon(self) -> None:
        """Give up the files after an interrupted step, and unlock their folder. Writing all leaves makes new files."""
        self._begin_version()
        self._before = None
        self.__dict__.pop("_store", None)
        self._close()  # the finalizer then drops its reference to the store, which frees the chunks in host memory


@dataclasses.dataclass(frozen=True)
class LeafFiles:
    """The files of leaf `k` of the state."""

    state_files: StateFiles
    k: int

    @property
    def chunks(self) -> range:
        return range(len(self.state_files.leaves[self.k].chunking.extents))

    def load_chunk(self, version: Any, n: int) -> Array:
        """Load one chunk onto the devices. The files must have this version."""
        self.state_files.require(version)
        return self.state_files.load(self.k, n)

    def load(self, version: Any) -> list[Array]:
        return [self.load_chunk(version, n) for n in self.chunks]

    def copy(self, version: Any, put: Callable[[int, tuple[np.ndarray, ...]], None]) -> list[Future[None]]:
        """Begin to pass each chunk of the leaf to `put`, with the chunk's number. Return the futures, one per chunk.

        The files must have the version `version`. Later writes wait, so `put` gets the leaf as it is at this call.
        """
        self.state_files.require(version)
        copies: list[Future[None]] = []
        try:
            for n in self.chunks:
                copies.append(self.state_files.copy(self.k, n, functools.partial(put, n)))
        except BaseException:
            wait(copies)
            raise
        return copies

    def keep(self, version: Any) -> Int[np.ndarray, ""]:
        return self.state_files.keep(self.k, version)

    def write(self, chunks: Iterable[Sequence[np.ndarray]]) -> Int[np.ndarray, ""]:
        """Write the shards of each chunk, and return the new version, which is complete when all leaves are written."""
        with self.state_files.writing(self.k) as version:
            for n, shards in enumerate(chunks):
                self.state_files.write_shards(self.k, n, shards)
        return version


def number_of(version: Any, path: Path) -> int:
    """Return the version in a node as an int. Raise an error if it is a shape (there are no files) or a tracer."""
    if isinstance(version, jax.ShapeDtypeStruct):
        raise ValueError(
            f"A leaf on disk in {path} has no files, because its state was made of shapes. Call tx.create with arrays, "
            f"or with the result of tx.init_params; or restore a checkpoint into the state."
        )
    if isinstance(version, jax.core.Tracer):
        raise TypeError(
            f"A leaf on disk in {path} is an argument of jax.jit or of another transformation of JAX, and a compiled "
            f"program cannot read files. Use tx.train_step or tx.eval_step, which read files while they compute; or "
            f"first load the leaves onto the devices with tx.unshard."
        )
    return int(version)


def close_store(store: DiskStore) -> None:
    """Unlock the folder of a state that is not used any more. Ignore failed writes."""
    with contextlib.suppress(DiskError, OSError):
        store.close()
