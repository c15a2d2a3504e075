"""Write and read `manifest.json`, which lists a checkpoint's leaves, and the size and sha256 of every other file.

`manifest.sha256` has the digest of `manifest.json` itself, in the format of the command `sha256sum`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from zerojax.checkpoint.directory import MANIFEST, MANIFEST_DIGEST, write_synced
from zerojax.optim.transformation import Description
from zerojax.version import version

ARRAYS = "arrays"
VERSION = 2
# (leaf, file, problem). The name of the leaf is empty if the file belongs to no leaf.
Damage = tuple[str, str, str]


def data_file(process: int) -> str:
    return f"data.{process}.json"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a leaf's storage (one range per dim), and its place in a file. Bytes are row-major and little-endian."""

    file: str  # name of the file in the checkpoint
    offset: int  # offset of the box's first byte in the file
    start: tuple[int, ...]  # index of the box's first element in the storage
    shape: tuple[int, ...]  # shape of the box
    sha256: str  # digest of the box's bytes


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """A leaf as it was saved."""

    name: str  # the name that errors print
    path: tuple[str, ...]  # the leaf's keys, starting with the field of the state
    shape: tuple[int, ...]  # logical shape
    dtype: str  # name of the element type
    kind: str  # layout of the storage: "replicated", "sharded" or "flat"
    folder: str  # name of the leaf's folder in `arrays/`; empty if the leaf has no elements, or is packed
    key: str | None = None  # name of the PRNG implementation, if the leaf holds PRNG keys
    pieces: tuple[Piece, ...] = ()  # where a packed leaf is in the files of packed leaves

    @property
    def is_empty(self) -> bool:
        return not math.prod(self.shape)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Return the element type of the stored bytes; for PRNG keys, the type of their data."""
        return jnp.dtype(self.dtype if self.key is None else jnp.uint32)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored values without padding, in which a flat leaf has one dim."""
        return (math.prod(self.shape),) if self.kind == "flat" else self.shape

    @property
    def described(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint in `manifest.json`."""

    step: int
    leaves: tuple[SavedLeaf, ...]
    files: dict[str, tuple[int, str]]  # size and sha256 of every file except the manifest and its digest, by path
    made_by: dict[str, Any]  # versions of the libraries, and the number of processes that wrote
    transformation: Description | None = None  # the optimizer's description; None if an early zerojax saved it

    def leaf_of(self, file: str) -> str:
        arrays, _, rest = file.partition("/")
        folder, separator, _ = rest.partition("/")
        names = [leaf.name for leaf in self.leaves if leaf.folder == folder]
        return names[0] if arrays == ARRAYS and separator and names else ""

    def packed(self) -> dict[str, list[tuple[SavedLeaf, Piece]]]:
        """Return the pieces of each file of packed leaves, in the order of their places in the file."""
        files: dict[str, list[tuple[SavedLeaf, Piece]]] = {}
        for leaf in self.leaves:
            for one in leaf.pieces:
                files.setdefault(one.file, []).append((leaf, one))
        return {name: sorted(pieces, key=lambda pair: pair[1].offset) for name, pieces in files.items()}


def write_manifest(manifest: Manifest, directory: Path) -> None:
    body = {"version": VERSION, **dataclasses.asdict(manifest)}
    text = json.dumps(body, indent=1) + "\n"
    write_synced(directory / MANIFEST, text)
    write_synced(directory / MANIFEST_DIGEST, digest_line(text.encode()))


def made_by(processes: int) -> dict[str, Any]:
    versions = {"zerojax": version(), "jax": jax.__version__, "optax": optax.__version__}
    return {**versions, "orbax-checkpoint": ocp.__version__, "processes": processes}


def read_manifest(directory: Path) -> Manifest | list[Damage]:
    """Return the manifest, or the damage found in it. Raise a `ValueError` if a later version of zerojax wrote it."""
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
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return [("", MANIFEST, f"is no manifest ({type(error).__name__}: {error})")]
    raise ValueError(
        f"{directory} was written by a later version of zerojax, in format {made}. Restore it with that version."
    )


def manifest_of(body: dict[str, Any]) -> Manifest:
    """Build a manifest from its JSON. Any error means that the JSON is not a manifest."""
    leaves = tuple(map(leaf_of, body["leaves"]))
    files = {name: (size, sha256) for name, (size, sha256) in body["files"].items()}
    found = body.get("transformation")
    described = found and Description(found["structure"], tuple(found["operations"]), found["program"])
    return Manifest(body["step"], leaves, files, body["made_by"], described)


def leaf_of(body: dict[str, Any]) -> SavedLeaf:
    """Build a leaf from its JSON. Leaves of format 1 have no pieces."""
    pieces = (one | {"start": tuple(one["start"]), "shape": tuple(one["shape"])} for one in body.get("pieces", ()))
    pieces = tuple(Piece(**one) for one in pieces)
    return SavedLeaf(**{**body, "path": tuple(body["path"]), "shape": tuple(body["shape"]), "pieces": pieces})


def plain_file(directory: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint. Raise an `OSError` for a link, a pipe, or a path out of the folder."""
    root = os.path.realpath(directory)
    path = os.path.realpath(directory / name, strict=True)
    if path != f"{root}{os.sep}{name}" or not os.path.isfile(path):
        raise OSError(errno.EPERM, "it is no plain file in the checkpoint's folder", name)
    return Path(path)


def digest_line(text: bytes) -> str:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256
