"""Offloaded leaves of a state in the files of the disk tier: device arrays in, device arrays out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from zerojax.layout.chunked import Chunking
from zerojax.layout.leaf import Leaf
from zerojax.offload.chunks import ChunkSpec, DiskError
from zerojax.offload.disk import DiskStore, Lease

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class StateFiles:
    """The files of one process' part of a state; opened when they are first needed.

    They hold one version of the state. Once every piece of the next one was written, that is
    the one that is read.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        leaves: dict[int, tuple[Leaf, Chunking, NamedSharding]],
        *,
        in_flight: int,
    ):
        """Name the files of some leaves of the state.

        Args:
            path: The folder in which each process makes its own.
            leaves: How each leaf lies, how it is cut, and where it would be on the devices;
                by its index in the state.
            in_flight: How many pieces are read ahead, and how many written behind.
        """
        self.path = Path(path, f"process_{jax.process_index()}")
        self._leaves = leaves
        self._in_flight = in_flight
        self._index: dict[tuple[int, int], int] = {}
        self._version = 0
        self._written: set[int] = set()
        self._specs: list[ChunkSpec] = []
        for k, (leaf, chunking, sharding) in leaves.items():
            for n, shape in enumerate(chunking.chunk_shapes(leaf)):
                self._index[k, n] = len(self._specs)
                local = (sharding.shard_shape(shape), str(np.dtype(leaf.dtype)))
                self._specs.append(ChunkSpec(f"{leaf.path}#{n}", (local,) * len(parts_of(sharding, shape))))

    @functools.cached_property
    def _store(self) -> DiskStore:
        folder = self.path.parent
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise DiskError(
                f"The disk tier cannot be kept in {folder}: {error.strerror}. Give a folder that this process can "
                f"write to, in one that exists."
            ) from error
        store = DiskStore.create(
            self.path,
            self._specs,
            owner=self.owner,
            read_buffers=self._in_flight,
            write_buffers=self._in_flight,
        )
        weakref.finalize(self, closed, store)
        return store

    @property
    def owner(self) -> str:
        """A fingerprint of how the state lies, and of the process."""
        said = [f"process {jax.process_index()} of {jax.process_count()}"]
        said += [
            f"{leaf} {chunking} {sharding.spec} {dict(sharding.mesh.shape)}"
            for leaf, chunking, sharding in self._leaves.values()
        ]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    def read(self, k: int, chunk: int) -> Future[Lease]:
        """Begin to read a piece of leaf `k`."""
        return self._store.read(self._index[k, chunk], step=self._version)

    def receive(self, k: int, chunk: int, reading: Future[Lease], kind: str) -> Array:
        """The piece that `read` began to read, in a kind of the devices' memory; storage shape."""
        leaf, chunking, sharding = self._leaves[k]
        shape = chunking.chunk_shape(leaf, chunking.extents[chunk])
        with reading.result() as lease:
            shards = [
                # on CPU the array would share the buffer that is lent, told not to (may_alias=) or not: jax 0.10.2
                jax.device_put(
                    data.copy() if device.platform == "cpu" else data, SingleDeviceSharding(device, memory_kind=kind)
                )
                for data, devices in zip(lease.arrays, parts_of(sharding, shape), strict=True)
                for device in devices
            ]
            jax.block_until_ready(shards)
        where = sharding.with_memory_kind(kind)
        return jax.make_array_from_single_device_arrays(shape, where, shards)

    def write(self, k: int, chunk: int, array: Array) -> None:
        """Begin to write the next version of a piece of leaf `k`; waits for the array, and for a buffer."""
        found = {shard.device: shard.data for shard in array.addressable_shards}
        parts = [np.asarray(found[devices[0]]) for devices in parts_of(array.sharding, array.shape)]
        chunk = self._index[k, chunk]
        self._store.write(chunk, parts, step=self._version + 1)
        self._written.add(chunk)
        if len(self._written) == len(self._specs):
            self._version += 1
            self._written.clear()

    @property
    def version(self) -> Int[np.ndarray, ""]:
        """The version that is read."""
        return np.array(self._version, np.int32)

    @property
    def next_version(self) -> Int[np.ndarray, ""]:
        """The version that is being written."""
        return np.array(self._version + 1, np.int32)

    def require(self, version: Any) -> None:
        """Refuse a state that the files are not of any more.

        Raises:
            ValueError: Saying both versions.
        """
        if int(version) != self._version:
            raise ValueError(
                f"The optimizer state on disk in {self.path} is of version {self._version}, and this state is of "
                f"{int(version)}: a copy of a state shares its files, and a step changes them. Go on with the state "
                f"that the last step returned; what is to be kept goes into a checkpoint."
            )

    def abandon(self) -> None:
        """Give up files that are of two versions, and the folder with them, until a state is written anew."""
        self._written.clear()
        if store := self.__dict__.pop("_store", None):
            closed(store)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        self._store.flush()


@dataclasses.dataclass(frozen=True)
class LeafFiles:
    """Where a leaf of the state is on disk.

    Attributes:
        files: The files of the state.
        k: Its index in the state.
        pieces: How many pieces it has.
    """

    files: StateFiles
    k: int
    chunks: int

    def load(self, version: Any) -> list[Array]:
        """Its pieces, on the devices; `version` is the one they have to be of."""
        self.files.require(version)
        reading = [self.files.read(self.k, 0)]
        found = []
        for n in range(self.chunks):
            if n + 1 < self.chunks:
                reading.append(self.files.read(self.k, n + 1))
            found.append(self.files.receive(self.k, n, reading[n], "device"))
        return found

    def save(self, chunks: Sequence[Array]) -> Int[np.ndarray, ""]:
        """Write it anew, and give the version that this is; which is complete when it was done for every leaf."""
        version = self.files.next_version
        for n, chunk in enumerate(chunks):
            self.files.write(self.k, n, chunk)
        return version


def closed(store: DiskStore) -> None:
    """Give the folder back once nobody has the state any more; what fails then concerns nobody."""
    with contextlib.suppress(DiskError):
        store.close()


def parts_of(sharding: Any, shape: tuple[int, ...]) -> list[list[jax.Device]]:
    """The devices of this process that hold the same part of an array, part by part."""
    found: dict[Any, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        found.setdefault(str(index), []).append(device)
    return list(found.values())
