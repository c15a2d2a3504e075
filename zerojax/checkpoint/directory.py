"""The directory of a checkpointer: a folder a step, committed atomically, and what killed saves leave behind.

step_00000100         a checkpoint, complete and on disk
step_00000200.aside   one of a later step than the run went back to
.tmp-step_…-<hex>     one being written, or removed; locked, and written in, by its writer
.old-step_…           one being replaced
.lock                 locked by the run that writes
"""

from __future__ import annotations

import errno
import fcntl
import operator
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zerojax.checkpoint.errors import CheckpointError
from zerojax.offload import folder
from zerojax.offload.folder import LOCK, DiskError

STEP = re.compile(r"step_(\d{8,})")
ASIDE = re.compile(r"step_\d{8,}\.aside(-\d+)?")
TEMPORARY, OLD = ".tmp-", ".old-"
OURS = re.compile(r"\.tmp-step_\d{8,}-([0-9a-f]{0,8})[0-9a-f]{8}|\.old-step_\d{8,}")
# A folder of another host, where locks may not be seen, is taken for left behind after so many seconds without a write.
IDLE = 3600.0


def step_number(step: Any) -> int:
    """A step that the caller gives, as an int.

    Raises:
        TypeError: If it is no integer of Python, NumPy or JAX.
        ValueError: If it is negative.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(f"step= is {step!r}, a {type(step).__name__}. Give an integer.")
    if number < 0:
        raise ValueError(f"step= is {number}. Give an integer of at least 0.")
    return number


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step_{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """The steps that have a checkpoint, ascending; none where there is no such folder."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def lock(directory: Path) -> int:
    """Take the right to write into a directory, which ends with the process; a handle that `os.close` releases.

    Raises:
        CheckpointError: If another run has it, naming its process.
    """
    try:
        return folder.lock(directory)
    except DiskError as error:
        raise CheckpointError(f"{error} Checkpointer(..., read_only=True) restores beside it.") from error


def clean(directory: Path) -> dict[str, str]:
    """Remove what killed saves left, and put back a checkpoint whose replacement was killed.

    Only for the run that has the lock. What another writer is at work in stays all the same: the
    lock file may have been deleted, or not be seen by another host.

    Returns:
        The names of what was there, and what became of each.
    """
    outcomes = {}
    for entry in sorted(directory.iterdir()):
        if not (match := OURS.fullmatch(entry.name)):
            continue
        try:
            if entry.is_symlink() or not entry.is_dir():
                outcomes[entry.name] = "is no folder that a save made: it stays"
            elif entry.name.startswith(OLD) and not (final := directory / entry.name.removeprefix(OLD)).exists():
                os.rename(entry, final)
                outcomes[entry.name] = "was put back"
            elif match[1] and is_being_written(entry, match[1]):
                outcomes[entry.name] = "may be another run's that is writing it: it stays"
            else:
                remove(entry)
                if entry.exists():
                    shutil.rmtree(entry)  # and say why not
                outcomes[entry.name] = "was removed"
        except OSError as error:
            outcomes[entry.name] = f"cannot be removed ({error.strerror}): it stays"
    return outcomes


def require_space(directory: Path, size: int) -> None:
    """Refuse to begin what the disk has no room for.

    Raises:
        CheckpointError: Saying how many bytes are needed, and how many there are.
    """
    disk = os.statvfs(directory)
    if size > (available := disk.f_bavail * disk.f_frsize):
        raise CheckpointError(
            f"it takes about {size} bytes, and {available} are available there: No space left on device. Make room, "
            f"or keep= fewer checkpoints."
        )


def temporary_name(step: int) -> str:
    """A folder to write a checkpoint into; another at each call, since a write of a failed save may come late."""
    return f"{TEMPORARY}{step_name(step)}-{host()}{secrets.token_hex(4)}"


def host() -> str:
    """This host, in eight hexadecimal digits."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def mark_as_written(temporary: Path) -> int:
    """Lock a folder while it is written; closing the handle unlocks it."""
    handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(handle)
            raise
    return handle  # where folders cannot be locked, as on NFS, unlocked


def is_being_written(temporary: Path, writer: str) -> bool:
    """Whether its writer may be alive: on this host it has the lock, on another one it wrote a short time ago."""
    try:
        os.close(mark_as_written(temporary))
    except BlockingIOError:
        return True
    if writer == host():
        return False
    last = max(os.lstat(temporary / name).st_mtime for name in [".", *files_in(temporary)])
    return last > os.stat(temporary.parent / LOCK).st_mtime - IDLE  # the file system's clock: the lock was just taken


def commit(temporary: Path, step: int) -> None:
    """Make a folder, whose files are on disk, the checkpoint of a step."""
    directory, final = temporary.parent, temporary.parent / step_name(step)
    old = directory / f"{OLD}{final.name}"
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    sync([directory])
    shutil.rmtree(old, ignore_errors=True)


def rename_later_steps(directory: Path, step: int) -> list[str]:
    """Rename the checkpoints of later steps, so that the one now saved is the newest.

    A run that saves a step while later ones are there went back to before them, or could not
    use them because they are damaged.

    Returns:
        Their new names.
    """
    renamed = []
    for later in steps_in(directory):
        if later > step:
            name = free = f"{step_name(later)}.aside"
            while (directory / free).exists():
                free = f"{name}-{len(renamed) + int(time.time())}"
            os.rename(directory / step_name(later), directory / free)
            renamed.append(free)
    return renamed


def prune(directory: Path, keep: int | None) -> None:
    """Remove all but the newest checkpoints, and all but the newest that were renamed as later ones.

    Each is renamed first, so that a kill leaves no incomplete one.
    """
    if keep is None:
        return
    asides = sorted(name for name in os.listdir(directory) if ASIDE.fullmatch(name))
    for name in [*map(step_name, steps_in(directory)[:-keep]), *asides[:-keep]]:
        doomed = directory / temporary_name(int(name[5:].partition(".")[0]))
        os.rename(directory / name, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder as far as that can be done, until it stays away: a write still in progress may bring it back."""
    away = 0
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        away = 0 if path.exists() else away + 1
        if away == 4:
            return
        time.sleep(0.05)


def files_in(path: Path) -> list[str]:
    """All files below a folder, by path relative to it, sorted."""
    return sorted(os.path.relpath(os.path.join(base, name), path) for base, _, names in os.walk(path) for name in names)


def folders_in(path: Path) -> list[Path]:
    """A folder and all below it."""
    return [Path(base) for base, _, _ in os.walk(path)]


def sync(paths: Iterable[Path]) -> None:
    """Block until files or folders are on disk."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(folder.sync, paths))


def write_synced(path: Path, text: str) -> None:
    """Write a text file and block until it is on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
