"""A folder that one process uses at a time: making and locking it, and removing what an earlier run left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

LOCK = ".lock"
_MARK = b"zerojax, process "


class DiskError(RuntimeError):
    """State cannot be offloaded to a folder, or a chunk could not be written."""


def chunk_file(folder: Path, index: int) -> Path:
    """The file of a chunk."""
    return folder / f"chunk_{index:05d}.bin"


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Around what makes a folder or writes to it; if that fails, a `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"State cannot be offloaded to {folder}: {error.strerror}. Give a folder that this process can write to, "
            f"in one that exists."
        ) from error


def claim(folder: Path, sizes: Sequence[int]) -> int:
    """Lock a folder, made if it is missing, with room for files of these sizes, and remove an earlier run's.

    Returns:
        A handle of the lock file; closing it unlocks the folder.

    Raises:
        DiskError: If it has other files, another process uses it, or the disk is too small. Nothing was removed.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    leftovers(folder)  # before the lock is made, by which a folder is ours
    handle = lock(folder)
    try:
        files, disk = leftovers(folder), os.statvfs(folder)
        available = disk.f_bavail * disk.f_frsize + sum(file.stat().st_blocks * 512 for file in files)
        if available < sum(sizes):
            raise DiskError(
                f"The offloaded state needs {sum(sizes)} bytes in {folder}, in {len(sizes)} chunks; {available} are "
                f"available. Make room, or give a folder on another disk."
            )
        for file in files:
            file.unlink()
        return handle
    except BaseException:
        os.close(handle)
        raise


def leftovers(folder: Path) -> list[Path]:
    """The chunks that an earlier run left; only beside a lock file with our mark is a file of that name a chunk.

    Raises:
        DiskError: If there are other files.
    """
    names = sorted(os.listdir(folder))
    text = (folder / LOCK).read_bytes() if LOCK in names else b""
    ours = r"\.lock|chunk_\d{5,}\.bin" if text.startswith(_MARK) else "" if text else r"\.lock"
    if foreign := [name for name in names if not re.fullmatch(ours, name)]:
        raise DiskError(
            f"{folder} has {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}, which no earlier run wrote. "
            f"Give an empty folder, or one that Offload made; nothing was removed."
        )
    return [folder / name for name in names if name != LOCK]


def lock(folder: Path) -> int:
    """Lock a folder for as long as this process lives, however it ends; a handle of the lock file.

    Raises:
        DiskError: If another process has locked it, naming that, or this one has.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Of one length and synced: whatever stops the process, a mark that is there stays.
        os.pwrite(handle, b"%b%-10d\n" % (_MARK, os.getpid()), 0)
        os.fsync(handle)
        return handle
    except OSError as error:
        holder = os.pread(handle, 64, 0).removeprefix(_MARK).decode(errors="replace").strip()
        os.close(handle)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        if holder == str(os.getpid()):
            raise DiskError(
                f"{folder} is in use by this process. First close what uses it, a Checkpointer with close(), a "
                f"state with zerojax.offload.close(state); or give another folder."
            ) from error
        raise DiskError(
            f"{folder} is in use by another run (process {holder or 'unknown'}). Give this one another folder, or end "
            f"or close() that one first."
        ) from error


def sync(path: Path) -> None:
    """Block until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
