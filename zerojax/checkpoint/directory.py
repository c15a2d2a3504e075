"""The directory of a checkpointer: a folder a step, committed atomically, and what killed saves leave behind.

step_00000100         a checkpoint, complete and on disk
step_00000200.aside   one of a later step than the run went back to
.tmp-…                one being written, or removed
.old-…                one being replaced
.lock                 locked by the run that writes
"""

from __future__ import annotations

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
from zerojax.offload.folder import DiskError

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


def lock(directory: Path) -> int:
    """Take the right to write into a directory, which ends with the process; a handle that `os.close` releases.

    Raises:
        CheckpointError: If another run has it, naming its process.
    """
    try:
        return folder.lock(directory)
    except DiskError as error:
        raise CheckpointError(f"{error} Checkpointer(..., read_only=True) restores beside it.") from error


def clean(directory: Path) -> list[str]:
    """Remove what killed saves left, and put back a checkpoint whose replacement was killed.

    Only for the run that has the lock.

    Returns:
        The names of what was there.
    """
    names = []
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith(OLD) and not (final := directory / entry.name.removeprefix(OLD)).exists():
            os.rename(entry, final)
        elif entry.name.startswith((TEMPORARY, OLD)):
            shutil.rmtree(entry)
        else:
            continue
        names.append(entry.name)
    return names


def temporary_name(step: int) -> str:
    """A folder to write a checkpoint into; another at each call, since a write of a failed save may come late."""
    return f"{TEMPORARY}{step_name(step)}-{secrets.token_hex(4)}"


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
    """Remove all but the newest checkpoints. Each is renamed first, so that a kill leaves no incomplete one."""
    for step in [] if keep is None else steps_in(directory)[:-keep]:
        doomed = directory / temporary_name(step)
        os.rename(directory / step_name(step), doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder as far as that can be done; a write still in progress may bring it back at first."""
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
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
