"""Lock folders, and make a folder for chunks that only one process uses.

A lock ends with the process that took it, even if the process has forked other processes.
"""

import contextlib
import errno
import fcntl
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

LOCK = ".zerojax.lock"  # no other program writes a file of this name


class DiskError(RuntimeError):
    """State cannot be offloaded to a folder, or a chunk could not be written."""


class Lock:
    """An flock on an open file or folder.

    A lock belongs to the open file, which a forked child shares. If Python forked the child, the child closes its
    handle at once. If C code forked the child, the child keeps its handle, which keeps the file locked even after the
    parent has closed the file. So the parent unlocks the file before closing it.
    """

    def __init__(self, handle: int):
        """Take the handle of a locked file. The caller holds `_forking`, so that every forked child knows the lock."""
        self._handle: int | None = handle
        self._process = os.getpid()
        _held.add(self)

    @property
    def held(self) -> bool:
        """Return whether this process has the lock. After `release` or in a forked child, it does not."""
        return self._handle is not None

    def release(self) -> None:
        """Unlock and close the file. A forked child only closes the file, so that the parent keeps the lock.

        A second call does nothing.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):  # closing unlocks as well; some file systems have no locks
                if os.getpid() == self._process:
                    fcntl.flock(handle, fcntl.LOCK_UN)
            with contextlib.suppress(OSError):  # the handle is free even if the server of the file is gone (ESTALE)
                os.close(handle)

    def __del__(self, is_finalizing=sys.is_finalizing):
        """Unlock when nothing refers to the lock, because an error may have skipped `release`."""
        if not is_finalizing():  # if finalizing, Python has cleared the modules, and the process's end unlocks
            self.release()


def lock(folder: Path) -> Lock:
    """Lock a folder through the file `.zerojax.lock` in it, which then has this process's ID.

    Raises:
        DiskError: If a process has locked the folder. The error names the process.
    """
    with _forking:
        # Do not follow a link, and do not block if the file is a pipe.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(folder / LOCK, flags, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(handle, b"%-10d\n" % os.getpid(), 0)
            return Lock(handle)
        except OSError as error:
            is_taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            holder = os.pread(handle, 64, 0).decode(errors="replace").strip() if is_taken else ""
            os.close(handle)
            if not is_taken:
                raise
            raise DiskError(in_use(folder, holder)) from error


def lock_folder(path: Path) -> Lock:
    """Lock a folder itself, or raise a `BlockingIOError` if another process has locked it.

    On file systems that cannot lock folders, such as NFS, the result holds no lock.
    """
    with _forking:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                os.close(handle)
                raise
        return Lock(handle)


def in_use(folder: Path, holder: str) -> str:
    """Return the message for a locked folder. `holder` is the ID of the process with the lock, or empty."""
    if holder == str(os.getpid()):
        return (
            f"{folder} is in use by this process. First close a Checkpointer that uses it with close(), or a "
            f"state with zerojax.offload.close(state); or give another folder."
        )
    known = holder.isdigit()
    if known and not Path("/proc", holder).exists() and Path("/proc/self").exists():
        return (
            f"{folder} is in use by another run (process {holder}). No such process is visible here: it runs on "
            f"another host or in another container, or it has ended and a process that it forked is still running "
            f"with the lock (`fuser {folder / LOCK}` shows it). End that process, or give this run another folder."
        )
    return (
        f"{folder} is in use by another run (process {holder if known else 'unknown'}). Give this run another folder, "
        f"or end or close() the other run first."
    )


# Held while a lock is taken and while the process forks, so that `_held` in a child has every lock of the parent.
_forking = threading.RLock()
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_all() -> None:
    for one in list(_held):
        one.release()
    _held.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forget_all)


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
        DiskError: If the folder has other files, another process uses it, or the disk is too small. In these cases, no
            file is removed.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    leftovers(folder)  # check before the lock file is made, because its name marks a folder as ours
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
    """Return the chunk files of an earlier run. If there is no lock file, no earlier run used the folder.

    Raises:
        DiskError: If the folder has other files.
    """
    names = sorted(os.listdir(folder))
    chunks = {name for name in names if re.fullmatch(r"chunk_\d{5,}\.bin", name)} if LOCK in names else set()
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
