"""Arrays on disk, through orbax: one folder a leaf, one file a shard, each process its own shards.

The folder is an ordinary orbax checkpoint (zarr, without OCDBT, so that a file belongs to one
leaf); stock orbax reads it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

# Shards of replicated arrays are written by several hosts in turn only where it pays: each slice is compiled for.
LEAST_SLICE_BYTES = 16 << 20
# Arrays are read in groups of about so many bytes, which bounds the memory of the host.
GROUP_BYTES = 2 << 30


class Wanted(NamedTuple):
    """An array to read.

    Attributes:
        folder: Its folder within the checkpoint's arrays.
        shape: The shape to read it in: what lies beyond is dropped, what lacks is zero.
        dtype: Its type.
        sharding: Where it goes.
        key: The implementation of a PRNG key; None for other arrays.
    """

    folder: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    key: str | None = None


class Far(NamedTuple):
    """An array that waits outside the devices' memory.

    Attributes:
        folder: Where it is written.
        load: Brings it onto the devices.
        at_once: Whether to have it written before the next one is loaded: the host may not hold all.
    """

    folder: str
    load: Callable[[], jax.Array]
    at_once: bool


def write(directory: Path, arrays: dict[str, jax.Array], far: Sequence[Far] = ()) -> Callable[[], None]:
    """Begin to write arrays into a folder that is there and empty.

    What is written is what the arrays hold now: they are copied to the host before this
    returns (on CPU their buffers are held, which keeps later donations from reusing them).

    Args:
        directory: The same on all processes.
        arrays: By folder; no PRNG keys, and none without elements.
        far: More arrays, brought onto the devices one by one.

    Returns:
        `finish()`, which waits until this process' part is on the disk.
    """
    import orbax.checkpoint as ocp
    from etils import epath

    handler = orbax_handler()
    target = epath.Path(directory)
    pending: list[Any] = list(run(handler.async_save(target, args=ocp.args.PyTreeSave(dict(arrays)))) or ())
    try:
        for one in far:
            writing = run(orbax_arrays().serialize([one.load()], [param_info(directory, one.folder)], [ocp.SaveArgs()]))
            if one.at_once:
                wait_for(writing)
            else:
                pending += writing
    except BaseException:
        with contextlib.suppress(Exception):  # the caller will remove the folder: nothing may be writing there
            wait_for(pending)
        raise

    def finish() -> None:
        wait_for(pending)
        if far and jax.process_index() == 0:
            list_too(directory, [one.folder for one in far])

    return finish


def wait_for(futures: Sequence[Any]) -> None:
    """Wait until everything is on the disk."""
    for future in futures:
        future.result()


def list_too(directory: Path, folders: Sequence[str]) -> None:
    """Enter folders that were written by themselves into orbax's list of what there is."""
    path = directory / "_METADATA"
    listed = json.loads(path.read_text())
    (*_, like) = listed["tree_metadata"].values()
    for folder in folders:
        keys = [{**like["key_metadata"][0], "key": folder}]
        listed["tree_metadata"][str((folder,))] = {**like, "key_metadata": keys}
    path.write_text(json.dumps(listed))


def param_info(directory: Path, folder: str) -> Any:
    """How orbax finds an array."""
    from etils import epath
    from orbax.checkpoint import type_handlers

    return type_handlers.ParamInfo(
        name=folder,
        parent_dir=epath.Path(directory),
        is_ocdbt_checkpoint=False,
        use_zarr3=False,
        use_compression=False,
        ts_context=type_handlers.get_ts_context(use_ocdbt=False),
    )


def read(directory: Path, wanted: Sequence[Wanted]) -> list[Any]:
    """Read arrays straight into their shardings.

    Args:
        directory: Written by `write`.
        wanted: What to read, and how.

    Returns:
        One array each.
    """
    import orbax.checkpoint as ocp

    reader = orbax_arrays()

    def how(one: Wanted):
        return ocp.ArrayRestoreArgs(sharding=one.sharding, global_shape=one.shape, strict=False)

    found: list[Any] = []
    for group in groups(wanted):
        found += run(
            reader.deserialize([param_info(directory, one.folder) for one in group], [how(one) for one in group])
        )
    return [
        x if one.key is None else jax.device_put(jax.random.wrap_key_data(x, impl=one.key), one.sharding)
        for x, one in zip(found, wanted, strict=True)
    ]


def read_whole(directory: Path, folder: str, shape: tuple[int, ...]) -> np.ndarray:
    """One array as the host has it; `shape` as for `Wanted`."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return np.asarray(read(directory, [Wanted(folder, shape, None, here)])[0])


def zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.Array:
    """An array of zeros, each device making its own part."""

    def part(index):
        return np.zeros([len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)], dtype)

    return jax.make_array_from_callback(shape, sharding, part)


def groups(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """Consecutive arrays, each group of about `GROUP_BYTES` on this host."""
    made: list[list[Wanted]] = []
    size = 0
    for one in wanted:
        local = one.sharding.shard_shape(one.shape) if isinstance(one.sharding, NamedSharding) else one.shape
        most = math.prod(local) * 8 * len(one.sharding.addressable_devices)
        if not made or size + most > GROUP_BYTES:
            made.append([])
            size = 0
        made[-1].append(one)
        size += most
    return made


def raw(x: Any) -> Any:
    """A PRNG key as the integers it consists of; any other array as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def is_key(x: Any) -> bool:
    """Whether an array, or a shape, is of PRNG keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def orbax_arrays():
    """The handler of arrays that orbax has; hosts share the writing of what several of them hold."""
    from orbax.checkpoint import type_handlers

    return type_handlers.ArrayHandler(
        use_replica_parallel=jax.process_count() > 1,
        min_slice_bytes_for_replica_parallel=LEAST_SLICE_BYTES,
        enable_write_sharding_file=False,
    )


def orbax_handler():
    """The handler of trees that orbax has, writing a folder a leaf, uncompressed."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    registry = type_handlers.create_type_handler_registry((jax.Array, orbax_arrays()))
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)


def run(coroutine: Coroutine) -> Any:
    """Run a coroutine to its end, in a thread of its own: the caller may be within an event loop, as notebooks are."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
