"""Write large leaves through orbax, one folder per leaf and one file per shard, and read large and small leaves.

Each process writes its own shards. The folder is an ordinary orbax checkpoint, which stock orbax can read. The format
is zarr without OCDBT, so that every file belongs to one leaf. `saving.py` writes the small leaves.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.sharding import NamedSharding, Sharding
from orbax.checkpoint import type_handlers

from zerojax.checkpoint.errors import CheckpointError, attempt, in_one_line
from zerojax.checkpoint.manifest import ARRAYS, SavedLeaf, read_verified
from zerojax.layout.leaf import Leaf
from zerojax.offload.chunked import Chunked, Chunking, assembled, joined, parts_of, read_ahead
from zerojax.offload.disk import aligned_zeros

# Hosts write slices of a replicated array in parallel. A slice has at least these bytes, because each is compiled.
MIN_SLICE_BYTES = 16 << 20
# Bytes that are read ahead: a 32nd of all bytes that a process reads, but between these two limits.
SHARES_AHEAD, LEAST_AHEAD, MOST_AHEAD = 32, 16 << 20, 2 << 30
BLOCK_BYTES = 4 << 20  # bytes of a file that are read at once


class ReadRequest(NamedTuple):
    """A leaf to read, and its wanted layout, type and sharding. For PRNG keys, `leaf` describes the key data."""

    saved: SavedLeaf
    leaf: Leaf
    sharding: Sharding

    @property
    def is_whole(self) -> bool:
        """Return whether each process must read the whole leaf: `saved` is packed, or only one layout is flat."""
        return bool(self.saved.pieces) or (self.saved.kind == "flat") != (self.leaf.kind == "flat")


@dataclasses.dataclass(frozen=True)
class ChunkedSource:
    """Wrapper that makes an offloaded leaf one leaf for orbax. `Chunked` itself is a pytree node with many leaves."""

    node: Chunked


class ArrayHandler(type_handlers.ArrayHandler):
    """orbax's array handler, extended to write offloaded leaves.

    Leaves in host memory are written one at a time, because device memory may be too small for all of them. Leaves on
    disk are copied from file to file, without the devices.
    """

    def __init__(self):
        """Choose orbax's options. Several processes divide the writing of each replicated array."""
        super().__init__(
            use_replica_parallel=jax.process_count() > 1,
            min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES,
            enable_write_sharding_file=False,
        )
        self.copies: list[Future[None]] = []  # not given to orbax, which logs errors of its futures

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Copy the values to host memory and begin to write them. Return a future of each write to disk."""
        infos = [info.replace(byte_limiter=None) for info in infos]  # a limiter works only in its own event loop
        entries = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        arrays = [entry for entry in entries if not isinstance(entry[0], ChunkedSource)]
        futures = list(await super().serialize(*zip(*arrays, strict=True))) if arrays else []
        try:
            for source, info, arg in entries:
                if isinstance(source, ChunkedSource) and source.node.leaf_files is not None:
                    self.copies += begin_copy(source.node, Path(info.parent_dir) / info.name)
                elif isinstance(source, ChunkedSource):
                    futures += await super().serialize([joined(source.node)], [info], [arg])
        except BaseException:
            with contextlib.suppress(Exception):
                wait_for([*futures, *self.copies])
            raise
        return futures


def write_leaves(directory: Path, arrays: Mapping[str, jax.Array | Chunked]) -> Callable[[], None]:
    """Begin to write arrays into an empty folder. Return a function that waits for the writes of this process.

    The values are copied to host memory before this function returns. (On CPU, the buffers are kept alive instead, so
    that later donations cannot reuse them.) Leaves on disk are copied later, before a step overwrites them. `arrays`
    maps folder names to arrays, none of which is empty.
    """
    if not arrays:
        return lambda: None
    handler = ArrayHandler()
    registry = type_handlers.create_type_handler_registry((jax.Array, handler), (ChunkedSource, handler))
    tree = {folder: ChunkedSource(x) if isinstance(x, Chunked) else x for folder, x in arrays.items()}
    orbax = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    saving = orbax.async_save(epath.Path(directory), args=ocp.args.PyTreeSave(tree))
    with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop, as in a notebook
        futures = pool.submit(asyncio.run, saving).result() or ()
    return lambda: wait_for([*futures, *handler.copies])


def begin_copy(node: Chunked, folder: Path) -> list[Future[None]]:
    """Begin to copy a leaf on disk into a folder of a checkpoint. Return futures of this process's copies.

    The folder gets the leaf as it is at this call, even if a later step begins before the copies end. Each chunk is
    read into one buffer, where its checksum is verified, and then written into each shard's file. Links to the chunks'
    files would be wrong, because a step overwrites the files in place. A copy inside the kernel would not verify the
    checksum, so a damaged chunk would get a valid digest.
    """
    local = node.sharding.shard_shape(node.shape)
    folder.mkdir(exist_ok=True)
    if jax.process_index() == 0:
        metadata = {"shape": node.shape, "chunks": local, "compressor": None}
        store = {"driver": "file", "path": f"{folder}/"}
        spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "dtype": np.dtype(node.dtype).name}
        tensorstore.open(spec, create=True).result()
    files = [folder / name if name else None for name in files_of_shards(node.sharding, node.shape)]
    for file in filter(None, files):
        file.touch()
    return node.leaf_files.copy(*node.chunks, functools.partial(write_chunk, files, local, node.chunking))


def files_of_shards(sharding: NamedSharding, shape: tuple[int, ...]) -> list[str]:
    """Return the name of the zarr file of each shard of this process, or "" if another process writes the shard.

    If several processes have a shard, the process of the shard's first device writes it.
    """
    local = sharding.shard_shape(shape)
    names = {
        device: ".".join(str(one.indices(size)[0] // n) for one, size, n in zip(index or (), shape, local, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    writers = {name: device.process_index for device, name in reversed(names.items())}
    ours = [names[device] for device, *_ in parts_of(shape, sharding).values()]
    return [name if writers[name] == jax.process_index() else "" for name in ours]


def write_chunk(
    files: Sequence[Path | None], local: tuple[int, ...], chunking: Chunking, n: int, shards: Sequence[np.ndarray]
) -> None:
    """Write chunk `n` of each shard to its place in the shard's file. `local` is the shape of one shard."""
    dim, (start, _) = chunking.dim, chunking.chunks[n]
    for file, shard in zip(files, shards, strict=True):
        if file is not None:
            rows = shard.reshape(math.prod(local[:dim]), -1)  # each row is contiguous in the file
            row_bytes = math.prod(local[dim:]) * shard.itemsize
            with file.open("r+b") as out:
                for i, row in enumerate(rows):
                    out.seek(i * row_bytes + start * (row_bytes // local[dim]))
                    out.write(row.view(np.uint8).data)


def wait_for(futures: Sequence[Any]) -> None:
    """Block until every future has ended, so that the caller can remove the folder. Then raise the first error."""
    if failures := [failure for future in futures if (failure := attempt(future.result))]:
        raise CheckpointError(failures[0])


def read_arrays(directory: Path, requests: Sequence[ReadRequest]) -> list[Any]:
    """Read leaves of a checkpoint straight into their shardings. Raise a `CheckpointError` if a leaf cannot be read.

    orbax is not used, because it reads all shards of many leaves before it copies the first shard to a device. On CPU,
    where device memory is host memory, these leaves would be in memory twice.
    """
    large = [one for one in requests if not one.is_whole]
    boxes = [(one, box) for one in large for box in parts_of(one.leaf.storage_shape, one.sharding)]
    sizes = [math.prod(end - start for start, end in box) * one.leaf.dtype.itemsize for one, box in boxes]
    parts = [(directory, one.saved, one.leaf, tuple(slice(*span) for span in box)) for one, box in boxes]
    values = read_ahead(read_part, parts, sizes, min(MOST_AHEAD, max(LEAST_AHEAD, sum(sizes) // SHARES_AHEAD)))

    def placed(one: ReadRequest) -> jax.Array:
        if not one.is_whole:
            return assembled(one.leaf.storage_shape, one.sharding, one.leaf.dtype, values)
        box = tuple(slice(0, size) for size in one.leaf.storage_shape)
        return place_whole(read_part(directory, one.saved, one.leaf, box), one.sharding)

    return [placed(one) if one.saved.key is None else as_keys(placed(one), one) for one in requests]


def place_whole(stored: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(stored.shape, sharding, lambda index: stored[index if index else ...])


def as_keys(x: jax.Array, one: ReadRequest) -> jax.Array:
    try:
        wrap = functools.partial(jax.random.wrap_key_data, impl=one.saved.key)
        return jax.jit(wrap, out_shardings=one.sharding)(x)  # device_put rejects an array that spans processes
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{one.saved.name} is said to be PRNG keys of {one.saved.key}, and is not: {in_one_line(error)}"
        ) from error


def read_part(directory: Path, saved: SavedLeaf, leaf: Leaf, box: tuple[slice, ...]) -> np.ndarray:
    """Read a part of the leaf `saved`, as `leaf` stores it. `box` has one slice per dim of the storage of `leaf`."""
    if (saved.kind == "flat") == (leaf.kind == "flat"):  # the storages differ in padding and type at most
        return as_type(read_box(directory, saved, box), leaf)
    whole = read_box(directory, saved, tuple(slice(0, size) for size in saved.data_shape))
    return as_stored(whole, leaf)[box]


def as_stored(values: np.ndarray, leaf: Leaf) -> np.ndarray:
    """Return the storage, with padding, of a leaf with the layout `leaf`. `values` are all values, without padding."""
    stored = np.zeros(leaf.storage_shape, leaf.dtype)
    values = values.reshape(-1 if leaf.kind == "flat" else leaf.shape)
    stored[tuple(map(slice, values.shape))] = as_type(values, leaf)
    return stored


def as_type(values: np.ndarray, leaf: Leaf) -> np.ndarray:
    with np.errstate(all="ignore"):  # as on a device, a value that is too large becomes infinite
        return values.astype(leaf.dtype, copy=False)


def read_box(directory: Path, saved: SavedLeaf, box: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a leaf's storage into host memory. If the leaf is flat, `box` has one slice.

    Every slice of `box` has a start and an end, which may exceed the logical shape, because the new storage may have
    more padding. The result has zeros there. Raise a `CheckpointError` for unreadable files.
    """
    rank = len(saved.data_shape)  # the data of PRNG keys has further dims, which are never padded
    edges = zip(box[:rank], saved.data_shape, strict=True)
    inside = (*(slice(one.start, min(one.stop, size)) for one, size in edges), *box[rank:])
    shape, sizes = ([one.stop - one.start for one in spans] for spans in (box, inside))
    part = aligned_zeros(shape, saved.storage_dtype)
    if sizes and min(sizes) <= 0:
        return part
    target = part[(*map(slice, sizes), ...)]
    if saved.pieces:
        target[...] = read_packed(directory, saved)[inside]
        return part
    try:
        read_files(directory / ARRAYS / saved.folder, inside, target)
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(f"{saved.name} in {directory} cannot be read: {in_one_line(error)}") from error
    return part


def read_packed(directory: Path, leaf: SavedLeaf) -> np.ndarray:
    """Read and verify the storage of a packed leaf. The leaf's pieces cover the entire storage."""
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


def read_files(folder: Path, box: tuple[slice, ...], out: np.ndarray) -> None:
    """Read a box of a large leaf from the leaf's files (uncompressed zarr) into `out`, which has the box's shape.

    Only the needed bytes are read. TensorStore would read each file as a whole for every chunk of a leaf, and hold a
    whole shard in host memory in addition to the chunk. `manifest.py` has checked the form and the size of all files.
    """
    chunks = tuple(json.loads((folder / ".zarray").read_text())["chunks"])
    if not box:  # zarr stores a scalar as a vector
        box, chunks, out = (slice(0, 1),), (1,), out.reshape(1)
    for cell in itertools.product(
        *(range(one.start // n, -(-one.stop // n)) for one, n in zip(box, chunks, strict=True))
    ):
        origin = [i * n for i, n in zip(cell, chunks, strict=True)]
        edges = zip(box, origin, chunks, strict=True)
        inside = [(max(one.start, at), min(one.stop, at + n)) for one, at, n in edges]
        part = out[tuple(slice(a - one.start, b - one.start) for (a, b), one in zip(inside, box, strict=True))]
        local = [(a - at, b - at) for (a, b), at in zip(inside, origin, strict=True)]
        with (folder / ".".join(map(str, cell))).open("rb") as file:
            copy_rows(file, 0, chunks, local, part)


def copy_rows(
    file: IO[bytes], offset: int, shape: tuple[int, ...], box: list[tuple[int, int]], out: np.ndarray
) -> None:
    """Copy a box of an array into `out`. The array begins at byte `offset` of the file, and has this `shape`."""
    row_bytes, (start, stop) = math.prod(shape[1:]) * out.itemsize, box[0]
    if row_bytes > BLOCK_BYTES and len(shape) > 1:
        for i in range(start, stop):
            copy_rows(file, offset + i * row_bytes, shape[1:], box[1:], out[i - start])
        return
    rows = max(1, BLOCK_BYTES // row_bytes)
    for i in range(start, stop, rows):
        count = min(rows, stop - i)
        file.seek(offset + i * row_bytes)
        content = file.read(count * row_bytes)
        if len(content) < count * row_bytes:
            raise EOFError("a file is shorter than its shard")
        block = np.frombuffer(content, out.dtype).reshape(count, *shape[1:])
        out[i - start : i - start + count] = block[(slice(None), *(slice(*span) for span in box[1:]))]


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
