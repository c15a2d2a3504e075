"""Write and read `manifest.json`, which lists a checkpoint's leaves, and the size and sha256 of every other file.

`manifest.sha256` has the digest of `manifest.json` itself, in the format of the command `sha256sum`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from zerojax.checkpoint.directory import MANIFEST, MANIFEST_DIGEST, write_synced
from zerojax.checkpoint.packing import Piece
from zerojax.checkpoint.records import Manifest, SavedLeaf
from zerojax.checkpoint.soundness import is_count, is_text, require_sound, unique_keys
from zerojax.optim.description import Description
from zerojax.version import version

VERSION = 2
# Maximum bytes of a manifest, far more than any model needs. A forged sparse file must not fill the memory.
MANIFEST_BYTES = 1 << 30
# (leaf, file, problem). The name of the leaf is empty if the file belongs to no leaf.
Damage = tuple[str, str, str]


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
        text = read_limited(directory, name, MANIFEST_BYTES)
        line = read_limited(directory, name := MANIFEST_DIGEST, len(digest_line(b"")))
    except OSError as error:
        return [("", name, f"cannot be read: {error.strerror}")]
    if line != digest_line(text).encode():
        return [("", f"{MANIFEST} or {MANIFEST_DIGEST}", "the digest is of another manifest")]
    try:
        body = json.loads(text, object_pairs_hook=unique_keys)
        if not is_count(made := body.pop("version")) or made == 0:
            raise ValueError(f"it is of version {made!r}")
        if made <= VERSION:
            return manifest_of(body)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return [("", MANIFEST, f"is no manifest ({type(error).__name__}: {error})")]
    raise ValueError(
        f"{directory} was written by a later version of zerojax, in format {made}. Restore it with that version."
    )


def manifest_of(body: dict[str, Any]) -> Manifest:
    """Build a manifest from its JSON. Any error means that the JSON is not a manifest."""
    if not isinstance(body["leaves"], list):
        raise TypeError(f"the leaves are a {type(body['leaves']).__name__}")
    leaves = tuple(leaf_of(leaf) for leaf in body["leaves"])
    files = {name: (size, sha256) for name, (size, sha256) in body["files"].items()}
    manifest = Manifest(body["step"], leaves, files, body["made_by"], described(body.get("transformation")))
    require_sound(manifest)
    return manifest


def described(body: dict[str, Any] | None) -> Description | None:
    """Build a transformation's description from its JSON. Any error means that the JSON is not a description."""
    if body is None:
        return None
    found = Description(body["structure"], tuple(body["operations"]), body["program"])
    if not all(map(is_text, (found.structure, found.program, *found.operations))):
        raise ValueError("the transformation is described by something other than text")
    return found


def leaf_of(body: dict[str, Any]) -> SavedLeaf:
    """Build a leaf from its JSON. Leaves of format 1 have no pieces."""
    pieces = body.get("pieces", [])
    if not isinstance(pieces, list):
        raise TypeError(f"the pieces of a leaf are a {type(pieces).__name__}")
    pieces = tuple(Piece(**{**one, "start": tuple(one["start"]), "shape": tuple(one["shape"])}) for one in pieces)
    return SavedLeaf(**{**body, "path": tuple(body["path"]), "shape": tuple(body["shape"]), "pieces": pieces})


def plain_file(directory: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint, after checking that it is a plain file in the checkpoint's folder.

    A checkpoint may come from anyone. So a path outside the folder, a device and a pipe raise an `OSError`, as a
    missing file does. A link within the folder also raises an `OSError`, because many links to one file could make
    large arrays from a small checkpoint.
    """
    path, root = (os.path.realpath(one) for one in (directory / name, directory))
    if not path.startswith(f"{root}{os.sep}"):
        raise OSError(errno.EPERM, "it is outside the checkpoint", name)
    if path != os.path.join(root, name):
        raise OSError(errno.EPERM, "it is a link, or another name of a file", name)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EPERM, "it is no plain file", name)
    return Path(path)


def read_limited(directory: Path, name: str, limit: int) -> bytes:
    path = plain_file(directory, name)
    if (size := path.stat().st_size) > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit} are expected", name)
    return path.read_bytes()


def digest_line(text: bytes) -> str:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256


def digests(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    names = list(names)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(lambda name: digest(directory / name), names), strict=True))
