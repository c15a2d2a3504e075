"""Folders that are there whole or not at all; one writer at a time; what a killed save leaves behind.

step_00000100         a checkpoint, complete and on the disk
step_00000200.aside   one of a later step than the run went back to
.tmp-…                one being written, or removed
.old-…                one being replaced
.lock                 held by the run that writes
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zerojax.checkpoint.errors import CheckpointError
from zerojax.offload import folder

STEP = re.compile(r"step_(\d{8,})")
TEMPORARY, OLD = ".tmp-", ".old-"


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


class Lock:
    """The right to write into a folder, which one run at a time has.

    It goes with the process, however that ends.

    Raises:
        CheckpointError: If another run has it, naming its process.
    """

    def __init__(self, directory: Path):
        """Take it."""
        path = directory / ".lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 32).decode(errors="replace").strip()
            os.close(self._file)
            raise CheckpointError(
                f"{directory} is being written by another run (process {holder or 'unknown'}). Give this one another "
                f"directory, or end or close() that one first; Checkpointer(..., read_only=True) restores beside it."
            ) from error
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Give it back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def clean(directory: Path) -> list[str]:
    """Remove what killed saves left, and put back a checkpoint whose replacement was killed.

    Only for the holder of the lock.

    Returns:
        The names of what was found.
    """
    found = []
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(OLD) and not (final := directory / entry.name.removeprefix(OLD)).exists():
            os.rename(entry, final)
        elif entry.name.startswith((TEMPORARY, OLD)):
            shutil.rmtree(entry)
        else:
            continue
        found.append(entry.name)
    return found


def temporary_name(step: int) -> str:
    """A folder to write a checkpoint into, which nobody takes for one; another at each call.

    A write of a save that failed may come late: it must not meet the next one.
    """
    return f"{TEMPORARY}{step_name(step)}-{secrets.token_hex(4)}"


def commit(temporary: Path, step: int) -> None:
    """Make a folder, whose files are on the disk, the checkpoint of a step."""
    directory, final = temporary.parent, temporary.parent / step_name(step)
    old = directory / f"{OLD}{final.name}"
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(temporary, final)
    sync([directory])
    shutil.rmtree(old, ignore_errors=True)


def set_aside(directory: Path, step: int) -> list[str]:
    """Take checkpoints of later steps out of the sequence, and keep them.

    Who saves a step while later ones are there went back to before them, or found them
    damaged: the newest is the one now saved.

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
    """Remove all but the newest checkpoints, each at once: it is renamed, then emptied."""
    for step in [] if keep is None else steps_in(directory)[:-keep]:
        doomed = directory / temporary_name(step)
        os.rename(directory / step_name(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def make(*paths: Path) -> None:
    """Make folders, each in one that is there: one that was deleted under way took its lock with it."""
    for path in paths:
        path.mkdir()


def remove(path: Path) -> None:
    """Remove a folder as far as that can be done; what is still being written into it may bring it back at first."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)


def files_in(directory: Path) -> list[str]:
    """All files below a folder, by path relative to it, sorted."""
    return sorted(
        os.path.relpath(os.path.join(base, name), directory) for base, _, names in os.walk(directory) for name in names
    )


def folders_in(directory: Path) -> list[Path]:
    """A folder and all below it."""
    return [Path(base) for base, _, _ in os.walk(directory)]


def sync(paths: Iterable[Path]) -> None:
    """Wait until files or folders are on the disk."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(folder.sync, paths))


def write_synced(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
