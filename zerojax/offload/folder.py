"""The folder of a disk store: making and locking it, the files in it, and those an earlier run left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from zerojax.offload import buffers
from zerojax.offload.chunks import DiskError

LOCK = ".lock"
PROBE = ".probe"
SUFFIX = ".safetensors"
_OURS = re.compile(r"chunk_\d{5,}\.safetensors|spare_\d+\.tmp|\.probe|\.lock")


def file_of(folder: Path, index: int) -> Path:
    """The file of a chunk."""
    return folder / f"chunk_{index:05d}{SUFFIX}"


class Spares:
    """Files that chunks are written to before they are renamed: those that were replaced, reused.

    A disk overwrites a file faster than it frees its blocks and allocates others. There are never more than
    writing threads.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._free: deque[Path] = deque()
        self._names = map("spare_{}.tmp".format, itertools.count())

    def write(self, path: Path, content: memoryview, *, direct: bool) -> None:
        """Write a chunk's file anew; the file it replaces becomes a spare.

        Raises:
            OSError: If that fails; the old file is unchanged.
        """
        try:
            spare = self._free.pop()
        except IndexError:
            spare = self._folder / next(self._names)
        try:
            buffers.write_file(spare, content, direct=direct)
            old = self._folder / next(self._names)
            try:
                os.link(path, old)
            except OSError:  # the chunk had no file, or the filesystem has no hard links
                old = None
            os.rename(spare, path)
        except OSError:
            with contextlib.suppress(OSError):
                spare.unlink()
            raise
        # Before the old file is overwritten: if power fails, it may still have the chunk's name.
        sync(self._folder)
        if old and old.stat().st_nlink > 1:  # somebody keeps it under another name
            old.unlink()
        elif old:
            self._free.append(old)


def leftovers(folder: Path) -> list[Path]:
    """The files of an earlier run.

    Raises:
        DiskError: If there are other files.
    """
    names = sorted(os.listdir(folder))
    # without the lock, which is made first, a name alone does not make a file ours
    foreign = [name for name in names if LOCK not in names or not _OURS.fullmatch(name)]
    if foreign:
        raise DiskError(
            f"{folder} has {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}, which no earlier run wrote. "
            f"Give an empty folder, or one that Offload made; nothing was removed."
        )
    return [folder / name for name in names if name != LOCK]


def lock(folder: Path) -> int:
    """Lock a folder for as long as this process lives, however it ends; a handle of the lock file.

    Raises:
        DiskError: If another process has locked it, naming that.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        return handle
    except OSError as error:
        holder = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise DiskError(
            f"{folder} is in use by another run (process {holder or 'unknown'}). Give this one another folder, or end "
            f"or close() that one first."
        ) from error


def check_space(folder: Path, sizes: Sequence[int], write_buffers: int, left: Sequence[Path]) -> None:
    """Refuse a disk that is too small for the chunks and those in flight.

    Raises:
        DiskError: If it is.
    """
    needed = sum(sizes) + write_buffers * max(sizes)
    available = free_bytes(folder) + sum(file.stat().st_blocks * 512 for file in left)
    if available < needed:
        raise DiskError(
            f"The offloaded state needs {needed} bytes in {folder}: {len(sizes)} chunks of {sum(sizes)} bytes "
            f"together, and {write_buffers} in flight; {available} are available. Make room, or give a folder on "
            f"another disk."
        )


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def sync(path: Path) -> None:
    """Block until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
