"""Write versions of a run's parameters into a folder, from which other programs read the newest one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.checkpoint.directory import write_synced
from zerojax.checkpoint.errors import CheckpointError, attempt
from zerojax.checkpoint.export import export
from zerojax.checkpoint.importing import import_params
from zerojax.checkpoint.manifest import digest, digests
from zerojax.checkpoint.mapping import Names
from zerojax.checkpoint.processes import Processes
from zerojax.config import check_count
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from jaxtyping import PyTree

DIGESTS = "digests.json"
VERSION = re.compile(r"version_(\d{10,})", re.ASCII)
INCOMPLETE = re.compile(r"\.version_\d{10,}|\.\.version_\d{10,}\.tmp-\d+", re.ASCII)  # `export` adds a dot
TIMEOUT = 600.0


def publish_files(
    params: ZeroState | PyTree,
    folder: str | Path,
    *,
    version: int,
    mapping: Names | None = None,
    dtype: Any = None,
    keep: int = 2,
) -> Path:
    """Write a version of the parameters into a folder, for programs that are not part of this run.

    A version is a folder of safetensors, as `export` writes it, and the sha256 of each file. It gets its name when it
    is complete. Incomplete versions, which a killed run has left, are removed first, so only one run may write to the
    folder. All processes must call this function. A folder in `/dev/shm` is shared memory of one host.

    Args:
        params: As for `publish`.
        folder: The folder of all versions. It is created if it does not exist.
        version: The number of this version, such as the step. It must be larger than all others.
        mapping: As for `export`.
        dtype: As for `export`.
        keep: How many of the newest versions to keep.

    Returns:
        The folder of this version.

    Raises:
        CheckpointError: If a version with this number or a larger one exists, or files cannot be written.
        TypeError: If `version` or `keep` is not an integer.
        ValueError: If `version` is negative or `keep` is below 1. Also as for `export`.
    """
    check_count("version", version, "steps", least=0)
    check_count("keep", keep, "versions", least=1)
    folder = Path(folder).expanduser()
    path, temporary = folder / version_name(version), folder / f".{version_name(version)}"
    processes = Processes(TIMEOUT)
    found = versions_in(folder)
    failure = f"{folder} has version {found[-1]} already." if found and found[-1] >= version else ""
    if processes.is_first and not failure:
        failure = attempt(remove_incomplete, folder)
    processes.agree("publish files", failure if processes.is_first else "")
    export(params, temporary, mapping=mapping, dtype=dtype)
    failure = attempt(complete, temporary, path, keep) if processes.is_first else ""
    processes.agree("publish files", failure)
    return path


def complete(temporary: Path, path: Path, keep: int) -> None:
    """Write the digests of a version, give it its name, and remove older versions."""
    names = sorted(one.name for one in temporary.iterdir())
    write_synced(temporary / DIGESTS, json.dumps(digests(temporary, names), indent=1))
    temporary.rename(path)
    for version in versions_in(path.parent)[:-keep]:
        # First without its name, so that no program finds only some of the files.
        old = path.parent / version_name(version)
        shutil.rmtree(old.rename(path.parent / f".{old.name}"))


def remove_incomplete(folder: Path) -> None:
    """Remove versions that a killed run has not completed, or has begun to remove. They may have any number."""
    for one in folder.iterdir() if folder.is_dir() else ():
        if INCOMPLETE.fullmatch(one.name):
            shutil.rmtree(one)


def read_published(
    folder: str | Path, like: ZeroState | PyTree, *, mapping: Names | None = None, after: int | None = None
) -> tuple[int, PyTree] | None:
    """Read the newest version of parameters that `publish_files` has written, after checking its digests.

    If a version is removed while it is read, the newest one is read instead. With several processes, all processes must
    call this function, and all of them read the same version.

    Args:
        folder: The folder of all versions.
        like: Parameters or a state whose layout is wanted, as for `import_params`.
        mapping: As for `import_params`.
        after: Read only a version with a larger number.

    Returns:
        The number of the version and the parameters, or None if there is no such version.

    Raises:
        CheckpointError: If a file has other contents than were published.
        FileNotFoundError: If a process does not find a file of the newest version, and no newer one appears.
        ValueError: As for `import_params`.
    """
    processes, problem, last = Processes(TIMEOUT), "", -1
    while True:
        found = versions_in(folder := Path(folder).expanduser())
        newest = int(processes.agree("read published files", "", str(found[-1] if found else -1)))
        if newest < 0 or (after is not None and newest <= after):
            return None
        if newest == last:
            raise FileNotFoundError(f"{folder} has the version {newest}, but not all of its files. {problem}")
        path, last, params, missing = folder / version_name(newest), newest, None, ""
        try:
            check_digests(path)
            params = import_params(path, like, mapping=mapping)
        except FileNotFoundError as error:
            missing = f"Process {processes.index}: {error}"
        # A newer version may have been published while this one was read, so that this one was removed.
        answers = processes.exchange("end reading published files", missing)
        problem = next(filter(None, answers), "")
        if not problem:
            return newest, params


def check_digests(path: Path) -> None:
    """Raise a `CheckpointError` if a file of a version has other contents than were published."""
    for name, (size, sha256) in json.loads((path / DIGESTS).read_text()).items():
        if digest(path / name) != (size, sha256):
            raise CheckpointError(f"{path / name} has other contents than were published.")


def version_name(version: int) -> str:
    """Return the name of a version's folder."""
    return f"version_{version:010d}"


def versions_in(folder: Path) -> list[int]:
    """Return the numbers of all complete versions in a folder, ascending."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for one in found if (match := VERSION.fullmatch(one.name)))
