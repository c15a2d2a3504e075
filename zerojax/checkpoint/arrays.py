"""Arrays on disk, through orbax: one folder per leaf, one file per shard, each process its own shards.

The folder is an ordinary orbax checkpoint, which stock orbax reads too: zarr without OCDBT, so that
every file belongs to one leaf. Small leaves are packed instead (`packing.py`); reading takes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.sharding import NamedSharding, Sharding
from orbax.checkpoint import type_handlers

from zerojax.checkpoint import packing
from zerojax.checkpoint.errors import CheckpointError, in_one_line
from zerojax.checkpoint.records import ARRAYS, SavedLeaf
from zerojax.layout.chunked import Chunked
from zerojax.placement.chunking import joined

# Several hosts share the writing of a replicated array only from this size on: each slice is compiled for.
MIN_SLICE_BYTES = 16 << 20
# Arrays are read in groups of about this size, which bounds the host memory in use.
GROUP_BYTES = 2 << 30


class ReadRequest(NamedTuple):
    """An array to read.

    Attributes:
        saved: The leaf; of PRNG keys their data are read, and made keys.
        shape: The shape to read it in: longer dims are trimmed, shorter ones padded with zeros.
        sharding: The sharding to read it into.
    """

    saved: SavedLeaf
    shape: tuple[int, ...]
    sharding: Sharding


@dataclasses.dataclass(frozen=True)
class ChunkedSource:
    """An offloaded leaf as one leaf of the tree that orbax writes; `Chunked` is a node with many."""

    node: Chunked


class ArrayHandler(type_handlers.ArrayHandler):
    """orbax's handler of arrays, which also writes offloaded leaves.

    It writes them one at a time, because device memory may be too small for all of them.
    """

    def __init__(self):
        """Set up as this package writes; hosts share the writing of what they replicate."""
        super().__init__(
            use_replica_parallel=jax.process_count() > 1,
            min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES,
            enable_write_sharding_file=False,
        )

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Copy the values to host memory and begin to write them; futures that end when all is on disk."""
        infos = [
            info.replace(byte_limiter=None) for info in infos
        ]  # it belongs to one event loop, and each call has one
        entries = list(zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True))
        arrays = [entry for entry in entries if not isinstance(entry[0], ChunkedSource)]
        futures = list(await super().serialize(*zip(*arrays, strict=True)))
        try:
            for source, info, arg in entries:
                if isinstance(source, ChunkedSource):
                    writing = await super().serialize([joined(source.node)], [info], [arg])
                    futures += writing
                    if source.node.store is not None:  # on disk: host memory may be too small for all, too
                        wait_for(writing)
        except BaseException:
            with contextlib.suppress(Exception):
                wait_for(futures)
            raise
        return futures


def write(directory: Path, arrays: Mapping[str, jax.Array | Chunked]) -> Callable[[], None]:
    """Begin to write arrays into an empty folder.

    What is written are the present values: they are copied to host memory before this
    returns (on CPU their buffers are kept alive, so that later donations cannot reuse them).

    Args:
        directory: The same on all processes.
        arrays: By folder; none without elements. If there are none, nothing is written.

    Returns:
        A function that blocks until this process' shards are on disk.
    """
    if not arrays:
        return lambda: None
    handler = ArrayHandler()
    registry = type_handlers.create_type_handler_registry((jax.Array, handler), (ChunkedSource, handler))
    tree = {folder: ChunkedSource(x) if isinstance(x, Chunked) else x for folder, x in arrays.items()}
    orbax = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    futures = run(orbax.async_save(epath.Path(directory), args=ocp.args.PyTreeSave(tree))) or ()
    return lambda: wait_for(futures)


def wait_for(futures: Sequence[Any]) -> None:
    """Block until everything is on disk or has failed: the caller removes the folder, and nothing may be writing there.

    Raises:
        Exception: The first that there was.
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
    """Read leaves of a checkpoint straight into their shardings, one for each request.

    Raises:
        CheckpointError: If one cannot be read.
    """
    large = iter(read_folders(directory / ARRAYS, [one for one in requests if not one.saved.pieces]))
    with packing.Files(directory) as files:
        arrays = [read_packed(files, one) if one.saved.pieces else next(large) for one in requests]
    return [x if one.saved.key is None else as_keys(x, one) for x, one in zip(arrays, requests, strict=True)]


def read_packed(files: packing.Files, one: ReadRequest) -> jax.Array:
    """Read a leaf that was packed; each process reads all of it, since it is small."""
    stored = files.read(one.saved.name, one.saved.pieces, one.saved.storage_dtype)
    fitted = np.zeros(one.shape, stored.dtype)
    common = tuple(slice(min(n, m)) for n, m in zip(fitted.shape, stored.shape, strict=True))
    fitted[common] = stored[common]
    return jax.make_array_from_callback(one.shape, one.sharding, lambda index: fitted[index if index else ...])


def read_folders(directory: Path, requests: Sequence[ReadRequest]) -> list[jax.Array]:
    """Read leaves that have a folder each.

    Raises:
        CheckpointError: If one cannot be read; orbax' and tensorstore's own errors are of no type.
    """
    handler, arrays = ArrayHandler(), []
    for group in groups(requests):
        infos = [param_info(directory, one.saved.folder) for one in group]
        args = [ocp.ArrayRestoreArgs(sharding=one.sharding, global_shape=one.shape, strict=False) for one in group]
        try:
            arrays += run(handler.deserialize(infos, args))
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as error:
            raise CheckpointError(f"An array in {directory} cannot be read: {in_one_line(error)}") from error
    return arrays


def as_keys(x: jax.Array, one: ReadRequest) -> jax.Array:
    """Return the PRNG keys whose data was read."""
    try:
        wrap = functools.partial(jax.random.wrap_key_data, impl=one.saved.key)
        return jax.jit(wrap, out_shardings=one.sharding)(x)  # device_put takes no array of several processes
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{one.saved.name} is said to be PRNG keys of {one.saved.key}, and is not: {in_one_line(error)}"
        ) from error


def read_slice(directory: Path, saved: SavedLeaf, index: tuple[int | slice, ...]) -> np.ndarray:
    """Read a slice of one leaf's storage into host memory; the rest is not read unless it is packed.

    Raises:
        CheckpointError: If it cannot be read; tensorstore's own errors are of no type.
    """
    if saved.pieces:
        with packing.Files(directory) as files:
            return files.read(saved.name, saved.pieces, saved.storage_dtype)[index]
    store = {"driver": "file", "path": f"{directory / ARRAYS / saved.folder}/"}
    try:
        return tensorstore.open({"driver": "zarr", "kvstore": store}).result()[index].read().result()
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(f"{saved.name} in {directory} cannot be read: {in_one_line(error)}") from error


def param_info(directory: Path, folder: str) -> type_handlers.ParamInfo:
    """Return orbax's description of an array's files."""
    return type_handlers.ParamInfo(
        name=folder,
        parent_dir=epath.Path(directory),
        is_ocdbt_checkpoint=False,
        use_zarr3=False,
        use_compression=False,
        ts_context=type_handlers.get_ts_context(use_ocdbt=False),
    )


def groups(requests: Sequence[ReadRequest]) -> list[list[ReadRequest]]:
    """Group consecutive arrays so that each group has about `GROUP_BYTES` on this host.

    orbax's own limit, `restore_concurrent_gb`, refuses an array that is larger.
    """
    groups: list[list[ReadRequest]] = []
    size = 0
    for one in requests:
        local = one.sharding.shard_shape(one.shape) if isinstance(one.sharding, NamedSharding) else one.shape
        bound = math.prod(local) * 8 * len(one.sharding.addressable_devices)
        if not groups or size + bound > GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += bound
    return groups


def is_key(x: Any) -> bool:
    """Return whether an array, or a shape, holds PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def run(coroutine: Coroutine) -> Any:
    """Run a coroutine to its end in another thread: the caller may be within an event loop, as notebooks are."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, quietly(coroutine)).result()


async def quietly(coroutine: Coroutine) -> Any:
    """Return a coroutine that raises its first error only: other arrays that fail with it are not printed."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    return await coroutine
