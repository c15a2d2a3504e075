"""The bytes of a chunk: arrays in an aligned buffer, and the buffer in a file, past the page cache where that works."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
_SECTOR = 512


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """The arrays of a chunk, stored one after the other.

    Attributes:
        name: For errors.
        arrays: Local shape and dtype of each array.
    """

    name: str
    arrays: tuple[tuple[tuple[int, ...], np.dtype], ...]

    @property
    def bytes(self) -> int:
        """Size of its file: complete blocks, as direct I/O requires."""
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays)
        return max(1, -(-size // BLOCK)) * BLOCK

    def views(self, buffer: memoryview) -> tuple[np.ndarray, ...]:
        """Its arrays in a buffer."""
        views, start = [], 0
        for shape, dtype in self.arrays:
            views.append(np.ndarray(shape, dtype, buffer, start))
            start += views[-1].nbytes
        return tuple(views)

    def require(self, arrays: Sequence[np.ndarray]) -> None:
        """Refuse arrays that are not those of the chunk.

        Raises:
            ValueError: If they are not.
        """
        if len(arrays) != len(self.arrays):
            raise ValueError(f"Chunk {self.name!r} got {len(arrays)} arrays. Give its {len(self.arrays)}.")
        for i, (array, (shape, dtype)) in enumerate(zip(arrays, self.arrays, strict=True)):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"Array {i} of chunk {self.name!r} is {array.dtype}{list(array.shape)}. Give one of "
                    f"{dtype}{list(shape)}."
                )


def checksum(content: memoryview) -> int:
    """The CRC-32 of the sums, modulo 2**64, of each sector's 64-bit words.

    A changed word, a sector of zeros and sectors that changed places are found, in a fifth of the time of the CRC-32
    of all bytes, which is slower than a good disk.
    """
    words = np.frombuffer(content, "<u8").reshape(-1, _SECTOR // 8)
    return zlib.crc32(words.sum(axis=1, dtype="<u8"))


def aligned_buffer(size: int) -> memoryview:
    """Memory that is aligned to a page, as direct I/O requires."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # direct I/O pins page by page: with small pages, writing reaches two thirds of the disk's speed
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def supports_direct(probe: Path) -> bool:
    """Whether a file there can be written past the page cache; it is removed.

    Raises:
        OSError: If it cannot be written at all.
    """
    try:
        write_file(probe, aligned_buffer(BLOCK), direct=True)
        return bool(_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)


def write_file(path: Path, content: memoryview, *, direct: bool) -> None:
    """Write a file's bytes in place; with `direct`, complete blocks from an aligned buffer."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (_DIRECT if direct else 0), 0o644)
    try:
        done = 0
        while done < len(content):
            done += os.pwritev(handle, [content[done:]], done)
    finally:
        os.close(handle)


def read_file(path: Path, into: memoryview, *, direct: bool) -> int:
    """Fill a buffer from a file; how many bytes it had. With `direct`, as `write_file`."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_DIRECT if direct else 0))
    try:
        done = 0
        while done < len(into) and (got := os.preadv(handle, [into[done:]], done)):
            done += got
        return done
    finally:
        os.close(handle)
