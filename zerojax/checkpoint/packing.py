"""Write and read small leaves. Each process writes its small leaves into one file, and the manifest locates each leaf.

A folder per leaf and a file per shard would cost milliseconds for each leaf. OCDBT also packs leaves into few files,
but was rejected, because a damaged byte in such a file cannot be traced to a leaf.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import jax
import numpy as np

from zerojax.checkpoint.errors import CheckpointError, in_one_line
from zerojax.checkpoint.manifest import Piece, SavedLeaf
from zerojax.layout.chunked import Chunked
from zerojax.placement.chunking import joined


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


def read_verified(file: IO[bytes], leaf: SavedLeaf, piece: Piece) -> np.ndarray | None:
    """Return the values of a piece, or None if the file has other bytes than were written."""
    file.seek(piece.offset)
    content = file.read(math.prod(piece.shape) * leaf.storage_dtype.itemsize)
    if hashlib.sha256(content).hexdigest() != piece.sha256:
        return None
    return np.frombuffer(content, leaf.storage_dtype).reshape(piece.shape)


def read(directory: Path, leaf: SavedLeaf) -> np.ndarray:
    """Read and verify the storage of a packed leaf, all of which its pieces cover."""
    ends = [[i + n for i, n in zip(piece.start, piece.shape, strict=True)] for piece in leaf.pieces]
    storage = np.empty([max(dim) for dim in zip(*ends, strict=True)], leaf.storage_dtype)
    for piece, end in zip(leaf.pieces, ends, strict=True):
        path = directory / piece.file
        try:
            with path.open("rb") as file:
                values = read_verified(file, leaf, piece)
        except OSError as error:
            raise CheckpointError(f"{leaf.name} in {path} cannot be read: {in_one_line(error)}") from error
        if values is None:
            raise CheckpointError(f"{leaf.name} in {path} has other contents than were written.")
        storage[tuple(map(slice, piece.start, end))] = values
    return storage
