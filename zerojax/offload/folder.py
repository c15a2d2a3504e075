"""Make a folder, lock it so that only one process uses it, and remove the files of an earlier run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from zerojax.offload.lock import LOCK, DiskError, Lock, has_mark, lock


def chunk_file(folder: Path, index: int) -> Path:
    return folder / f"chunk_{index:05d}.bin"


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Enter a context that makes or writes a folder. Replace an `OSError` inside it by a `DiskError`."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"State cannot be offloaded to {folder}: {error.strerror}. Give a folder that this process can write to, "
            f"and whose parent folder exists."
        ) from error


def claim(folder: Path, sizes: Sequence[int]) -> Lock:
    """Make and lock a folder with room for files of these sizes, and remove the files of an earlier run.

    Raises:
        DiskError: If the folder has other files, another process uses it, or the disk is too small. Then no file is
            removed.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    leftovers(folder)  # check before the lock file is made, because this file marks a folder as ours
    locked = lock(folder)
    try:
        files, disk = leftovers(folder), os.statvfs(folder)
        available = disk.f_bavail * disk.f_frsize + sum(file.stat().st_blocks * 512 for file in files)
        if available < sum(sizes):
            raise DiskError(
                f"The offloaded state needs {sum(sizes)} bytes in {folder}, in {len(sizes)} chunks, and {available} "
                f"bytes are available. Make room, or give a folder on another disk."
            )
        for file in files:
            file.unlink()
        return locked
    except BaseException:
        locked.release()
        raise


def leftovers(folder: Path) -> list[Path]:
    """Return the chunk files of an earlier run. Without a lock file that has our mark, no file counts as a chunk.

    Raises:
        DiskError: If the folder has other files, or if zerojax did not write its `.lock`.
    """
    names = sorted(os.listdir(folder))
    chunks = {name for name in names if re.fullmatch(r"chunk_\d{5,}\.bin", name)} if has_mark(folder) else set()
    chunks = {name for name in chunks if not (folder / name).is_symlink() and (folder / name).is_file()}
    if foreign := [name for name in names if name != LOCK and name not in chunks]:
        raise DiskError(
            f"{folder} has {', '.join(foreign[:3])}{' and more' if foreign[3:] else ''}, which no earlier run wrote. "
            f"Give an empty folder, or a folder that Offload made. Nothing was removed."
        )
    return [folder / name for name in names if name != LOCK]


def sync(path: Path) -> None:
    """Block until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
