"""The manifest of a checkpoint: its leaves, and the size and sha256 of every file.

`manifest.sha256` has the digest of `manifest.json` itself, in the format of the command `sha256sum`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import operator
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from zerojax.checkpoint.directory import write_synced
from zerojax.version import version

VERSION = 1
ARRAYS = "arrays"
MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.sha256"
DIGESTS = ".digests."
NAMED = 5
Damage = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """A leaf as it was saved.

    Attributes:
        name: As errors name it.
        path: Its keys, from the field of the state on.
        shape: Logical shape.
        dtype: Element type, by name.
        kind: Whether its storage is replicated, sharded or flat.
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
        files: `{path: (bytes, sha256)}` of every file but the manifest and its digest.
        made_by: Versions of the libraries, and how many processes wrote.
    """

    step: int
    leaves: tuple[SavedLeaf, ...]
    files: dict[str, tuple[int, str]]
    made_by: dict[str, Any]

    def write(self, directory: Path) -> None:
        """Write it into the checkpoint."""
        body = {"version": VERSION, **dataclasses.asdict(self)}
        text = json.dumps(body, indent=1) + "\n"
        write_synced(directory / MANIFEST, text)
        write_synced(directory / MANIFEST_DIGEST, digest_line(text.encode()))

    def leaf_of(self, file: str) -> str:
        """The name of the leaf that a file belongs to; empty if none."""
        arrays, _, rest = file.partition("/")
        folder, separator, _ = rest.partition("/")
        names = [leaf.name for leaf in self.leaves if leaf.folder == folder]
        return names[0] if arrays == ARRAYS and separator and names else ""


def made_by(processes: int) -> dict[str, Any]:
    """Versions of the libraries that write a checkpoint, and the number of processes."""
    versions = {"zerojax": version(), "jax": jax.__version__, "orbax-checkpoint": ocp.__version__}
    return {**versions, "processes": processes}


def data_file(process: int) -> str:
    """Where a process keeps the data that goes with a state."""
    return f"data.{process}.json"


def read_manifest(directory: Path) -> Manifest | list[Damage]:
    """The manifest, or what is wrong with it.

    Raises:
        ValueError: If it was written by a later version of zerojax.
    """
    name = MANIFEST
    try:
        text = plain_file(directory, name).read_bytes()
        line = plain_file(directory, name := MANIFEST_DIGEST).read_bytes()
    except OSError as error:
        return [("", name, f"cannot be read: {error.strerror}")]
    if line != digest_line(text).encode():
        return [("", f"{MANIFEST} or {MANIFEST_DIGEST}", "the digest is of another manifest")]
    try:
        body = json.loads(text)
        if (made := body.pop("version")) <= VERSION:
            return manifest_of(body)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return [("", MANIFEST, f"is no manifest ({type(error).__name__}: {error})")]
    raise ValueError(
        f"{directory} was written by a later version of zerojax, in format {made}. Restore it with that one."
    )


def manifest_of(body: dict[str, Any]) -> Manifest:
    """A manifest from its JSON; whatever is raised, it is none."""
    leaves = tuple(
        SavedLeaf(**{**leaf, "path": tuple(leaf["path"]), "shape": tuple(leaf["shape"])}) for leaf in body["leaves"]
    )
    files = {name: (size, sha256) for name, (size, sha256) in body["files"].items()}
    for leaf in leaves:
        words = (leaf.name, leaf.dtype, leaf.kind, leaf.folder, leaf.key or "", *leaf.path)
        if not all(isinstance(word, str) for word in words) or any(operator.index(n) < 0 for n in leaf.shape):
            raise ValueError(f"leaf {leaf.name!r}")
    if not 0 < operator.index(body["made_by"]["processes"]) <= len(files):
        raise ValueError("the number of processes")
    return Manifest(operator.index(body["step"]), leaves, files, body["made_by"])


def plain_file(directory: Path, name: str) -> Path:
    """A file of a checkpoint, which may come from anyone: it may not leave the folder, or be a device or a pipe.

    Raises:
        OSError: If it is none, or is not there.
    """
    path, root = (os.path.realpath(one) for one in (directory / name, directory))
    if not path.startswith(f"{root}{os.sep}"):
        raise OSError(errno.EPERM, "it is outside the checkpoint", name)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EPERM, "it is no plain file", name)
    return Path(path)


def digest_line(text: bytes) -> str:
    """What `sha256sum` would print of the manifest."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def digest(path: Path) -> tuple[int, str]:
    """Bytes and sha256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256


def digests(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Bytes and sha256 of files, by path relative to a folder."""
    names = list(names)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(lambda name: digest(directory / name), names), strict=True))


def damage_in(directory: Path, manifest: Manifest, names: Iterable[str]) -> list[Damage]:
    """Which files of a checkpoint differ from the manifest.

    Args:
        directory: The checkpoint.
        manifest: What was written.
        names: The files to look at, relative to `directory`.

    Returns:
        `(leaf, file, what)` for each damaged file; empty if there is none.
    """

    def problem(name: str) -> str:
        try:
            size, sha256 = digest(plain_file(directory, name))
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read: {getattr(error, 'strerror', error)}"
        if size != manifest.files[name][0]:
            return f"has {size} bytes instead of {manifest.files[name][0]}"
        return "" if sha256 == manifest.files[name][1] else "has other contents than were written"

    names = list(names)
    with ThreadPoolExecutor(8) as pool:
        problems = zip(names, pool.map(problem, names), strict=True)
        return [(manifest.leaf_of(name), name, what) for name, what in problems if what]


def in_words(damage: Sequence[Damage]) -> str:
    """The first damaged files, for an error."""
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {what}" for leaf, file, what in damage[:NAMED])
    return f"{named}; and {len(damage) - NAMED} more files" if len(damage) > NAMED else named
