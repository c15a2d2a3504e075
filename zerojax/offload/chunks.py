"""Store the arrays of a chunk in an aligned buffer, and the buffer in a file, without the page cache if possible."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import mmap
import os
import zlib
from pathlib import Path

import numpy as np

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
