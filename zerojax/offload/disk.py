"""Keep chunks of optimizer state on disk. Threads read and write the chunks in a fixed amount of memory.

The files are scratch files of one process. Each file has the bytes of one chunk, and is overwritten in place. Only this
process knows the version in a file, so no other process reads the files. The next run restores a checkpoint.

The arrays of a chunk are stored in an aligned buffer, and the buffer in a file, without the page cache if possible.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import math
import mmap
import os
import queue
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from zerojax.offload import folder
from zerojax.offload.folder import DiskError

BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """The arrays of a chunk, stored one after the other."""

    name: str  # the name of the chunk in error messages
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]  # the local shape and the dtype of each array

    @property
    def bytes(self) -> int:
        """Return the size of the chunk's file, rounded up to complete blocks, because direct I/O requires them."""
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)
        return max(1, -(-size // BLOCK)) * BLOCK

    def views(self, buffer: memoryview) -> tuple[np.ndarray, ...]:
        """Return the chunk's arrays as views of a buffer."""
        views, start = [], 0
        for shape, dtype in self.arrays:
            views.append(np.ndarray(shape, dtype, buffer, start))
            start += views[-1].nbytes
        return tuple(views)


def checksum(content: memoryview) -> int:
    """Add the words of each 512-byte sector, and return the CRC-32 of the sums.

    A CRC-32 of all bytes would be slower than a good disk. The checksum detects a changed word, a sector of zeros, and
    swapped sectors.
    """
    words = np.frombuffer(content, "<u8").reshape(-1, 64)
    return zlib.crc32(words.sum(axis=1, dtype="<u8"))


def aligned_buffer(size: int) -> memoryview:
    """Return memory that is aligned to a page, because direct I/O requires that."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Direct I/O pins each page separately. With small pages, writes reach only two thirds of the disk's speed.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Copy an array to aligned memory, which JAX's arrays on CPU share instead of copying it again."""
    copy = np.frombuffer(aligned_buffer(max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def supports_direct(probe: Path) -> bool:
    """Return whether the file `probe` can be written without the page cache. Remove the file afterwards."""
    try:
        transfer(probe, aligned_buffer(BLOCK), write=True, direct=True)
        return bool(_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)


def transfer(path: Path, content: memoryview, *, write: bool, direct: bool) -> int:
    """Write a buffer to a file, in place, or fill the buffer from the file. Return the number of bytes moved.

    With `direct`, the page cache is not used. Then the buffer must be aligned and consist of complete blocks.
    """
    flags, move = (os.O_WRONLY | os.O_CREAT, os.pwritev) if write else (os.O_RDONLY, os.preadv)
    handle = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | (_DIRECT if direct else 0), 0o644)
    try:
        done = 0
        while done < len(content) and (moved := move(handle, [content[done:]], done)):
            done += moved
        return done
    finally:
        os.close(handle)


class DiskStateError(DiskError):
    """A file does not have the required version of the state."""

    def __init__(self, path: Path, found: str, version: int):
        super().__init__(
            f"{path} {found}, and version {version} of the state is required (a count of its writes, not of steps). "
            f"Restore the run from its last checkpoint, which writes the offloaded state again."
        )


class Lease:
    """A chunk that was read into a lent buffer. Call `release`, or use a `with` block, to give the buffer back.

    Attributes:
        arrays: The chunk's arrays, which may be changed in place. Empty after `release`.
    """

    def __init__(self, arrays: tuple[np.ndarray, ...], give_back: Callable[[], None]):
        self.arrays, self._give_back = arrays, give_back

    def release(self, *_: object) -> None:
        """Give the buffer back. A second call does nothing."""
        give_back, self._give_back, self.arrays = self._give_back, lambda: None, ()
        give_back()

    def __enter__(self) -> Lease:
        return self

    __exit__ = release


def buffer_bytes(specs: Sequence[ChunkSpec], in_flight: int) -> int:
    """Return the size of all buffers of a store. Reads and writes use different buffers."""
    return 2 * in_flight * max(spec.bytes for spec in specs)


class DiskStore:
    """Keep chunks of optimizer state in a folder. Only one thread of one process may call the store.

    Operations on a chunk run in the order of the calls. If a write fails, the next call raises a `DiskError`, once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Sequence[ChunkSpec],
        *,
        in_flight: int = 4,
        threads: int = 4,
    ):
        """Make and lock a folder, and remove the files of an earlier run from it.

        Args:
            path: The folder, which no other process may use. Its parent must exist.
            specs: The chunks, in the order of their indices.
            in_flight: The number of chunks that can be read or lent at a time. The same number can wait to be written.
            threads: The number of reads and writes that run at a time.

        Raises:
            DiskError: If the folder cannot be used; see `folder.claim`. Then no file is removed.
        """
        self.path, self._specs = Path(path), tuple(specs)
        with folder.writable(self.path), contextlib.ExitStack() as on_error:
            self._lock = folder.claim(self.path, [spec.bytes for spec in specs])
            on_error.callback(self._lock.release)
            # Whether files are read and written without the page cache.
            self.direct = supports_direct(folder.chunk_file(self.path, 0))
            largest = max(spec.bytes for spec in specs)
            self._to_read, self._to_write = queue.SimpleQueue[memoryview](), queue.SimpleQueue[memoryview]()
            for free in [self._to_read, self._to_write] * in_flight:
                free.put(aligned_buffer(largest))
            on_error.pop_all()
        self.bytes_read = self.bytes_written = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="zerojax-disk")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="zerojax-disk-copy")
        self._begun: dict[int, list[Future]] = collections.defaultdict(list)  # reads and writes of each chunk
        self._copies: dict[int, list[Future]] = collections.defaultdict(list)
        self._writes: list[Future[None]] = []
        self._written: dict[int, tuple[int, int]] = {}  # version and checksum of each chunk

    def read(self, index: int, *, version: int) -> Future[Lease]:
        """Begin to read a chunk. The future raises a `DiskStateError` if the version or the checksum is wrong."""
        self._raise_failure()
        self.bytes_read += self._specs[index].bytes
        return self._begin(self._begun[index], self._read, index, version, self._to_read.get_nowait())

    def write(self, index: int, arrays: Sequence[np.ndarray], *, version: int) -> None:
        """Block until a buffer is free, copy a chunk's new state to the buffer, and begin to write the chunk."""
        self._raise_failure()
        spec = self._specs[index]
        assert [(x.shape, x.dtype) for x in arrays] == list(spec.arrays), spec.name
        # Wait here and not in a thread. Otherwise a few such writes would keep all threads from reading.
        wait(self._copies.pop(index, []))
        buffer = self._to_write.get()
        try:
            for array, view in zip(arrays, spec.views(buffer), strict=True):
                np.copyto(view, array)
            self._writes.append(self._begin(self._begun[index], self._write, index, version, buffer))
            self.bytes_written += spec.bytes
        except BaseException:
            self._to_write.put(buffer)
            raise

    def copy(self, index: int, put: Callable[[tuple[np.ndarray, ...]], None], *, version: int) -> Future[None]:
        """Begin to read a chunk and to pass its arrays to `put`, in a thread that makes all copies.

        A write of the chunk that begins later waits for the copy. So the copy has the chunk as it is at this call.
        Reads do not wait for copies. A copy has a buffer of its own, so that writes of other chunks do not wait for it.
        The future raises a `DiskStateError` if the version or the checksum is wrong, and any error
        of `put`.
        """
        self._raise_failure()
        self.bytes_read += self._specs[index].bytes
        writing = [begun for begun in self._begun[index] if not begun.done()]
        copying = self._copier.submit(self._copy, writing, index, version, put)
        self._copies[index] = [*(copy for copy in self._copies[index] if not copy.done()), copying]
        return copying

    def flush(self) -> None:
        """Block until all writes that were begun are in the files."""
        wait(self._writes)
        self._raise_failure()

    def close(self) -> None:
        """Finish all writes and copies, and unlock the folder.

        A second call, or a call in a forked process, does nothing.
        """
        if self._lock.held:
            with contextlib.ExitStack() as at_end:  # every callback runs, whatever the others raise
                at_end.callback(self._lock.release)
                at_end.callback(self._copier.shutdown)
                at_end.callback(self._threads.shutdown)
                self.flush()

    def _raise_failure(self) -> None:
        if not self._lock.held:
            raise ValueError(
                f"The disk store in {self.path} is closed, or it and its threads belong to the process that this one "
                f"was forked from. Use the store there, or create a new store."
            )
        done = [write for write in self._writes if write.done()]
        self._writes = [write for write in self._writes if not write.done()]
        for write in done:
            write.result()

    def _begin(self, before: Sequence[Future], work: Callable[..., Any], index: int, *args: Any) -> Future:
        """Let a thread run `work` after `before`, the earlier work on the chunk.

        The thread waits for the earlier work. The wait ends: earlier reads and writes have already begun, because the
        threads take work in the order of the calls, and copies run in another thread that does not wait for this work.
        """
        before = [begun for begun in before if not begun.done()]
        future = self._threads.submit(work, before, index, *args)
        self._begun[index] = [*before, future]
        return future

    def _read(self, before: list[Future], index: int, version: int, buffer: memoryview) -> Lease:
        wait(before)
        spec = self._specs[index]
        try:
            self._fill(index, version, buffer[: spec.bytes])
            return Lease(spec.views(buffer), functools.partial(self._to_read.put, buffer))
        except BaseException:
            self._to_read.put(buffer)
            raise

    def _copy(
        self, before: list[Future], index: int, version: int, put: Callable[[tuple[np.ndarray, ...]], None]
    ) -> None:
        wait(before)
        spec = self._specs[index]
        buffer = aligned_buffer(spec.bytes)
        self._fill(index, version, buffer)
        put(spec.views(buffer))

    def _fill(self, index: int, version: int, content: memoryview) -> None:
        path = folder.chunk_file(self.path, index)
        found, expected = self._written.get(index, (None, None))
        if found != version:
            raise DiskStateError(path, "was not written" if found is None else f"is of version {found}", version)
        try:
            size = transfer(path, content, write=False, direct=self.direct)
        except OSError as error:
            raise DiskStateError(path, f"cannot be read: {error.strerror}", version) from error
        if size < len(content):
            raise DiskStateError(path, f"is torn: it ends after {size} of {len(content)} bytes", version)
        if checksum(content) != expected:
            raise DiskStateError(path, "is damaged: its bytes have another checksum", version)

    def _write(self, before: list[Future], index: int, version: int, buffer: memoryview) -> None:
        wait(before)
        path, spec = folder.chunk_file(self.path, index), self._specs[index]
        try:
            transfer(path, buffer[: spec.bytes], write=True, direct=self.direct)
            self._written[index] = version, checksum(buffer[: spec.bytes])
        except OSError as error:
            raise DiskError(
                f"Writing chunk {index} ({spec.name!r}, {spec.bytes} bytes) of version {version} to {path} failed: "
                f"{error.strerror}. Make room or repair the disk, then restore the run from its last checkpoint."
            ) from error
        finally:
            self._to_write.put(buffer)
