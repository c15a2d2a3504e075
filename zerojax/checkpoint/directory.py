"""The directory of a checkpointer: a folder a step, committed atomically, and what killed saves leave behind.

step_00000100         a checkpoint, complete and on disk
step_00000200.aside   one of a later step than the run went back to
.tmp-step_…-<hex>     one being written, or removed; locked, and written in, by its writer
.old-step_…           one being replaced
.lock                 locked by the run that writes
"""

from __future__ import annotations

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
from zerojax.offload import lock as locks
from zerojax.offload.lock import LOCK, DiskError, Lock

STEP = re.compile(r"step_(\d{8,4000})", re.ASCII)
ASIDE = re.compile(r"step_\d{8,}\.aside(-\d+)?", re.ASCII)
TEMPORARY, OLD = ".tmp-", ".old-"
OURS = re.compile(r"\.tmp-step_\d{8,}-([0-9a-f]{0,8})[0-9a-f]{8}|\.old-step_\d{8,}", re.ASCII)
MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.sha256"
# A folder of another host, whose lock may be invisible, counts as left behind after so many seconds without a write.
IDLE = 3600.0


def step_number(step: Any) -> int:
    """Return a step that the caller gives, as an int.

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
    """Return the folder name of a step."""
    return f"step_{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending; none if there is no such folder."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = [(name, int(match[1])) for name in names if (match := STEP.fullmatch(name))]
    return sorted(step for name, step in steps if name == step_name(step))  # not step_000000001: it is another folder


def lock(directory: Path) -> Lock:
    """Take the right to write into a directory, which ends with the process.

    Raises:
        CheckpointError: If another run has it, naming its process, or `.lock` is a file of something else.
    """
    try:
        return locks.lock(directory)
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
    """Return a new folder name to write a checkpoint into, since a write of a failed save may come late."""
    return f"{TEMPORARY}{step_name(step)}-{host()}{secrets.token_hex(4)}"


def host() -> str:
    """Return an identifier of this host, in eight hexadecimal digits."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def is_being_written(temporary: Path, writer: str) -> bool:
    """Return whether its writer may be alive: on this host it has the lock, on another one it wrote recently."""
    try:
        locks.lock_folder(temporary).release()
    except BlockingIOError:
        return True
    if writer == host():
        return False
    last = max(os.lstat(temporary / name).st_mtime for name in [".", *files_in(temporary)])
    return last > os.stat(temporary.parent / LOCK).st_mtime - IDLE  # the file system's clock: the lock was just taken


def commit(temporary: Path, step: int) -> None:
    """Make a folder, whose files are on disk, the checkpoint of a step.

    A checkpoint that is there is removed. Anything else of that name, which no save wrote, is renamed and stays.
    """
    directory, final = temporary.parent, temporary.parent / step_name(step)
    old = directory / f"{OLD}{final.name}"
    if os.path.lexists(final):
        discard(old)
        os.rename(final, old if is_removable(final) else directory / free_aside(directory, step))
    os.rename(temporary, final)
    sync([directory])
    discard(old)


def is_removable(path: Path) -> bool:
    """Return whether a save wrote this folder of a step, as its manifest tells.

    For a link, only the link is removed.
    """
    return path.is_symlink() or any(os.path.lexists(path / name) for name in (MANIFEST, MANIFEST_DIGEST))


def discard(path: Path) -> None:
    """Remove a folder as far as that can be done; of a link the link alone, whatever it leads to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def free_aside(directory: Path, step: int) -> str:
    """Return a name that is not taken, to which a folder of a step is renamed."""
    name, n = f"{step_name(step)}.aside", int(time.time())
    free = name
    while os.path.lexists(directory / free):
        free, n = f"{name}-{n}", n + 1
    return free


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
            free = free_aside(directory, later)
            os.rename(directory / step_name(later), directory / free)
            renamed.append(free)
    return renamed


def prune(directory: Path, keep: int | None) -> None:
    """Remove all but the newest checkpoints, and all but the newest that were renamed as later ones.

    Each is renamed first, so that a kill leaves no incomplete one. A folder without a manifest, which no save wrote,
    stays: another program may name its folders likewise.
    """
    if keep is None:
        return
    asides = sorted(name for name in os.listdir(directory) if ASIDE.fullmatch(name))
    for name in [*map(step_name, steps_in(directory)[:-keep]), *asides[:-keep]]:
        doomed = directory / temporary_name(int(name[5:].partition(".")[0]))
        if is_removable(directory / name):
            os.rename(directory / name, doomed)
            discard(doomed)


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
    """Return all files below a folder, by path relative to it, sorted."""
    return sorted(os.path.relpath(os.path.join(base, name), path) for base, _, names in os.walk(path) for name in names)


def folders_in(path: Path) -> list[Path]:
    """Return a folder and all folders below it."""
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
