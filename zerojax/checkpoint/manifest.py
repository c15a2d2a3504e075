"""The manifest of a checkpoint: its leaves, and the size and sha256 of every file.

`manifest.sha256` has the digest of `manifest.json` itself, in the format of the command `sha256sum`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from zerojax.checkpoint.directory import MANIFEST, MANIFEST_DIGEST, write_synced
from zerojax.checkpoint.packing import Piece, damaged_leaves
from zerojax.checkpoint.records import Manifest, SavedLeaf
from zerojax.checkpoint.soundness import is_count, is_text, require_sound, unique_keys
from zerojax.optim.description import Description
from zerojax.version import version

VERSION = 2
# Far beyond what a model needs, so that a file which is mostly a hole does not fill the memory.
MANIFEST_BYTES, ZARRAY_BYTES = 1 << 30, 1 << 20
DIGESTS = ".digests."
NAMED = 5
OTHER = "has other contents than were written"
Damage = tuple[str, str, str]


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write a manifest, and its digest, into a checkpoint."""
    body = {"version": VERSION, **dataclasses.asdict(manifest)}
    text = json.dumps(body, indent=1) + "\n"
    write_synced(directory / MANIFEST, text)
    write_synced(directory / MANIFEST_DIGEST, digest_line(text.encode()))


def made_by(processes: int) -> dict[str, Any]:
    """Return the versions of the libraries that write a checkpoint, and the number of processes."""
    versions = {"zerojax": version(), "jax": jax.__version__, "optax": optax.__version__}
    versions["orbax-checkpoint"] = ocp.__version__
    return {**versions, "processes": processes}


def data_file(process: int) -> str:
    """Return the file in which a process keeps the data that goes with a state."""
    return f"data.{process}.json"


def read_manifest(directory: Path) -> Manifest | list[Damage]:
    """Read the manifest, or raise an error that says what is wrong with it.

    Raises:
        ValueError: If it was written by a later version of zerojax.
    """
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
        f"{directory} was written by a later version of zerojax, in format {made}. Restore it with that one."
    )


def manifest_of(body: dict[str, Any]) -> Manifest:
    """Build a manifest from its JSON. Any error means that it is not a manifest."""
    if not isinstance(body["leaves"], list):
        raise TypeError(f"the leaves are a {type(body['leaves']).__name__}")
    leaves = tuple(leaf_of(leaf) for leaf in body["leaves"])
    files = {name: (size, sha256) for name, (size, sha256) in body["files"].items()}
    manifest = Manifest(body["step"], leaves, files, body["made_by"], described(body.get("transformation")))
    require_sound(manifest)
    return manifest


def described(body: dict[str, Any] | None) -> Description | None:
    """Build a transformation's description from its JSON. Any error means that it is not one."""
    if body is None:
        return None
    found = Description(body["structure"], tuple(body["operations"]), body["program"])
    if not all(map(is_text, (found.structure, found.program, *found.operations))):
        raise ValueError("the transformation is described by something else than text")
    return found


def leaf_of(body: dict[str, Any]) -> SavedLeaf:
    """Build a leaf from its JSON. Checkpoints of format 1 have no pieces."""
    pieces = body.get("pieces", [])
    if not isinstance(pieces, list):
        raise TypeError(f"the pieces of a leaf are a {type(pieces).__name__}")
    pieces = tuple(Piece(**{**one, "start": tuple(one["start"]), "shape": tuple(one["shape"])}) for one in pieces)
    return SavedLeaf(**{**body, "path": tuple(body["path"]), "shape": tuple(body["shape"]), "pieces": pieces})


def plain_file(directory: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint, which may come from anyone.

    It cannot leave the folder, and cannot be a link within it, as a save writes none: of many links to one file a
    small checkpoint could make large arrays. Devices and pipes are refused, too.

    Raises:
        OSError: If it does not exist, or is not a plain file.
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
    """Read a file of a checkpoint whole.

    Raises:
        OSError: If it is longer than `limit` bytes, or no plain file.
    """
    path = plain_file(directory, name)
    if (size := path.stat().st_size) > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {limit} are expected", name)
    return path.read_bytes()


def digest_line(text: bytes) -> str:
    """Return what `sha256sum` would print for the manifest."""
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def digest(path: Path) -> tuple[int, str]:
    """Return bytes and sha256 of a file."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), sha256


def digests(directory: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return bytes and sha256 of files, by path relative to a folder."""
    names = list(names)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(lambda name: digest(directory / name), names), strict=True))


def damage_in(directory: Path, manifest: Manifest, names: Iterable[str]) -> list[Damage]:
    """Return the files of a checkpoint that differ from the manifest.

    Args:
        directory: The checkpoint.
        manifest: What was written.
        names: The files to look at, relative to `directory`.

    Returns:
        `(leaf, file, what)` for each damaged file, of packed leaves for each damaged leaf; empty if there is none.
    """
    packed = manifest.packed()

    def damage_of(name: str) -> list[Damage]:
        extents = packed.get(name, [])
        try:
            path, expected = plain_file(directory, name), manifest.files[name][0]
            # before it is read: a file that is mostly a hole takes no room, and hours
            size, sha256 = (path.stat().st_size, "") if path.stat().st_size != expected else digest(path)
            what = "" if sha256 == manifest.files[name][1] else OTHER
            what = what if size == expected else f"has {size} bytes instead of {expected}"
            leaves = damaged_leaves(path, extents)
        except FileNotFoundError:
            what, leaves = "is missing", [one.leaf for one in extents]
        except (OSError, ValueError) as error:
            what, leaves = f"cannot be read: {getattr(error, 'strerror', error)}", []
        # leaves may be damaged in a file that is as its digest says: then a stranger wrote their digests
        what = what or (OTHER if leaves else "")
        return [(leaf, name, what) for leaf in dict.fromkeys(leaves) or [manifest.leaf_of(name)] if what]

    with ThreadPoolExecutor(8) as pool:
        return [one for found in pool.map(damage_of, names) for one in found]


def in_words(damage: Sequence[Damage]) -> str:
    """Describe the first damages for an error."""
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {what}" for leaf, file, what in damage[:NAMED])
    return f"{named}; and {len(damage) - NAMED} more" if len(damage) > NAMED else named
