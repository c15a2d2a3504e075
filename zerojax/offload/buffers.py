"""A fixed number of buffers aligned for direct I/O, and reading and writing files with them."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path

BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
_sync_data = getattr(os, "fdatasync", os.fsync)


class Pool:
    """Buffers that are lent in the order of the requests.

    Attributes:
        bytes: Memory of all buffers together; it never changes.
    """

    def __init__(self, count: int, size: int):
        """Map `count` buffers of `size` bytes, each aligned to a page."""
        self.bytes = count * size
        self._free = deque(memoryview(_mapped(size)) for _ in range(count))
        self._requests: deque[Future[memoryview]] = deque()
        self._lock = threading.Lock()

    def request(self) -> Future[memoryview]:
        """A buffer, as soon as one is free."""
        ticket: Future[memoryview] = Future()
        with self._lock:
            buffer = self._free.popleft() if self._free else None
            if buffer is None:
                self._requests.append(ticket)
        if buffer is not None:
            ticket.set_result(buffer)
        return ticket

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back, for the oldest request."""
        with self._lock:
            ticket = self._requests.popleft() if self._requests else None
            if ticket is None:
                self._free.append(buffer)
        if ticket is not None:
            ticket.set_result(buffer)

    def cancel_requests(self) -> None:
        """Cancel the requests that were not met."""
        with self._lock:
            tickets, self._requests = self._requests, deque()
        for ticket in tickets:
            ticket.cancel()


def _mapped(size: int) -> mmap.mmap:
    """Memory aligned to a page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # direct I/O pins page by page: with small pages, writing reaches two thirds of the disk's speed
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def supports_direct(probe: Path) -> bool:
    """Whether a file there can be written past the page cache; it is removed.

    Raises:
        OSError: If they cannot be written at all.
    """
    block = memoryview(_mapped(BLOCK))
    try:
        write_file(probe, block, direct=True)
        return bool(_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)


def write_file(path: Path, content: memoryview, *, direct: bool) -> None:
    """Write a file and block until its content is on the disk.

    Args:
        path: Where; a file there is overwritten.
        content: All of it; with `direct` a multiple of `BLOCK` bytes, aligned to a page.
        direct: Past the page cache.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    handle = os.open(path, flags | (_DIRECT if direct else 0), 0o644)
    try:
        if os.fstat(handle).st_size > len(content):
            os.ftruncate(handle, len(content))
        done = 0
        while done < len(content):
            done += os.pwritev(handle, [content[done:]], done)
        _sync_data(handle)
    finally:
        os.close(handle)


def read_file(path: Path, into: memoryview, *, direct: bool) -> bool:
    """Fill a buffer from a file.

    Args:
        path: Which.
        into: Filled to its end; with `direct` a multiple of `BLOCK` bytes, aligned to a page.
        direct: Past the page cache.

    Returns:
        Whether the file had exactly as many bytes as the buffer.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if direct else 0))
    try:
        if os.fstat(handle).st_size != len(into):
            return False
        done = 0
        while done < len(into):
            got = os.preadv(handle, [into[done:]], done)
            if not got:
                return False
            done += got
        return True
    finally:
        os.close(handle)
