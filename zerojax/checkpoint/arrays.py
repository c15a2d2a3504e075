"""Write the leaves of a state, in one file per process, and read any box of a leaf into any layout.

A box has one range of indices per dim of a leaf's storage. Each process writes boxes that its devices hold, one after
the other, and a `Piece` of the manifest records where each box is.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from zerojax.checkpoint.errors import CheckpointError, in_one_line
from zerojax.checkpoint.manifest import Piece, SavedLeaf
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.offload.chunked import THREADS, Chunked, assembled, boxes_of, joined, parts_of, read_ahead
from zerojax.offload.disk import aligned_zeros
from zerojax.offload.folder import sync

# An array of at most this many bytes is copied, written and read as a whole, because each box costs some 10
# microseconds. The limit is low, because the copy delays training, and because each device reads the whole leaf.
SMALL_BYTES = 64 << 10
# Processes that hold the same box each write a part of it, if the box has at least this many bytes.
SHARED_BYTES = 16 << 20
# Parts of arrays are read ahead: a share of all bytes that a process reads, between two bounds.
SHARES_AHEAD, LEAST_AHEAD, MOST_AHEAD = 32, 16 << 20, 2 << 30
BLOCK_BYTES = 4 << 20  # bytes of a file that are read or written at once
SPARSE_BYTES = 64 << 10  # of a longer row, only the wanted part is read if that is less than half of it


class LeavesFile:
    """The file of one process with its boxes of all leaves.

    First `add` copies values to host memory while training waits. Then `write` runs in the thread of the save.
    """

    def __init__(self, path: Path):
        self._path, self._end = path, 0
        self._boxes: collections.deque[tuple[str, Piece, np.ndarray]] = collections.deque()
        self._copies: list[Future[None]] = []
        self._pieces: list[tuple[str, Piece]] = []  # what was written

    def add(self, arrays: Mapping[str, jax.Array | Chunked]) -> None:
        """Copy this process's boxes of named leaves to host memory, and begin to copy the leaves that are on disk.

        On CPU, device memory is host memory. So a large array is not copied, but its buffer is kept alive, and a later
        step cannot reuse it. An offloaded leaf in host memory is first joined on the devices, one leaf at a time to
        save device memory.
        """
        self._path.touch()
        jax.copy_to_host_async([x for x in arrays.values() if not is_chunked(x)])
        for name, x in arrays.items():
            if isinstance(x, Chunked) and x.store is not None:
                self._begin_copies(name, x)
                continue
            for start, values in boxes_in(joined(x) if isinstance(x, Chunked) else x):
                self._boxes.append((name, self._place(start, values.shape, values.itemsize), values))

    def write(self) -> list[tuple[str, Piece]]:
        """Write all boxes, and block until they are on disk. Return the pieces, each with the name of its leaf."""
        with ThreadPoolExecutor(THREADS) as pool:  # `popleft` frees each box when it is written
            writes = [pool.submit(self._write_box, *self._boxes.popleft()) for _ in range(len(self._boxes))]
        for write in (*writes, *self._copies):
            write.result()
        sync(self._path)
        return sorted(self._pieces, key=lambda pair: pair[1].offset)

    def _begin_copies(self, name: str, node: Chunked) -> None:
        """Begin to copy a leaf on disk, without the devices, as it is at this call.

        A later step that overwrites a chunk waits until it is copied. Links to the files of the chunks would be wrong,
        because a step overwrites them in place. A copy inside the kernel would not verify their checksums, so a damaged
        chunk would get a valid digest.
        """
        places: list[list[tuple[Piece, slice]]] = []
        for n, shape in enumerate(node.chunking.chunk_shapes(node.leaf)):
            shares = shares_of(shape, node.sharding, node.dtype.itemsize)
            places.append([])
            for (first, *others), rows in zip(boxes_of(node, n), shares, strict=True):
                start = (first.start + rows.start, *(one.start for one in others))
                size = (rows.stop - rows.start, *(one.stop - one.start for one in others))
                places[n].append((self._place(start, size, node.dtype.itemsize), rows))

        def put(n: int, shards: Sequence[np.ndarray]) -> None:
            for (piece, rows), shard in zip(places[n], shards, strict=True):
                self._write_box(name, piece, shard[rows])

        self._copies += node.store.copy(*node.chunks, put)

    def _place(self, start: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> Piece:
        """Return the piece of the next box, which follows the boxes before it in the file."""
        piece = Piece(self._path.name, self._end, math.prod(shape) * itemsize, start, shape, sha256="")
        self._end += piece.size
        return piece

    def _write_box(self, name: str, piece: Piece, values: np.ndarray) -> None:
        if not values.size:
            return
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        sha256 = hashlib.sha256()
        # Not "wb": if the save failed and its folder was removed, nothing may create the file again.
        with self._path.open("r+b") as file:
            file.seek(piece.offset)
            for at in range(0, len(content), BLOCK_BYTES):
                sha256.update(content[at : at + BLOCK_BYTES])
                file.write(content[at : at + BLOCK_BYTES])
        self._pieces.append((name, dataclasses.replace(piece, sha256=sha256.hexdigest())))


def boxes_in(x: jax.Array) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Return the boxes of an array that this process writes: the index of the first element, and the values."""
    x = jax.random.key_data(x) if is_key(x) else x
    if x.is_fully_addressable and x.nbytes <= SMALL_BYTES:
        return [((0,) * x.ndim, np.array(x))]
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    parts, boxes = parts_of(x.shape, x.sharding), []
    shares = shares_of(x.shape, x.sharding, x.dtype.itemsize)
    for (part, (device, *_)), rows in zip(parts.items(), shares, strict=True):
        if rows.stop > rows.start:
            start, values = tuple(first for first, _ in part), np.asarray(shards[device])
            boxes.append(((start[0] + rows.start, *start[1:]), values[rows]) if start else (start, values))
    return boxes


@functools.lru_cache(maxsize=256)
def shares_of(shape: tuple[int, ...], sharding: Sharding, itemsize: int) -> list[slice]:
    """Return, for each part in `parts_of`, the rows that this process writes. A scalar has one row."""
    holders: dict[tuple, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        part = tuple(one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True))
        holders.setdefault(part, set()).add(device.process_index)
    shares = []
    for part in parts_of(shape, sharding):
        sizes = [end - start for start, end in part] or [1]
        is_shared = math.prod(sizes) * itemsize >= SHARED_BYTES
        writers = sorted(holders[part])[: None if is_shared else 1]
        bounds = [sizes[0] * k // len(writers) for k in range(len(writers) + 1)]
        ours = [k for k, process in enumerate(writers) if process == jax.process_index()]
        shares.append(slice(bounds[ours[0]], bounds[ours[0] + 1]) if ours else slice(0, 0))
    return shares


class ReadRequest(NamedTuple):
    """A leaf to read, and the wanted layout, type and sharding. `leaf` may be flat where `saved` is not."""

    saved: SavedLeaf
    leaf: Leaf
    shape: tuple[int, ...]  # the storage shape of `leaf`; for PRNG keys, that of their data
    sharding: Sharding

    @property
    def dtype(self) -> Any:
        return self.leaf.dtype if self.saved.key is None else self.saved.storage_dtype

    @property
    def is_small(self) -> bool:
        return math.prod(self.shape) * self.dtype.itemsize <= SMALL_BYTES

    @property
    def parts(self) -> list[tuple[slice, ...]]:
        """Return the boxes to read: the whole leaf if it is small, otherwise the shards of this process."""
        boxes = [tuple((0, size) for size in self.shape)] if self.is_small else parts_of(self.shape, self.sharding)
        return [tuple(slice(*span) for span in box) for box in boxes]


def read_arrays(directory: Path, requests: Sequence[ReadRequest]) -> list[Any]:
    """Read leaves of a checkpoint into their shardings, each large leaf shard by shard, and few parts at a time.

    Raise a `CheckpointError` if a leaf cannot be read.
    """
    parts = [(directory, one.saved, one.leaf, box) for one in requests for box in one.parts]
    sizes = [math.prod(span.stop - span.start for span in box) * leaf.dtype.itemsize for *_, leaf, box in parts]
    values = read_ahead(read_part, parts, sizes, min(MOST_AHEAD, max(LEAST_AHEAD, sum(sizes) // SHARES_AHEAD)))

    def placed(one: ReadRequest) -> Any:
        if one.is_small:
            x = place_whole(next(values), one.sharding)
        else:
            x = assembled(one.shape, one.sharding, one.dtype, values)
        return x if one.saved.key is None else as_keys(x, one)

    return [placed(one) for one in requests]


def place_whole(values: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index if index else ...])


def read_part(directory: Path, saved: SavedLeaf, leaf: Leaf, box: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a leaf, and return it as `leaf` stores it. `box` is a part of the storage of `leaf`."""
    if (saved.kind == "flat") == (leaf.kind == "flat"):
        return as_type(read_box(directory, saved, box), saved, leaf)
    # One of the two is flat, so the leaf is small.
    whole = read_box(directory, saved, tuple(slice(0, size) for size in saved.data_shape))
    return as_stored(whole, saved, leaf, leaf.storage_shape)[box]


def as_stored(values: np.ndarray, saved: SavedLeaf, leaf: Leaf, shape: tuple[int, ...]) -> np.ndarray:
    """Return all values of a leaf, without padding, as `leaf` stores them, padded to `shape`."""
    if saved.key is None:
        values = values.reshape(-1 if leaf.kind == "flat" else leaf.shape)
    stored = np.zeros(shape, values.dtype)
    stored[tuple(map(slice, values.shape))] = values
    return as_type(stored, saved, leaf)


def as_type(values: np.ndarray, saved: SavedLeaf, leaf: Leaf) -> np.ndarray:
    return values if saved.key is not None else values.astype(leaf.dtype, copy=False)


def as_keys(x: jax.Array, one: ReadRequest) -> jax.Array:
    try:
        wrap = functools.partial(jax.random.wrap_key_data, impl=one.saved.key)
        return jax.jit(wrap, out_shardings=one.sharding)(x)  # device_put rejects an array that spans processes
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{one.saved.name} is said to be PRNG keys of {one.saved.key}, and is not: {in_one_line(error)}"
        ) from error


def read_box(directory: Path, saved: SavedLeaf, box: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a leaf's storage into host memory. If the leaf is flat, `box` has one slice.

    Every slice of `box` has a start and an end. Elements beyond the leaf's logical shape are padding, and become zeros.
    So the storage may have other padding than the saved storage. Raise a `CheckpointError` if the files cannot be read.
    """
    rank = len(saved.data_shape)  # the data of PRNG keys has further dims, which are never padded
    edges = zip(box[:rank], saved.data_shape, strict=True)
    inside = (*(slice(one.start, min(one.stop, size)) for one, size in edges), *box[rank:])
    shape, sizes = ([one.stop - one.start for one in spans] for spans in (box, inside))
    part = aligned_zeros(shape, saved.storage_dtype)
    if sizes and min(sizes) <= 0:
        return part
    target = part[(*map(slice, sizes), ...)]
    missing = target.size
    try:
        for piece in saved.pieces:
            missing -= read_piece(directory, piece, inside, target)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{saved.name} in {directory} cannot be read: {in_one_line(error)}") from error
    if missing:
        raise CheckpointError(f"{saved.name} in {directory} lacks {missing} elements.")
    return part


def read_piece(directory: Path, piece: Piece, box: tuple[slice, ...], out: np.ndarray) -> int:
    """Read what a piece has of a box into an array of the box's shape. Return the number of elements."""
    dims = list(zip(box, piece.start, piece.shape, strict=True))
    if any(one.start >= first + size or one.stop <= first for one, first, size in dims):
        return 0
    spans = [(max(one.start, first), min(one.stop, first + size)) for one, first, size in dims]
    part = out[tuple(slice(low - one.start, high - one.start) for (low, high), one in zip(spans, box, strict=True))]
    local = [(low - first, high - first) for (low, high), first in zip(spans, piece.start, strict=True)]
    with (directory / piece.file).open("rb") as file:
        # A scalar is read as a vector.
        copy_rows(file, piece.offset, piece.shape or (1,), local or [(0, 1)], part if box else out.reshape(1))
    return part.size


def copy_rows(
    file: IO[bytes], offset: int, shape: tuple[int, ...], box: list[tuple[int, int]], out: np.ndarray
) -> None:
    """Copy a box of an array that begins at `offset` of a file. `box` has a start and an end for each dim."""
    row_bytes, (start, stop) = math.prod(shape[1:]) * out.itemsize, box[0]
    is_sparse = 2 * out[0].nbytes < row_bytes and row_bytes > SPARSE_BYTES
    if (row_bytes > BLOCK_BYTES or is_sparse) and len(shape) > 1:
        for i in range(start, stop):
            copy_rows(file, offset + i * row_bytes, shape[1:], box[1:], out[i - start])
        return
    rows = max(1, BLOCK_BYTES // row_bytes)
    for i in range(start, stop, rows):
        count = min(rows, stop - i)
        file.seek(offset + i * row_bytes)
        content = file.read(count * row_bytes)
        if len(content) < count * row_bytes:
            raise EOFError("a file is shorter than was written")
        block = np.frombuffer(content, out.dtype).reshape(count, *shape[1:])
        out[i - start : i - start + count] = block[(slice(None), *(slice(*span) for span in box[1:]))]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
