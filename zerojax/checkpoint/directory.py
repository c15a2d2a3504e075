"""Name, commit and remove the folders in a checkpointer's directory, and clean up after killed saves.

step_00000100         a checkpoint, complete and on disk
step_00000200.aside   a checkpoint that was renamed because the run went back to an earlier step
.tmp-step_…-<hex>     a checkpoint that is being written or removed; its writer locks this folder
.old-step_…           a checkpoint that is being replaced
.zerojax.lock         a file, locked by the run that writes to the directory
"""

import logging
import operator
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zerojax.offload import folder

log = logging.getLogger("zerojax.checkpoint")

STEP = re.compile(r"step_(\d{8,4000})", re.ASCII)
ASIDE = re.compile(r"step_\d{8,}\.aside(-\d+)?", re.ASCII)
TEMPORARY, OLD = ".tmp-", ".old-"
OURS = re.compile(r"\.tmp-step_\d{8,}-[0-9a-f]{8,16}|\.old-step_\d{8,}", re.ASCII)
MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.sha256"


def step_number(step: Any) -> int:
    """Return the user's `step` as an int. Raise an error if it is not an integer, is negative, or has over 63 bits."""
    try:
        number = operator.index(step)
    except TypeError:
        number = None
    if number is None or isinstance(step, bool):
        raise TypeError(f"step= is {step!r}, a {type(step).__name__}. Give an integer.")
    if not 0 <= number < 1 << 63:
        given = number if number < 0 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"step= is {given}. Give an integer of at least 0 and less than 2**63.")
    return number


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending. If the directory does not exist, the list is empty."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = [(name, int(match[1])) for name in names if (match := STEP.fullmatch(name))]
    return sorted(step for name, step in steps if name == step_name(step))  # no save names a folder step_000000001


def clean(directory: Path) -> None:
    """Remove the folders of killed saves. If a killed save was replacing a checkpoint, restore the old checkpoint.

    The caller holds the directory's lock. A locked folder stays, because another run may still be writing to it (if the
    directory's lock file was deleted). Log the outcome for each folder.
    """
    for entry in sorted(directory.iterdir()):
        if not OURS.fullmatch(entry.name):
            continue
        try:
            if entry.is_symlink() or not entry.is_dir():
                outcome = "is no folder that a save made: it stays"
            elif entry.name.startswith(OLD) and not (final := directory / entry.name.removeprefix(OLD)).exists():
                os.rename(entry, final)
                outcome = "was put back"
            elif is_locked(entry):
                outcome = "may be another run's that is writing it: it stays"
            else:
                remove(entry)
                if entry.exists():
                    shutil.rmtree(entry)  # raises the error that `remove` ignored
                outcome = "was removed"
        except OSError as error:
            outcome = f"cannot be removed ({error.strerror}): it stays"
        log.warning("%s in %s, which a killed run left, %s.", entry.name, directory, outcome)


def temporary_name(step: int) -> str:
    """Return the name of a new folder to write a checkpoint into.

    Every save uses a new name, because late writes of a failed save may create that save's folder again.
    """
    return f"{TEMPORARY}{step_name(step)}-{secrets.token_hex(4)}"


def is_locked(temporary: Path) -> bool:
    try:
        folder.lock_folder(temporary).release()
    except BlockingIOError:
        return True
    return False


def commit(temporary: Path, step: int) -> None:
    """Rename a complete folder to the folder name of a step. All files of the folder are already on disk.

    If the step already has a checkpoint, the old checkpoint is removed. Any other folder with this name is renamed.
    """
    directory, final = temporary.parent, temporary.parent / step_name(step)
    old = directory / f"{OLD}{final.name}"
    if os.path.lexists(final):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old if is_removable(final) else directory / free_aside(directory, step))
    os.rename(temporary, final)
    sync_all([directory])
    shutil.rmtree(old, ignore_errors=True)


def is_removable(path: Path) -> bool:
    return not path.is_symlink() and any(os.path.lexists(path / name) for name in (MANIFEST, MANIFEST_DIGEST))


def free_aside(directory: Path, step: int) -> str:
    """Return an unused name, `step_….aside` or `step_….aside-<time>`, to which a step's folder can be renamed."""
    name = f"{step_name(step)}.aside"
    return f"{name}-{time.time_ns()}" if os.path.lexists(directory / name) else name


def rename_later_steps(directory: Path, step: int) -> None:
    """Rename the checkpoints of later steps, so that `step` is the newest.

    Later steps exist if the run restored an earlier step, by choice or because the later checkpoints are damaged.
    """
    for later in steps_in(directory):
        if later > step:
            free = free_aside(directory, later)
            os.rename(directory / step_name(later), directory / free)
            log.warning("%s: the run went back to before it and saved step %d.", free, step)


def prune(directory: Path, keep: int | None, spared: Callable[[], Collection[int | None]] = tuple) -> None:
    """Remove all but the newest `keep` checkpoints and the newest `keep` folders named `.aside`; None keeps all.

    The steps that `spared` returns stay, too. It reads manifests, so it is called only if a step could be removed.
    A folder is renamed before it is removed, so that a killed run leaves no incomplete checkpoint. A folder without a
    manifest stays, because another program may use the same names.
    """
    if keep is None:
        return
    asides = sorted(name for name in os.listdir(directory) if ASIDE.fullmatch(name))
    old = steps_in(directory)[:-keep]
    removed = sorted({*old} - {*spared()}) if old else []
    for name in [*map(step_name, removed), *asides[:-keep]]:
        doomed = directory / temporary_name(int(name[5:].partition(".")[0]))
        if is_removable(directory / name):
            os.rename(directory / name, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder, ignoring errors. Retry, because writes that are still in progress may create it again."""
    away = 0
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        away = 0 if path.exists() else away + 1
        if away == 4:
            return
        time.sleep(0.05)


def files_in(path: Path) -> list[str]:
    return sorted(os.path.relpath(os.path.join(base, name), path) for base, _, names in os.walk(path) for name in names)


def sync_all(paths: Iterable[Path]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(folder.sync, paths))


def write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
