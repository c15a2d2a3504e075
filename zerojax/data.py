"""Read batches of rows, and place the batches of any loader on the mesh, ahead of the steps that use them."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.config import check_count, check_word
from zerojax.config.data_mesh import in_words
from zerojax.train.batch import NO_NUMBERS, batch_shardings, check_batch
from zerojax.zero import ZeroTransformation

__all__ = ["RowBatches", "ShardedBatches", "shard_batches"]


def __dir__() -> list[str]:
    """Return the names of the public objects of this module."""
    return sorted([*__all__, "__doc__", "__name__", "__file__"])


class Rows(Protocol):
    """A data set with random access, such as a list, a data set of torch, or a `MapDataset` of grain."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one row, as a tree of arrays or numbers."""
        ...


class RowBatches:
    """An endless iterator over batches of a data set, whose position does not depend on the number of processes.

    The position is one count of rows, the same on all processes. A run that is restored on another number of processes
    goes on with the next rows: in each epoch, each row is in one batch. A batch that reaches the end of an epoch is
    filled from the next epoch, so no row is left out.

    Give it to `shard_batches(..., rows="process")`, and the result to `Checkpointer.save(state, data=...)`. Of a
    pipeline of grain that ends with a `MapDataset`, leave out `repeat`, `batch` and the slice of a process. If reading
    rows takes long, use `grain.experimental.ElasticIterator` instead, which reads in threads or processes.

    Examples:
        >>> batches = shard_batches(RowBatches(rows, 512, seed=0), tx, rows="process")
    """

    def __init__(self, source: Rows, batch: int, *, seed: int | None = None, part: tuple[int, int] | None = None):
        """Begin with the first row of the first epoch.

        Args:
            source: The data set. All processes have the same one. Only the rows of this process's part are read.
            batch: Rows of the global batch. It may change when a run is restored.
            seed: Shuffle the rows of each epoch. An epoch's order depends only on the seed and the epoch, and takes 8
                bytes of host memory per row. None: every epoch has the order of the data set.
            part: The index of this process's part of each batch, and the number of parts. Default: one per process.

        Raises:
            TypeError: If `batch` is not an integer.
            ValueError: If the data set is empty, or the parts do not divide the batch.
        """
        check_count("batch", batch, "rows of the global batch", least=1)
        self._index, self._parts = (jax.process_index(), jax.process_count()) if part is None else part
        if batch % self._parts:
            raise ValueError(
                f"RowBatches gives each of {self._parts} processes an equal part of a batch, and a batch has {batch} "
                f"rows. Use a batch that the number of processes divides."
            )
        if not len(source):
            raise ValueError("RowBatches has no rows to read: len(source) is 0.")
        self._source, self._batch, self._seed, self._row = source, batch, seed, 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        """Return the number of complete epochs."""
        return self._row // len(self._source)

    def __iter__(self) -> RowBatches:
        """Return the object itself."""
        return self

    def __next__(self) -> Any:
        """Return this process's rows of the next batch, stacked along a new dim 0."""
        length = self._batch // self._parts
        first = self._row + self._index * length
        rows = [self._at(self._index_of(n)) for n in range(first, first + length)]
        self._row += self._batch
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *rows)

    def _at(self, index: int) -> Any:
        if (row := self._source[index]) is None:
            raise ValueError(
                f"Row {index} of the data set is None, so it has no numbers. A filter of grain's MapDataset does this. "
                f"Leave such rows out before RowBatches counts them, such as in a list of the indices to keep."
            )
        return row

    def _index_of(self, n: int) -> int:
        """Return the index in the data set of row `n`, counted from the beginning of the run."""
        epoch, position = divmod(n, len(self._source))
        if self._seed is None:
            return position
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._source))
        return int(self._order[1][position])

    def get_state(self) -> dict[str, Any]:
        """Return the position. It is the same on all processes."""
        return {"row": self._row, "rows": len(self._source), "seed": self._seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the position that `get_state` returned, also from another number of processes or another batch.

        Raises:
            ValueError: If the data set has another number of rows, or the seed differs. Then rows would be repeated or
                left out. Or if the state belongs to another loader.
        """
        if not isinstance(state, dict):
            raise ValueError(
                f"The position is {state!r}, and not one of RowBatches, which is a dict. Give the state that get_state "
                f"returned, or restore without data=."
            )
        for name, now in (("rows", len(self._source)), ("seed", self._seed)):
            if state.get(name) != now:
                raise ValueError(
                    f"The position belongs to a data set with {name}={state.get(name)}, and this one has {name}={now}, "
                    f"so some rows would be repeated and others left out. Use the same data set and seed."
                )
        self._row = state["row"]


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
        that was returned last, and `set_state` restores it. Give it to `Checkpointer.save(state, data=...)`. If each
        process reads its own rows, the state belongs to this number of processes, except for these loaders:
        `RowBatches`; grain's `ElasticIterator`; and grain's `DataLoader` with a sampler of all rows
        (`IndexSampler(..., shard_options=NoSharding())`, and `shard_options=ShardByJaxProcess()` for the loader). Its
        position is a count of rows if all worker processes have read equally many batches.

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
        if not self._placement.of_process:
            return self._position
        index, count = jax.process_index(), jax.process_count()
        part = {"process": index, "of": count, "state": self._position}
        return common_position(self._source, self._position, index, count) or part

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
                f"zerojax.data.RowBatches or grain.experimental.ElasticIterator, whose positions do not depend on them."
            )
        else:
            state = own_position(state, *((index, count) if self._placement.of_process else (0, 1)))
        self._source.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
        self._ahead.clear()
        self._error = None
        self._position = state

    def _source_position(self) -> Any:
        get_state = getattr(self._source, "get_state", None)
        return None if get_state is None else get_state()


PART = {"process", "of", "state"}  # keys of a position that makes sense only on its process
SEEN, LAST, WORKERS = "last_seen_indices", "last_worker_index", "worker_count"  # of grain's DataLoader


def common_position(source: Any, position: Any, index: int, count: int) -> Any:
    """Return a position that any number of processes can restore, or None if `position` makes sense only here.

    The processes of grain's `DataLoader` take turns at the rows of a sampler, and so do the workers of a process. If
    all have read equally many rows, one count describes what has been read.
    """
    if isinstance(source, RowBatches):
        return position
    if isinstance(position, dict) and position.keys() == {"global_next_index"}:  # grain's ElasticIterator
        return position
    found = json.loads(position) if isinstance(position, bytes) and SEEN.encode() in position else {}
    if not isinstance(found, dict) or not found.keys() >= {SEEN, LAST, WORKERS}:
        return None
    firsts = firsts_of(found, index, count)
    rows = {found[SEEN][str(worker)] - first + len(firsts) * count for worker, first in enumerate(firsts)}
    is_turn = found[LAST] in (-1, len(firsts) - 1)  # worker 0 is the next one
    if len(rows) > 1 or not is_turn or min(rows) % (len(firsts) * count):
        return None
    return {"row": rows.pop(), "grain": {key: x for key, x in found.items() if key not in (SEEN, LAST)}}


def own_position(state: Any, index: int, count: int) -> Any:
    """Return the position of this process that `common_position` described."""
    if not (isinstance(state, dict) and state.keys() == {"row", "grain"}):
        return state
    firsts = firsts_of(state["grain"], index, count)
    if state["row"] % (len(firsts) * count):
        raise ValueError(
            f"Grain's DataLoader cannot go on after {state['row']} rows on {count} processes with {len(firsts)} "
            f"workers: each of these {len(firsts) * count} must have read equally many. Use another number of "
            f"processes, or read with grain.experimental.ElasticIterator or zerojax.data.RowBatches."
        )
    seen = {str(worker): state["row"] + first - len(firsts) * count for worker, first in enumerate(firsts)}
    return json.dumps({**state["grain"], SEEN: seen, LAST: -1}).encode()


def firsts_of(found: dict[str, Any], index: int, count: int) -> list[int]:
    """Return the first row of each worker of a process, for a position of grain's `DataLoader`."""
    return [index + worker * count for worker in range(max(1, found[WORKERS]))]


class Placement:
    """Turns batches of this process into arrays on the mesh. The first batch decides how many rows a batch has."""

    def __init__(self, tx: ZeroTransformation, of_process: bool, pads: bool, accumulate: int):
        """Keep the options of `shard_batches`."""
        self._config, self._pads, self._accumulate, self.of_process = tx.config, pads, accumulate, of_process
        self.processes = jax.process_count() if of_process else 1
        if self.processes > 1:
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
            parts = self._config.data.workers * self._accumulate // self.processes
            self._rows = -(-rows // parts) * parts if self._pads else rows
        if rows < self._rows and not self._pads:
            return None
        if self._pads:
            if rows > self._rows:
                raise ValueError(
                    f"A batch has {rows} rows, and the first one, padded, has {self._rows}. Give the largest first."
                )
            arrays = padded(arrays, rows, self._rows)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(x) * self.processes, *x.shape[1:]), x.dtype), arrays)
        check_batch(shapes, self._config.data, self._accumulate)
        return jax.tree.map(self._put, arrays, batch_shardings(self._config, self._config.user_mesh, shapes))

    def _put(self, x: Any, sharding: NamedSharding) -> jax.Array:
        if self.processes > 1:
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
