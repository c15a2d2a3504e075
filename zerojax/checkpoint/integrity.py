"""The manifest of a checkpoint: its leaves, and size and digest of every file.

`manifest.json` says what was written; `manifest.sha256` vouches for it, in the format of the
command `sha256sum`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerojax.checkpoint.files import write_synced

VERSION = 1
ARRAYS = "arrays"
MANIFEST, VOUCHER = "manifest.json", "manifest.sha256"
Damage = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Record:
    """A leaf as it was saved.

    Attributes:
        name: As errors name it.
        path: Its keys, from the field of the state on.
        shape: Logical shape.
        dtype: Element type, by name.
        kind: Whether it lies whole, cut or flat.
        folder: Its folder under `arrays/`; empty if it has no elements.
        key: The implementation of a PRNG key, or None.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kind: str
    folder: str
    key: str | None = None

    @property
    def described(self) -> str:
        """Type and logical shape: `float32[16, 24]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: Its step.
        leaves: Its leaves.
        files: `{path: (bytes, sha256)}` of every file but the manifest's own two.
        made_by: Versions of the libraries, and how many processes wrote.
    """

    step: int
    leaves: tuple[Record, ...]
    files: dict[str, tuple[int, str]]
    made_by: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write it beside the files it is about."""
        body = {"version": VERSION, **dataclasses.asdict(self)}
        text = json.dumps(body, indent=1) + "\n"
        write_synced(directory / MANIFEST, text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        write_synced(directory / VOUCHER, f"{digest}  {MANIFEST}\n")

    def owner(self, file: str) -> str:
        """The name of the leaf that a file belongs to; empty if none."""
        by_folder = {leaf.folder: leaf.name for leaf in self.leaves if leaf.folder}
        parts = file.split("/")
        return by_folder.get(parts[1], "") if len(parts) > 2 and parts[0] == ARRAYS else ""


def data_file(process: int) -> str:
    """Where a process keeps the data that goes with a state."""
    return f"data.{process}.json"


def digest_file(process: int) -> str:
    """Where a process leaves its digests for the first one, while a checkpoint is written."""
    return f".digests.{process}.json"


def is_digest_file(name: str) -> bool:
    """Whether a file is one of those."""
    return name.startswith(".digests.")


def made_by(processes: int) -> dict[str, Any]:
    """Versions of the libraries that write a checkpoint, and the number of processes."""
    versions = {name: version(name) for name in ("zerojax", "jax", "orbax-checkpoint")}
    return {**versions, "processes": processes}


def read_manifest(directory: Path) -> Manifest | list[Damage]:
    """The manifest, or what is wrong with it.

    Raises:
        ValueError: If it was written by a later version of zerojax.
    """
    try:
        text, voucher = (directory / MANIFEST).read_bytes(), (directory / VOUCHER).read_bytes()
    except OSError as error:
        return [("", str(error.filename or MANIFEST).rsplit("/", 1)[-1], f"cannot be read: {error.strerror}")]
    if voucher != f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode():
        return [("", f"{MANIFEST} or {VOUCHER}", "they do not belong to each other")]
    body = json.loads(text)
    if body.pop("version") > VERSION:
        raise ValueError(f"{directory} was written by a later version of zerojax. Restore it with that one.")
    leaves = tuple(
        Record(**{**leaf, "path": tuple(leaf["path"]), "shape": tuple(leaf["shape"])}) for leaf in body["leaves"]
    )
    files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
    return Manifest(body["step"], leaves, files, body["made_by"])


def digests(directory: Path, files: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Bytes and sha256 of files, by path relative to a folder."""

    def one(name: str) -> tuple[int, str]:
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest

    names = list(files)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def damage_in(directory: Path, manifest: Manifest, files: Sequence[str] | None = None) -> list[Damage]:
    """What is wrong with the files of a checkpoint.

    Args:
        directory: The checkpoint.
        manifest: What was written.
        files: Which files to look at; None is all.

    Returns:
        One `(leaf, file, what)` for each damaged file; empty if all is well.
    """
    names = list(manifest.files) if files is None else list(files)

    def one(name: str) -> str:
        size, digest = manifest.files[name]
        path = directory / name
        try:
            if (found := path.stat().st_size) != size:
                return f"has {found} bytes instead of {size}"
            with path.open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return "" if same else "has other contents than were written"

    with ThreadPoolExecutor(8) as pool:
        found = zip(names, pool.map(one, names), strict=True)
        return [(manifest.owner(name), name, what) for name, what in found if what]
