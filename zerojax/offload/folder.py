"""The folder of a disk store: whether it can be had, who has it, and what an earlier run left in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from zerojax.offload.chunks import DiskError

LOCK = ".lock"
PROBE = ".probe"
WHOLE = ".safetensors"
_OURS = re.compile(r"chunk_\d{5,}\.safetensors|spare_\d+\.tmp|\.probe|\.lock")


def file_of(folder: Path, index: int) -> Path:
    """The file of a chunk."""
    return folder / f"chunk_{index:05d}{WHOLE}"


class Spares:
    """Files that chunks are written into before they get their names: those that were replaced, used again.

    A disk takes less time to write over a file than to give its blocks back and find others. There are never more
    than threads that write.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._free: list[Path] = []
        self._names = map("spare_{}.tmp".format, itertools.count())
        self._guard = threading.Lock()

    def take(self) -> Path:
        """A file to write over, or the name of one to make."""
        with self._guard:
            return self._free.pop() if self._free else self._folder / next(self._names)

    def replace(self, path: Path, spare: Path) -> None:
        """Give a written spare the name of a chunk; the file that had it becomes a spare.

        Raises:
            OSError: If that cannot be done; the spare is there still.
        """
        with self._guard:
            old = self._folder / next(self._names)
        try:
            os.link(path, old)
        except OSError:  # the chunk had no file, or the filesystem knows no second names
            old = None
        os.rename(spare, path)
        # Before the old file is written over: were power to fail, the chunk's name could still be its.
        sync(self._folder)
        if old and old.stat().st_nlink > 1:  # somebody keeps it by another name
            old.unlink()
        elif old:
            with self._guard:
                self._free.append(old)


def make(folder: Path) -> None:
    """Make a folder, or see that all in it is ours.

    Raises:
        DiskError: If it is no folder, or holds anything else.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    leftovers(folder)


def leftovers(folder: Path) -> list[Path]:
    """What an earlier run left.

    Raises:
        DiskError: If there is anything else.
    """
    names = sorted(os.listdir(folder))
    # without the lock, which comes first, a name alone does not make a file ours
    foreign = [name for name in names if LOCK not in names or not _OURS.fullmatch(name)]
    if foreign:
        raise DiskError(
            f"{folder} holds {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}, which the disk tier did not "
            f"write. Give it an empty folder, or one that it made; nothing was removed."
        )
    return [folder / name for name in names if name != LOCK]


def lock(folder: Path) -> int:
    """Take the right to use a folder, which goes with the process, however that ends; a handle of the lock file.

    Raises:
        DiskError: If another has it, naming its process.
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
    """Refuse a disk that the chunks, old and in flight, do not fit on.

    Raises:
        DiskError: If they do not.
    """
    needed = sum(sizes) + write_buffers * max(sizes)
    available = free(folder) + sum(file.stat().st_blocks * 512 for file in left)
    if available < needed:
        raise DiskError(
            f"The disk tier needs {needed} bytes in {folder}: {len(sizes)} chunks of {sum(sizes)} bytes together, and "
            f"{write_buffers} in flight; {available} are available. Make room, or give a folder on another disk."
        )


def free(folder: Path) -> int:
    """Bytes that this process may still write."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def free_or_unknown(folder: Path) -> int | str:
    """The same for a message about a disk that may be gone."""
    with contextlib.suppress(OSError):
        return free(folder)
    return "an unknown number"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
