"""Keep chunks of optimizer state on disk. Threads read and write the chunks in a fixed amount of memory.

The files are scratch files of one process. Each file has the bytes of one chunk, and is overwritten in place. Only this
process knows what is in a file, so no other process reads the files. The next run restores a checkpoint.

The arrays of a chunk are stored in an aligned buffer, and the buffer in a file, without the page cache if possible.
"""

import collections
import contextlib
import dataclasses
import errno
import math
import mmap
import os
import queue
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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

    def views(self, buffer: np.ndarray) -> tuple[np.ndarray, ...]:
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


def aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return zeros in aligned memory. JAX on CPU uses aligned memory without a copy, but copies NumPy's own memory."""
    size = math.prod(shape)
    return np.frombuffer(aligned_buffer(max(1, size * dtype.itemsize)), dtype, size).reshape(shape)


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

    If `direct` is true, the page cache is not used, and the buffer must be aligned and consist of complete blocks.
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
    """A file does not have the bytes that were written to it."""

    def __init__(self, path: Path, found: str):
        super().__init__(
            f"{path} {found}. Restore the run from its last checkpoint, which writes the offloaded state again."
        )


def buffer_bytes(specs: Sequence[ChunkSpec], in_flight: int) -> int:
    """Return the size of all buffers while `in_flight` chunks are read, and as many wait to be written."""
    return 2 * in_flight * max((spec.bytes for spec in specs), default=0)


def done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def until_done(unfinished: set[Future], future: Future) -> Future:
    """Keep a future in the set `unfinished` until the future is done. Return the future."""
    unfinished.add(future)
    future.add_done_callback(unfinished.discard)
    return future


def give_back(free: queue.SimpleQueue[memoryview], memory: memoryview, most: int) -> None:
    if free.qsize() < most:
        free.put(memory)


class DiskStore:
    """Keep chunks of optimizer state in a folder. Only one thread of one process may call the store.

    Operations on a chunk run in the order of the calls. If a write fails, only the next call raises a `DiskError`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Sequence[ChunkSpec],
        *,
        in_memory: Collection[int] = (),
        in_flight: int = 4,
        threads: int = 4,
    ):
        """Make and lock a folder, and remove the files of an earlier run from it.

        Args:
            path: The folder, which no other process may use. Its parent must exist.
            specs: The chunks, in the order of their indices.
            in_memory: The indices of chunks that are kept in host memory instead of in a file.
            in_flight: The number of chunks that can wait to be written.
            threads: The number of reads and writes that run at a time.

        Raises:
            DiskError: If the folder cannot be used; see `folder.claim`. In this case, no file is removed.
        """
        self.path, self._specs = Path(path), tuple(specs)
        sizes = [spec.bytes for i, spec in enumerate(specs) if i not in in_memory]
        with folder.writable(self.path), contextlib.ExitStack() as on_error:
            self._lock = folder.claim(self.path, sizes)
            on_error.callback(self._lock.release)
            # Whether files are read and written without the page cache.
            self.direct = supports_direct(folder.chunk_file(self.path, 0))
            on_error.pop_all()
        self._largest, self._in_flight = max(sizes, default=BLOCK), in_flight
        self._free = queue.SimpleQueue[memoryview]()
        self.bytes_read = self.bytes_written = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="zerojax-disk")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="zerojax-disk-copy")
        # Unfinished reads and writes of each chunk, and unfinished copies. A finished read would keep its data alive.
        self._begun: dict[int, set[Future]] = collections.defaultdict(set)
        self._copies: dict[int, set[Future]] = collections.defaultdict(set)
        self._writes: list[Future[None]] = []
        self._checksums: dict[int, int] = {}  # of each chunk whose last write succeeded
        self._in_memory: dict[int, tuple[np.ndarray, ...]] = dict.fromkeys(in_memory, ())

    def read(self, index: int) -> Future[tuple[np.ndarray, ...]]:
        """Begin to read a chunk. The future raises a `DiskStateError` if the file is damaged.

        The buffer is used again only when nothing refers to its arrays. So JAX's arrays on CPU may share the buffer.
        """
        self._raise_failure()
        if index in self._in_memory:
            return done(self._in_memory[index])
        self.bytes_read += self._specs[index].bytes
        return self._begin(self._read, index)

    def write(self, index: int, arrays: Sequence[np.ndarray]) -> None:
        """Copy a chunk's new state to a buffer, and begin to write the chunk. Block while too many chunks wait."""
        self._raise_failure()
        spec = self._specs[index]
        assert [(x.shape, x.dtype) for x in arrays] == list(spec.arrays), spec.name
        if index in self._in_memory:
            self._in_memory[index] = tuple(map(np.copy, arrays))
            return
        # Wait for copies here and not in a thread. Otherwise a few waiting writes would keep all threads from reading.
        wait(list(self._copies[index]))
        if len(self._writes) >= self._in_flight:
            wait(self._writes, return_when=FIRST_COMPLETED)
        buffer = self._lent_buffer()
        for array, view in zip(arrays, spec.views(buffer), strict=True):
            np.copyto(view, array)
        self._writes.append(self._begin(self._write, index, buffer))
        self.bytes_written += spec.bytes

    def copy(self, index: int, put: Callable[[tuple[np.ndarray, ...]], None]) -> Future[None]:
        """Begin to read a chunk and to pass its arrays to `put`, in a thread that makes all copies.

        A write of the chunk that begins later waits for the copy. So the copy has the chunk as it is at this call.
        Reads do not wait for copies. The future raises a `DiskStateError` if the file is damaged, and any error of
        `put`. A chunk in host memory is passed at once.
        """
        self._raise_failure()
        if index in self._in_memory:
            return done(put(self._in_memory[index]))
        self.bytes_read += self._specs[index].bytes
        before = list(self._begun[index])
        return until_done(self._copies[index], self._copier.submit(lambda: put(self._read(before, index))))

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
        ended = [write for write in self._writes if write.done()]
        self._writes = [write for write in self._writes if not write.done()]
        for write in ended:
            write.result()

    def _begin(self, work: Callable[..., Any], index: int, *args: Any) -> Future:
        """Let a thread run `work` after the earlier reads and writes of the chunk.

        The thread blocks until the earlier work is done. There is no deadlock: threads take work in the order of the
        calls, so all earlier work has begun. Copies have another thread, and also wait only for earlier work.
        """
        future = self._threads.submit(work, list(self._begun[index]), index, *args)
        return until_done(self._begun[index], future)

    def _read(self, before: list[Future], index: int) -> tuple[np.ndarray, ...]:
        wait(before)
        path, spec = folder.chunk_file(self.path, index), self._specs[index]
        if index not in self._checksums:
            raise DiskStateError(path, "was not written")
        buffer = self._lent_buffer()
        content = buffer.data[: spec.bytes]
        try:
            size = transfer(path, content, write=False, direct=self.direct)
        except OSError as error:
            raise DiskStateError(path, f"cannot be read: {error.strerror}") from error
        if size < len(content):
            raise DiskStateError(path, f"is torn: it ends after {size} of {len(content)} bytes")
        if checksum(content) != self._checksums[index]:
            raise DiskStateError(path, "is damaged: its bytes have another checksum")
        return spec.views(buffer)

    def _lent_buffer(self) -> np.ndarray:
        """Return a buffer that is used again when nothing refers to it. New memory would cost as much as a copy."""
        try:
            memory = self._free.get_nowait()
        except queue.Empty:
            memory = aligned_buffer(self._largest)
        buffer = np.frombuffer(memory, np.uint8)
        weakref.finalize(buffer, give_back, self._free, memory, 2 * self._in_flight).atexit = False
        return buffer

    def _write(self, before: list[Future], index: int, buffer: np.ndarray) -> None:
        wait(before)
        path, spec = folder.chunk_file(self.path, index), self._specs[index]
        content = buffer.data[: spec.bytes]
        self._checksums.pop(index, None)
        try:
            transfer(path, content, write=True, direct=self.direct)
            self._checksums[index] = checksum(content)
        except OSError as error:
            raise DiskError(
                f"Writing chunk {index} ({spec.name!r}, {spec.bytes} bytes) to {path} failed: {error.strerror}. Make "
                f"room or repair the disk, then restore the run from its last checkpoint."
            ) from error
