"""Write and read small leaves. Each process writes its small leaves into one file, and the manifest locates each leaf.

A folder per leaf and a file per shard would cost milliseconds for each leaf. OCDBT also packs leaves into few files,
but was rejected, because a damaged byte in such a file cannot be traced to a leaf.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import jax
import numpy as np

from zerojax.checkpoint.errors import CheckpointError, in_one_line
from zerojax.layout.chunked import Chunked
from zerojax.placement.chunking import joined


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a leaf's storage (one range per dim), and its place in a file. Bytes are row-major and little-endian."""

    file: str  # name of the file in the checkpoint
    offset: int  # offset of the box's first byte in the file
    start: tuple[int, ...]  # index of the box's first element in the storage
    shape: tuple[int, ...]  # shape of the box
    sha256: str  # digest of the box's bytes

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(i + n for i, n in zip(self.start, self.shape, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.end))


class Extent(NamedTuple):
    """The bytes of a file that belong to the leaf named `leaf`."""

    leaf: str
    offset: int
    bytes: int
    sha256: str


class Block(NamedTuple):
    """A box of a leaf's storage that this process writes. It begins at index `start` of the storage."""

    leaf: str
    start: tuple[int, ...]
    values: np.ndarray


def packed_file(process: int) -> str:
    return f"packed.{process}.bin"


def copied(leaves: Mapping[str, jax.Array | Chunked]) -> list[Block]:
    """Copy this process's part of named leaves to host memory.

    The chunks of an offloaded leaf are first joined on the devices, one leaf at a time to save device memory.
    """
    jax.copy_to_host_async([x for x in leaves.values() if not isinstance(x, Chunked)])
    return [
        block for name, x in leaves.items() for block in blocks_of(name, joined(x) if isinstance(x, Chunked) else x)
    ]


def blocks_of(name: str, x: jax.Array) -> list[Block]:
    """Copy an array, or this process's shards with replica ID 0. For PRNG keys, take the key data."""
    x = jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    if x.is_fully_addressable:
        return [Block(name, (0,) * x.ndim, np.array(x))]
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    return [Block(name, tuple(i.start or 0 for i in shard.index), np.array(shard.data)) for shard in shards]


def write(path: Path, blocks: Sequence[Block]) -> dict[str, list[Piece]]:
    """Write blocks one after the other into a file, and return each leaf's pieces. Without blocks, write no file."""
    pieces: dict[str, list[Piece]] = {}
    if not blocks:
        return pieces
    with path.open("wb") as file:
        for leaf, start, values in blocks:
            raw = values.reshape(-1).view(np.uint8).data
            piece = Piece(path.name, file.tell(), start, values.shape, hashlib.sha256(raw).hexdigest())
            pieces.setdefault(leaf, []).append(piece)
            file.write(raw)
    return pieces


def damaged_leaves(path: Path, extents: Sequence[Extent]) -> list[str]:
    with path.open("rb") as file:
        return [one.leaf for one in extents if read_verified(file, one.offset, one.bytes, one.sha256) is None]


def read_verified(file: IO[bytes], offset: int, size: int, sha256: str) -> bytes | None:
    file.seek(offset)
    content = file.read(size)
    return content if hashlib.sha256(content).hexdigest() == sha256 else None


class Files(contextlib.ExitStack):
    """A context that reads packed leaves of one checkpoint, and closes the opened files at its end."""

    def __init__(self, directory: Path):
        super().__init__()
        self._directory, self._files = directory, {}

    def read(self, leaf: str, pieces: Sequence[Piece], dtype: np.dtype) -> np.ndarray:
        """Read and verify the storage of a leaf, all of which the pieces cover."""
        ends = (piece.end for piece in pieces)
        storage = np.empty(tuple(map(max, zip(*ends, strict=True))), dtype)
        for piece in pieces:
            where, size = f"{leaf} in {self._directory / piece.file}", math.prod(piece.shape) * dtype.itemsize
            try:
                content = read_verified(self._open(piece.file), piece.offset, size, piece.sha256)
            except OSError as error:
                raise CheckpointError(f"{where} cannot be read: {in_one_line(error)}") from error
            if content is None:
                raise CheckpointError(f"{where} has other contents than were written.")
            storage[piece.index] = np.frombuffer(content, dtype).reshape(piece.shape)
        return storage

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._files:
            self._files[name] = self.enter_context((self._directory / name).open("rb"))
        return self._files[name]
