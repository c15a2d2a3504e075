"""Write large leaves through orbax, one folder per leaf and one file per shard, and read large and small leaves.

Each process writes its own shards. The folder is an ordinary orbax checkpoint, which stock orbax can read. It has the
zarr format without OCDBT, so that every file belongs to one leaf. `packing.py` writes the small leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import type_handlers

from zerojax.checkpoint import packing
from zerojax.checkpoint.disk_leaves import begin_copy
from zerojax.checkpoint.errors import CheckpointError, in_one_line
from zerojax.checkpoint.manifest import ARRAYS, SavedLeaf
from zerojax.checkpoint.zarr_files import ZarrFiles
from zerojax.layout.chunked import Chunked
from zerojax.offload.read_ahead import read_ahead
from zerojax.placement.chunking import assembled, joined, places_of

# Minimum bytes of the slices of a replicated array that hosts write in parallel. Every slice is compiled.
MIN_SLICE_BYTES = 16 << 20
# Parts of arrays are read ahead: a share of all bytes that a process reads, between two bounds.
SHARES_AHEAD, LEAST_AHEAD, MOST_AHEAD = 32, 16 << 20, 2 << 30


class ReadRequest(NamedTuple):
    """A leaf to read, and its wanted shape and sharding. Reading trims or zero-pads the saved dims to `shape`."""

    saved: SavedLeaf
    shape: tuple[int, ...]  # for PRNG keys, the shape of their data
    sharding: Sharding


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
        """Copy the values to host memory and begin to write them. Return futures that end when all are on disk."""
        infos = [info.replace(byte_limiter=None) for info in infos]  # a limiter works only in its own event loop
        entries = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        arrays = [entry for entry in entries if not isinstance(entry[0], ChunkedSource)]
        futures = list(await super().serialize(*zip(*arrays, strict=True))) if arrays else []
        try:
            for source, info, arg in entries:
                if isinstance(source, ChunkedSource) and source.node.store is not None:
                    self.copies += begin_copy(source.node, Path(info.parent_dir) / info.name)
                elif isinstance(source, ChunkedSource):
                    futures += await super().serialize([joined(source.node)], [info], [arg])
        except BaseException:
            with contextlib.suppress(Exception):
                wait_for([*futures, *self.copies])
            raise
        return futures


def write(directory: Path, arrays: Mapping[str, jax.Array | Chunked]) -> Callable[[], None]:
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
    futures = run(orbax.async_save(epath.Path(directory), args=ocp.args.PyTreeSave(tree))) or ()
    return lambda: wait_for([*futures, *handler.copies])


def wait_for(futures: Sequence[Any]) -> None:
    """Block until every future has ended, then raise the first error.

    The caller removes the folder after an error, so all writes must have ended by then.
    """
    failures = []
    for future in futures:
        try:
            future.result()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]


def read(directory: Path, requests: Sequence[ReadRequest]) -> list[Any]:
    """Read leaves of a checkpoint straight into their shardings. Raise a `CheckpointError` if a leaf cannot be read."""
    large = iter(read_folders(directory, [one for one in requests if not one.saved.pieces]))
    with packing.Files(directory) as files:  # each process reads packed leaves in full, because they are small
        packed = lambda saved: files.read(saved.name, saved.pieces, saved.storage_dtype)
        arrays = [placed(packed(one.saved), one) if one.saved.pieces else next(large) for one in requests]
    return [x if one.saved.key is None else as_keys(x, one) for x, one in zip(arrays, requests, strict=True)]


def placed(stored: np.ndarray, one: ReadRequest) -> jax.Array:
    """Place a leaf's storage that this process has in full in host memory."""
    fitted = np.zeros(one.shape, stored.dtype)
    common = tuple(slice(min(n, m)) for n, m in zip(fitted.shape, stored.shape, strict=True))
    fitted[common] = stored[common]
    return jax.make_array_from_callback(one.shape, one.sharding, lambda index: fitted[index if index else ...])


def read_folders(directory: Path, requests: Sequence[ReadRequest]) -> list[jax.Array]:
    """Read leaves that have a folder each, shard by shard. Raise a `CheckpointError` if a leaf cannot be read.

    orbax would read all shards of many leaves before it copies the first one to a device. So host memory would hold
    them twice if the devices are in host memory, too.
    """
    pairs = [(one, opened(directory, one.saved)) for one in requests]
    parts = [(one.saved, box, files) for one, files in pairs for box in places_of(one.shape, one.sharding)]
    sizes = [math.prod(end - start for start, end in box) * saved.storage_dtype.itemsize for saved, box, _ in parts]
    every = [(directory, saved, tuple(slice(*span) for span in box), files) for saved, box, files in parts]
    limit = min(MOST_AHEAD, max(LEAST_AHEAD, sum(sizes) // SHARES_AHEAD))
    values = read_ahead(read_box, every, sizes, limit)
    return [assembled(one.shape, one.sharding, one.saved.storage_dtype, values) for one in requests]


def as_keys(x: jax.Array, one: ReadRequest) -> jax.Array:
    try:
        wrap = functools.partial(jax.random.wrap_key_data, impl=one.saved.key)
        return jax.jit(wrap, out_shardings=one.sharding)(x)  # device_put rejects an array that spans processes
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{one.saved.name} is said to be PRNG keys of {one.saved.key}, and is not: {in_one_line(error)}"
        ) from error


def opened(directory: Path, saved: SavedLeaf) -> ZarrFiles | None:
    if saved.pieces:
        return None
    with unreadable_named(directory, saved):
        return ZarrFiles.of(directory / ARRAYS / saved.folder, saved.storage_dtype)


def read_slice(directory: Path, saved: SavedLeaf, index: tuple[int | slice, ...]) -> np.ndarray:
    """Read a slice of one leaf's storage into host memory. A packed leaf is first read and verified as a whole.

    `index` has an integer, or a slice with a start and an end, for each dim.
    """
    box = tuple(one if isinstance(one, slice) else slice(one, one + 1) for one in index)
    whole = (slice(None) if isinstance(one, slice) else 0 for one in index)
    return read_box(directory, saved, box)[(*whole, ...)]


@contextlib.contextmanager
def unreadable_named(directory: Path, saved: SavedLeaf) -> Iterator[None]:
    """Replace an error of reading by a `CheckpointError` that names the leaf."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(f"{saved.name} in {directory} cannot be read: {in_one_line(error)}") from error


def read_box(directory: Path, saved: SavedLeaf, box: tuple[slice, ...], files: ZarrFiles | None = None) -> np.ndarray:
    """Read a part of a leaf's storage into host memory. If the leaf is flat, `box` has one slice.

    Every slice of `box` has a start and an end. Elements beyond the leaf's logical shape are padding, and become zeros.
    So the storage may have other padding than the saved storage. `files` are the leaf's files, or None to open them.
    """
    rank = len(saved.data_shape)  # the data of PRNG keys has further dims, which are never padded
    edges = zip(box[:rank], saved.data_shape, strict=True)
    inside = (*(slice(one.start, min(one.stop, size)) for one, size in edges), *box[rank:])
    shape, sizes = ([one.stop - one.start for one in spans] for spans in (box, inside))
    part = np.empty(shape, saved.storage_dtype) if shape == sizes else np.zeros(shape, saved.storage_dtype)
    if sizes and min(sizes) <= 0:
        return part
    target = part[(*map(slice, sizes), ...)]
    if saved.pieces:
        with packing.Files(directory) as packed:
            target[...] = packed.read(saved.name, saved.pieces, saved.storage_dtype)[inside]
        return part
    with unreadable_named(directory, saved):
        (files or ZarrFiles.of(directory / ARRAYS / saved.folder, saved.storage_dtype)).read(inside, target)
    return part


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def run(coroutine: Coroutine) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
