"""Chunks of optimizer state on disk: read ahead and written behind, in a fixed amount of memory.

.lock                     locked by the process that uses the folder
chunk_00000.safetensors   a complete chunk: the state of one step
spare_0.tmp               the next state of a chunk, being written; or a file to reuse for one

A folder belongs to one process. A chunk's file is replaced by renaming once its next state is on the disk, so
whenever a run dies, each chunk is of the old step or of the new one, and its header says which. The file that was
replaced is overwritten for another chunk. The chunks are a state only if all are of one step. Nothing repairs them
otherwise: the run restores its checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from zerojax.offload import buffers, chunks, folder
from zerojax.offload.chunks import ChunkSpec, DiskError, DiskStateError, Label


class Lease:
    """A chunk that was read, in a buffer that is lent until `release`.

    A context manager: leaving the block releases it.
    """

    def __init__(self, arrays: tuple[np.ndarray, ...], pool: buffers.Pool, buffer: memoryview):
        self._arrays, self._pool, self._buffer = arrays, pool, buffer

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The chunk's arrays, to be read or changed in place; after `release` another chunk overwrites them.

        Raises:
            ValueError: If the lease was released.
        """
        if self._buffer is None:
            raise ValueError("This lease was released, its arrays are gone. Use them before, or copy them.")
        return self._arrays

    def release(self) -> None:
        """Give the buffer back; a second time does nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._arrays = ()
            self._pool.give(buffer)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclasses.dataclass(frozen=True)
class DiskState:
    """A complete state on the disk.

    Attributes:
        owner: Fingerprint of the layout of the run that wrote it.
        step: The step that all chunks are of.
        chunks: Their arrays, in order.
    """

    owner: str
    step: int
    chunks: tuple[ChunkSpec, ...]


class DiskStore:
    """Chunks of optimizer state in a folder, for one process and one thread of it.

    Made by `create`. A context manager: leaving the block closes it.

    Attributes:
        path: The folder.
        direct: Whether files are read and written past the page cache.
        buffer_bytes: Memory of all buffers together, however many chunks there are.
    """

    def __init__(self, path: Path, labels: Sequence[Label], lock: int, *, direct: bool, counts: tuple[int, int, int]):
        self.path, self.direct = path, direct
        self._labels, self._lock = tuple(labels), lock
        self._sizes = tuple(label.file_bytes for label in labels)
        largest = max(self._sizes)
        read_buffers, write_buffers, threads = counts
        self._reading, self._writing = buffers.Pool(read_buffers, largest), buffers.Pool(write_buffers, largest)
        self.buffer_bytes = self._reading.bytes + self._writing.bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="zerojax-disk")
        self._spares = folder.Spares(path)
        self._writes: dict[int, Future[None]] = {}  # the last of each chunk, until it is done
        self._closed = False

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        specs: Sequence[ChunkSpec],
        *,
        owner: str,
        keep: bool = False,
        direct: bool = True,
        read_buffers: int = 4,
        write_buffers: int = 4,
        threads: int = 4,
    ) -> DiskStore:
        """Lock a folder, made if it is missing, and remove what an earlier run left in it.

        Args:
            path: The folder, of this process alone; its parent must exist.
            specs: The chunks, in the order of their indices; at least one.
            owner: Fingerprint of the run's layout, with the index of the process.
            keep: Leave the earlier run's chunks, so that this run continues with them; only
                unfinished files are removed.
            direct: Read and write past the page cache where the filesystem can.
            read_buffers: Chunks that can be read ahead or held as leases; a buffer has the
                size of the largest chunk.
            write_buffers: Chunks that can be waiting to be written.
            threads: Reads and writes at a time.

        Raises:
            ValueError: If there are no chunks, or a count is below 1.
            DiskError: If the folder cannot be used: it or its parent is missing or read-only,
                it has files of others, another process uses it, or the disk is too small.
                Nothing was removed then.
        """
        if not specs:
            raise ValueError("A disk store got no chunks. Give at least one.")
        if min(read_buffers, write_buffers, threads) < 1:
            raise ValueError(
                f"A disk store got {read_buffers} read buffers, {write_buffers} write buffers and {threads} threads. "
                "Give at least one of each."
            )
        place = Path(path)
        labels = [Label(owner, i, len(specs), 0, spec) for i, spec in enumerate(specs)]
        try:
            with contextlib.suppress(FileExistsError):
                place.mkdir()
            folder.leftovers(place)  # refuses files of others, before the lock is made by which a folder is ours
            lock = folder.lock(place)
            try:
                left = folder.leftovers(place)
                folder.check_space(place, [label.file_bytes for label in labels], write_buffers, left)
                direct = direct and buffers.supports_direct(place / folder.PROBE)
                for file in left:
                    if not keep or file.suffix != folder.SUFFIX:
                        file.unlink(missing_ok=True)
                return cls(place, labels, lock, direct=direct, counts=(read_buffers, write_buffers, threads))
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise unusable(place, error) from error

    def read(self, index: int, *, step: int) -> Future[Lease]:
        """Begin to read a chunk, after the writes to it that were begun before.

        Reads begin in the order they are asked for, each when a buffer is free. While as many
        leases are held as there are read buffers, further reads block until one is released.

        Args:
            index: Which chunk; its next state is to be written only when this is done.
            step: The step its state must be of.

        Returns:
            The chunk, once it is read and checked; else a `DiskStateError`.

        Raises:
            DiskError: If a write failed since the last call.
            ValueError: If there is no such chunk or step, or the store is closed.
        """
        label = self._label(index, step)
        before, future = self._writes.get(index), Future()

        def start(ticket: Future[memoryview]) -> None:
            if ticket.cancelled():
                future.cancel()
                future.set_running_or_notify_cancel()
            else:
                self._threads.submit(self._fetch, label, ticket.result(), before, future)

        self._reading.request().add_done_callback(start)
        return future

    def write(self, index: int, arrays: Sequence[np.ndarray], *, step: int) -> Future[None]:
        """Copy a chunk's new state to a buffer, blocking until one is free, and begin to write it.

        Args:
            index: Which chunk.
            arrays: Its arrays, as its spec says; they may be overwritten once this returns.
            step: The step they are the state of.

        Returns:
            Done when the new state is on the disk. The store's next call raises what fails, too.

        Raises:
            DiskError: If a write failed since the last call.
            ValueError: If there is no such chunk or step, the arrays are others, or the store is closed.
        """
        label = self._label(index, step)
        buffer = self._writing.request().result()
        try:
            chunks.pack(label, arrays, buffer[: self._sizes[index]])
        except BaseException:
            self._writing.give(buffer)
            raise
        self._writes[index] = self._threads.submit(self._put, label, buffer, self._writes.get(index))
        return self._writes[index]

    def flush(self) -> None:
        """Block until all that was written so far is on the disk, and survives a power failure.

        Raises:
            DiskError: If a write failed since the last call.
        """
        wait(self._writes.values())
        self._raise_failures()
        try:
            folder.sync(self.path)
        except OSError as error:
            raise DiskError(f"What was written to {self.path} may not be on the disk: {error.strerror}.") from error

    def close(self) -> None:
        """Flush and unlock the folder; reads that did not begin are cancelled. A second time does nothing.

        Raises:
            DiskError: If a write failed since the last call.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.flush()
        finally:
            self._reading.cancel_requests()
            self._threads.shutdown()
            os.close(self._lock)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # what ended the block matters more than a write that failed
        with contextlib.suppress(DiskError) if kind else contextlib.nullcontext():
            self.close()

    def _label(self, index: int, step: int) -> Label:
        if self._closed:
            raise ValueError(f"The disk store in {self.path} is closed. Create it anew.")
        if not 0 <= index < len(self._labels):
            raise ValueError(f"There is no chunk {index} in {self.path}. Give one of 0 to {len(self._labels) - 1}.")
        if not 0 <= step < chunks.STEPS:
            raise ValueError(f"The disk store got step {step}. Give one of 0 to {chunks.STEPS - 1}.")
        self._raise_failures()
        return dataclasses.replace(self._labels[index], step=step)

    def _raise_failures(self) -> None:
        for index, write in list(self._writes.items()):
            if write.done():
                del self._writes[index]
                write.result()

    def _fetch(self, label: Label, buffer: memoryview, before: Future[None] | None, future: Future[Lease]) -> None:
        """Run by a thread. The write it waits for was submitted before, so a thread has it: no deadlock."""
        if not future.set_running_or_notify_cancel():
            self._reading.give(buffer)
            return
        try:
            wait([before] if before else [])
            future.set_result(Lease(self._read_now(label, buffer), self._reading, buffer))
        except BaseException as error:
            self._reading.give(buffer)
            future.set_exception(error)

    def _read_now(self, label: Label, buffer: memoryview) -> tuple[np.ndarray, ...]:
        path, header = folder.file_of(self.path, label.index), label.header
        content = buffer[: self._sizes[label.index]]
        try:
            complete = buffers.read_file(path, content, direct=self.direct) and chunks.unseal(content)
        except OSError as error:
            raise DiskStateError(path, f"cannot be read: {error.strerror}", f"a state of step {label.step}") from error
        if complete and content[: len(header)] == header:
            return label.spec.views(content[len(header) :])
        chunks.require(path, chunks.identify(path), label)
        raise DiskStateError(path, "reads differently each time", "one content")

    def _put(self, label: Label, buffer: memoryview, before: Future[None] | None) -> None:
        """Run by a thread; as `_fetch` it waits only for what was submitted before, and fails if that did."""
        path, size = folder.file_of(self.path, label.index), self._sizes[label.index]
        try:
            if before:
                before.result()
            chunks.seal(buffer[:size])
            self._spares.write(path, buffer[:size], direct=self.direct)
        except OSError as error:
            free: int | str = "an unknown number"
            with contextlib.suppress(OSError):  # the disk may be gone
                free = folder.free_bytes(self.path)
            raise DiskError(
                f"Writing chunk {label.index} ({label.spec.name!r}) of step {label.step} to {path} failed: "
                f"{error.strerror}. It needs {size} bytes, and {free} are free; the chunk's older file is unchanged. "
                f"Make room or mend the disk, then write the chunk again, or restore the run from its last checkpoint."
            ) from error
        finally:
            self._writing.give(buffer)


def unusable(path: Path, error: OSError) -> DiskError:
    """The error for a folder that cannot be made or written to."""
    return DiskError(
        f"State cannot be offloaded to {path}: {error.strerror}. Give a folder that this process can write to, in "
        f"one that exists."
    )


def inspect(path: str | os.PathLike[str]) -> DiskState:
    """The state in a folder, if it is complete: every chunk undamaged, and all of one run and step.

    Every byte is read. A folder in use is read as it is at the moment.

    Raises:
        DiskStateError: If it is not complete, naming the file.
    """
    place = Path(path)
    files = sorted(place.glob("chunk_*.safetensors"))
    if not files:
        raise DiskStateError(place, "has no chunks", "a folder of offloaded state")
    first = chunks.identify(files[0])
    wanted = [folder.file_of(place, i) for i in range(first.count)]
    if extra := [file for file in files if file not in wanted]:
        raise DiskStateError(extra[0], "is one too many", f"{first.count} chunks, as {files[0].name} says")
    with ThreadPoolExecutor(4) as threads:
        labels = list(threads.map(chunks.identify, wanted))
    for i, (file, label) in enumerate(zip(wanted, labels, strict=True)):
        chunks.require(file, label, dataclasses.replace(first, index=i, spec=label.spec))
    return DiskState(first.owner, first.step, tuple(label.spec for label in labels))
