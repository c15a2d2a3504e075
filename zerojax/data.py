"""Place the batches of any loader on the mesh, ahead of the steps that use them."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.config import check_count, check_word
from zerojax.config.data_mesh import in_words
from zerojax.train.batch import NO_NUMBERS, batch_shardings, check_batch
from zerojax.zero import ZeroTransformation

__all__ = ["ShardedBatches", "shard_batches"]


def __dir__() -> list[str]:
    """Return the names of the public objects of this module."""
    return sorted([*__all__, "__doc__", "__name__", "__file__"])


def shard_batches(
    batches: Iterable,
    tx: ZeroTransformation,
    *,
    prefetch: int = 2,
    rows: Literal["global", "process"] = "global",
    remainder: Literal["drop", "pad"] = "drop",
    accumulate: int = 1,
) -> ShardedBatches:
    """Place each batch of a loader on the mesh before its step, divided over the devices as `tx` requires.

    Args:
        batches: Trees whose leaves have `__array__` or DLPack, such as arrays of NumPy, grain, tf.data or torch.
        tx: The result of `zero_shard`.
        prefetch: How many batches are placed in advance, after the batch that is returned.
        rows: Which rows each batch of this process's loader has. `"global"`: all rows, the same on every process.
            `"process"`: the rows of this process's devices, in device order. All processes give equally many rows.
        remainder: What to do with a batch that has fewer rows than the first batch, as at the end of an epoch.
            `"drop"` skips the batch. `"pad"` repeats its last row, and makes every batch a pair `(batch, weight)` for a
            loss with `weighted=True`: the weight is 1.0 for a row, and 0.0 for padding.
        accumulate: Microbatches per step.

    Returns:
        An iterator of trees of arrays. Its `get_state` returns the state that the loader's iterator had after the batch
        that was returned last, and `set_state` restores it. Give it to `Checkpointer.save(state, data=...)`.

    Raises:
        TypeError: If a count is not an integer. The iterator raises it if a leaf of a batch is not an array.
        ValueError: If an option is unknown. The iterator raises it if devices and microbatches do not divide the rows,
            if `batch_spec` does not divide the other dims, or if a batch to pad has more rows than the first batch.
    """
    if not isinstance(tx, ZeroTransformation):
        raise TypeError(f"shard_batches places batches as the step of tx takes them: give tx, not {type(tx).__name__}.")
    check_count("prefetch", prefetch, "batches", least=0)
    check_count("accumulate", accumulate, "microbatches", least=1)
    check_word("rows", rows, ("global", "process"))
    check_word("remainder", remainder, ("drop", "pad"))
    return ShardedBatches(iter(batches), Placement(tx, rows == "process", remainder == "pad", accumulate), prefetch)


class ShardedBatches:
    """An iterator over the batches of a loader, placed on the mesh. `shard_batches` makes this iterator."""

    def __init__(self, source: Iterator, placement: Placement, prefetch: int):
        """Wrap a loader's iterator. No batch is read yet."""
        self._source, self._placement, self._prefetch = source, placement, prefetch
        self._ahead: collections.deque[tuple[Any, Any]] = collections.deque()
        self._position = self._source_position()
        self._error: Exception | None = None

    def __iter__(self) -> ShardedBatches:
        """Return the object itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, and begin to place the batches that follow.

        Raises:
            Exception: The error of the loader, or of placing a batch. Earlier batches are returned first.
        """
        while len(self._ahead) <= self._prefetch and self._error is None:
            try:
                placed = self._placement.place(next(self._source))
                if placed is not None:
                    self._ahead.append((placed, self._source_position()))
            except Exception as error:
                self._error = error
        if not self._ahead and self._error is not None:
            error, self._error = self._error, None  # the next call tries to read the next batch
            raise error
        batch, self._position = self._ahead.popleft()
        return batch

    def get_state(self) -> Any:
        """Return the loader's state after the batch that was returned last, not after the batches placed ahead.

        Raises:
            TypeError: If the loader's iterator has no `get_state`.
        """
        if not hasattr(self._source, "get_state"):
            raise TypeError(
                f"A {type(self._source).__name__} has no get_state, so its position cannot be saved. Use an iterator "
                f"that has get_state, such as grain's, or save the number of batches that were read."
            )
        return self._position

    def set_state(self, state: Any) -> None:
        """Restore the position that the iterator had when `get_state` returned this state."""
        self._source.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
        self._ahead.clear()
        self._error = None
        self._position = state

    def _source_position(self) -> Any:
        get_state = getattr(self._source, "get_state", None)
        return None if get_state is None else get_state()


class Placement:
    """Turns batches of this process into arrays on the mesh. The first batch decides how many rows a batch has."""

    def __init__(self, tx: ZeroTransformation, of_process: bool, pads: bool, accumulate: int):
        """Keep the options of `shard_batches`."""
        self._config, self._pads, self._accumulate = tx.config, pads, accumulate
        self._processes = jax.process_count() if of_process else 1
        if self._processes > 1:
            check_rows_of_processes(tx.config.user_mesh, tx.config.axis)
        self._rows: int | None = None

    def place(self, batch: Any) -> Any:
        """Return a batch on the mesh, padded and with weights if `remainder="pad"`. Return None for a dropped batch."""
        arrays = jax.tree_util.tree_map_with_path(as_array, batch)
        if not jax.tree.leaves(arrays):
            raise ValueError(f"A batch has no arrays in it: the loader gave {batch!r:.100}. A step needs rows.")
        lengths = {x.shape[:1] for x in jax.tree.leaves(arrays)}
        if len(lengths) != 1 or () in lengths:
            check_batch(arrays, self._config.data)  # raises
        rows: int = next(iter(lengths))[0]
        if self._rows is None:
            parts = self._config.data.workers * self._accumulate // self._processes
            self._rows = -(-rows // parts) * parts if self._pads else rows
        if rows < self._rows and not self._pads:
            return None
        if self._pads:
            if rows > self._rows:
                raise ValueError(
                    f"A batch has {rows} rows, and the first one, padded, has {self._rows}. Give the largest first."
                )
            arrays = padded(arrays, rows, self._rows)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) * self._processes, *x.shape[1:]), x.dtype), arrays)
        check_batch(shapes, self._config.data, self._accumulate)
        return jax.tree.map(self._put, arrays, batch_shardings(self._config, self._config.user_mesh, shapes))

    def _put(self, x: Any, sharding: NamedSharding) -> jax.Array:
        if self._processes > 1:
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))
        if isinstance(x, jax.Array) or jax.process_count() == 1:
            return jax.device_put(x, sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def check_rows_of_processes(mesh: Mesh, axis: tuple[str, ...]) -> None:
    """Raise an error if devices of several processes need the same rows, because each process gives different rows."""
    others = tuple(name for name in mesh.axis_names if name not in axis)
    dims = [mesh.axis_names.index(name) for name in (*axis, *others)]
    parts = mesh.devices.transpose(dims).reshape(math.prod(mesh.shape[name] for name in axis), -1)
    if any(len({device.process_index for device in part}) > 1 for part in parts):
        raise ValueError(
            f'rows="process" gives each process the rows of its devices, but devices along {in_words(others)} share '
            f'rows and belong to several processes. Give every process the whole batch with rows="global", or build '
            f"the mesh so that {in_words(others)} stays within a process."
        )


def padded(arrays: Any, rows: int, size: int) -> tuple[Any, np.ndarray]:
    """Pad a batch to `size` rows, and return it with weights. Repeat the last row, because zeros might give a NaN."""
    repeat = lambda x: np.concatenate([x, np.repeat(x[-1:], size - rows, 0)]) if size > rows else x
    return jax.tree.map(repeat, arrays), (np.arange(size) < rows).astype(np.float32)


def as_array(path: tuple, x: Any) -> Any:
    """Return a leaf of a batch as a NumPy array, or as a JAX array if NumPy does not have its type."""
    if isinstance(x, jax.Array):
        return x
    try:
        array = np.asarray(x)
    except (TypeError, RuntimeError):  # torch raises these for bfloat16
        array = None
    if array is not None and array.dtype.kind not in NO_NUMBERS:
        return array
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
        found = f"has the type {x.dtype}" if isinstance(x, np.ndarray) else f"is a {type(x).__name__}"
        raise TypeError(
            f"batch{jax.tree_util.keystr(path)} {found}, of which JAX has no arrays. Leave it out of the batch, or "
            f"give numbers: arrays, or objects with DLPack."
        )
    return jax.dlpack.from_dlpack(x)
