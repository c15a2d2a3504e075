"""Place the batches of any loader on the mesh, ahead of the steps that use them."""

import collections
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.config import check_count, check_word
from zerojax.config.data_mesh import in_words
from zerojax.train.arguments import batch_shardings, place_leaf
from zerojax.train.checked import NO_NUMBERS, check_batch
from zerojax.zero import ZeroTransformation

__all__ = ["ShardedBatches", "shard_batches"]


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__file__"])


def shard_batches(
    batches: Iterable,
    tx: ZeroTransformation,
    *,
    prefetch: int = 2,
    rows: Literal["global", "process"] | None = None,
    remainder: Literal["drop", "pad"] = "drop",
    accumulate: int = 1,
) -> "ShardedBatches":
    """Place each batch of a loader on the mesh before its step, divided over the devices as `tx` requires.

    Args:
        batches: Trees whose leaves have `__array__` or DLPack, such as arrays of NumPy, grain, tf.data or torch. Each
            batch is copied, so the loader may write the next one into the same memory.
        tx: The result of `zero_shard`.
        prefetch: How many batches are placed in advance, after the batch that is returned.
        rows: Which rows this process's loader returns in each batch. `"global"`: all rows, the same on every process.
            `"process"`: the rows of this process's devices, in device order. All processes give equally many rows.
            None is allowed only if there is one process.
        remainder: What to do with a batch that has fewer rows than the first batch, as at the end of an epoch.
            `"drop"` warns, and skips the batch, if devices and microbatches do not divide it. `"pad"` repeats its
            last row, and makes every batch a pair `(batch, weight)` for a loss with `weighted=True`: the weight is 1.0
            for a row, and 0.0 for padding.
        accumulate: Microbatches per step.

    Returns:
        An iterator of trees of arrays. Its `get_state` returns the state that the loader's iterator had after the batch
        that was returned last, and `set_state` restores it. Pass the iterator to `Checkpointer.save(state, data=...)`.
        With `rows="process"`, `set_state` needs equally many processes, except for grain's `ElasticIterator`.

    Raises:
        TypeError: If a count is not an integer. When iterating, if a leaf of a batch is not an array.
        ValueError: If an option is unknown or `rows` is missing. When iterating, if a batch cannot be divided or has
            more rows than the padded first batch, or with `rows="global"` if the first batch differs by process.
    """
    if not isinstance(tx, ZeroTransformation):
        raise TypeError(f"shard_batches places batches as the step of tx takes them: give tx, not {type(tx).__name__}.")
    check_count("prefetch", prefetch, "batches", least=0)
    check_count("accumulate", accumulate, "microbatches", least=1)
    if rows is None and jax.process_count() > 1:
        raise ValueError(
            f"There are {jax.process_count()} processes, and shard_batches cannot tell whose rows a batch has. Give "
            f'rows="process" if each process reads its own rows, or rows="global" if every process reads all of them.'
        )
    check_word("rows", rows, (None, "global", "process"))
    check_word("remainder", remainder, ("drop", "pad"))
    return ShardedBatches(iter(batches), Placement(tx, rows == "process", remainder == "pad", accumulate), prefetch)


class ShardedBatches:
    """An iterator over the batches of a loader, placed on the mesh. `shard_batches` makes this iterator."""

    def __init__(self, source: Iterator, placement: "Placement", prefetch: int):
        self._source, self._placement, self._prefetch = source, placement, prefetch
        self._ahead: collections.deque[tuple[Any, Any]] = collections.deque()
        self._position = self._source_position()
        self._error: Exception | None = None

    def __iter__(self) -> "ShardedBatches":
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
        if not self._placement.of_process:
            return self._position
        if isinstance(self._position, dict) and self._position.keys() == ELASTIC:
            return self._position
        return {"process": jax.process_index(), "of": jax.process_count(), "state": self._position}

    def set_state(self, state: Any) -> None:
        """Restore the position that the iterator had when `get_state` returned this state.

        Raises:
            ValueError: If the state belongs to another process, or to another number of processes.
        """
        index, count = jax.process_index(), jax.process_count()
        of_part = isinstance(state, dict) and state.keys() == PART
        if of_part and (self._placement.of_process, state["process"], state["of"]) == (True, index, count):
            state = state["state"]
        elif of_part:
            raise ValueError(
                f"The position belongs to process {state['process']} of {state['of']}, and this is process {index} of "
                f"{count}, which reads other rows. Restore on as many processes, or read with "
                f"grain.experimental.ElasticIterator, whose positions do not depend on them."
            )
        self._source.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
        self._ahead.clear()
        self._error = None
        self._position = state

    def _source_position(self) -> Any:
        get_state = getattr(self._source, "get_state", None)
        return None if get_state is None else get_state()


PART = {"process", "of", "state"}  # keys of the position of one process, which no other process can restore
ELASTIC = {"global_next_index"}  # keys of the position of grain's ElasticIterator, which is equal on all processes


class Placement:
    """Turns batches of this process into arrays on the mesh. The first batch decides how many rows a batch has."""

    def __init__(self, tx: ZeroTransformation, of_process: bool, pads: bool, accumulate: int):
        self._config, self._pads, self._accumulate, self.of_process = tx.config, pads, accumulate, of_process
        self.processes = jax.process_count() if of_process else 1
        if self.processes > 1:
            check_rows_of_processes(tx.config.user_mesh, tx.config.axis)
        self._rows, self._lost = None, 0

    def place(self, batch: Any) -> Any:
        """Return a batch on the mesh, padded and with weights if `remainder="pad"`. Return None for a dropped batch."""
        arrays = jax.tree_util.tree_map_with_path(as_array, batch)
        if not jax.tree.leaves(arrays):
            raise ValueError(f"A batch has no arrays in it: the loader gave {batch!r:.100}. A step needs rows.")
        lengths = {x.shape[:1] for x in jax.tree.leaves(arrays)}
        if len(lengths) != 1 or () in lengths:
            check_batch(arrays, self._config.data)  # raises
        ((rows, *_),) = lengths
        parts, is_first = self._config.data.workers * self._accumulate // self.processes, self._rows is None
        if self._rows is None:
            self._rows = -(-rows // parts) * parts if self._pads else rows
        if rows < self._rows and (not rows or rows % parts) and not self._pads:
            self._lost += rows
            if rows:
                lost = (
                    f"a batch of {rows} rows, which {parts} devices times microbatches do not divide: {self._lost} rows"
                )
                warnings.warn(f'shard_batches dropped {lost} so far. Give remainder="pad" to use them.', stacklevel=3)
            return None
        if self._pads:
            if rows > self._rows:
                raise ValueError(
                    f"A batch has {rows} rows, and the first one, padded, has {self._rows}. Give the largest first."
                )
            arrays = padded(arrays, rows, self._rows)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) * self.processes, *x.shape[1:]), x.dtype), arrays)
        check_batch(shapes, self._config.data, self._accumulate)
        compares = is_first and self.processes == 1  # `place_leaf` compares the batches of the processes
        put = place_leaf if compares else self._put
        return jax.tree.map(put, arrays, batch_shardings(self._config, self._config.user_mesh, shapes))

    def _put(self, x: Any, sharding: NamedSharding) -> jax.Array:
        if self.processes > 1:
            return jax.make_array_from_process_local_data(sharding, np.array(x))
        if isinstance(x, jax.Array) or jax.process_count() == 1:
            return place_leaf(x, sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.array(x[index]))


def check_rows_of_processes(mesh: Mesh, axis: tuple[str, ...]) -> None:
    """Raise an error if devices of several processes need the same rows, because each process gives different rows."""
    others = tuple(name for name in mesh.axis_names if name not in axis)
    dims = [mesh.axis_names.index(name) for name in (*axis, *others)]
    parts = mesh.devices.transpose(dims).reshape(math.prod(mesh.shape[name] for name in axis), -1)
    if any(len({device.process_index for device in part}) > 1 for part in parts):
        raise ValueError(
            f'rows="process" gives each process the rows of its devices, but devices along {in_words(others)} share '
            f'rows and belong to several processes. Give all of them the whole batch with rows="global", or a mesh '
            f"that keeps {in_words(others)} within a process."
        )


def padded(arrays: Any, rows: int, size: int) -> tuple[Any, np.ndarray]:
    """Pad a batch to `size` rows, and return `(batch, weights)`. The last row is repeated: zeros might give a NaN."""
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
    return jax.block_until_ready(jnp.array(jax.dlpack.from_dlpack(x), copy=True))  # DLPack shares `x`'s memory
