"""Describe a checkpoint in `manifest.json`, find a checkpoint, and verify it.

The manifest lists the leaves, and the size and sha256 of every other file. `manifest.sha256` has the digest of
`manifest.json` itself, in the format of the command `sha256sum`. Every file is read and digested before the checkpoint
is used: `damage_in` checks that each file of the manifest has the bytes that were written, and `lacking` checks that
the manifest lists all files that its leaves need. A save runs both before a commit, `damage_in` only on packed leaves.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from zerojax.checkpoint.directory import MANIFEST, MANIFEST_DIGEST, step_name, step_number, steps_in, write_synced
from zerojax.checkpoint.errors import CheckpointError, DamagedError, ReplacedError
from zerojax.comm.processes import Processes
from zerojax.layout.encoding import Encoding
from zerojax.optim.description import Description
from zerojax.version import version

ARRAYS = "arrays"
VERSION = 2
# (leaf, file, problem). The name of the leaf is empty if the file belongs to no leaf.
Damage = tuple[str, str, str]
NAMED = 5  # the number of damaged files that an error names
OTHER = "has other contents than were written"

T = TypeVar("T")


def data_file(process: int) -> str:
    return f"data.{process}.json"


@dataclasses.dataclass(frozen=True)
class PackedPiece:
    """A box of a leaf's storage (one range per dim), and its place in a file. Bytes are row-major and little-endian."""

    file: str  # name of the file in the checkpoint
    offset: int  # offset of the box's first byte in the file
    start: tuple[int, ...]  # index of the box's first element in the storage
    shape: tuple[int, ...]  # shape of the box
    sha256: str  # digest of the box's bytes


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """The record of a saved leaf."""

    name: str  # the name that errors print
    path: tuple[str, ...]  # the leaf's keys, starting with the field of the state
    shape: tuple[int, ...]  # logical shape
    dtype: str  # name of the element type
    kind: str  # layout of the storage: "replicated", "sharded" or "flat"
    folder: str  # name of the leaf's folder in `arrays/`; empty if the leaf has no elements, or is packed
    key: str | None = None  # name of the PRNG implementation, if the leaf holds PRNG keys
    pieces: tuple[PackedPiece, ...] = ()  # where a packed leaf is in the files of packed leaves
    encoding: Encoding | None = None  # of a leaf of the optimizer state that `Narrow` encodes

    @property
    def is_empty(self) -> bool:
        return not math.prod(self.shape)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Return the element type of the stored bytes; for PRNG keys, the type of their data."""
        return jnp.dtype(self.dtype if self.key is None else jnp.uint32)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Return the shape of the leaf's stored values without padding. A flat leaf has one dim."""
        return (math.prod(self.shape),) if self.kind == "flat" else self.shape

    @property
    def described(self) -> str:
        return str(self.encoding or f"{self.dtype}{list(self.shape)}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint in `manifest.json`."""

    step: int
    leaves: tuple[SavedLeaf, ...]
    files: dict[str, tuple[int, str]]  # size and sha256 of every file except the manifest and its digest, by path
    made_by: dict[str, Any]  # versions of the libraries, and the number of processes that wrote
    transformation: Description | None = None  # the optimizer's description; None if an early zerojax saved it
    metrics: dict[str, float] | None = None  # the metrics that were saved with the state

    def leaf_of(self, file: str) -> str:
        arrays, _, rest = file.partition("/")
        folder, separator, _ = rest.partition("/")
        names = [leaf.name for leaf in self.leaves if leaf.folder == folder]
        return names[0] if arrays == ARRAYS and separator and names else ""

    def packed(self) -> dict[str, list[tuple[SavedLeaf, PackedPiece]]]:
        """Return, for each file of packed leaves, these leaves with their pieces, in the order of the file."""
        files: dict[str, list[tuple[SavedLeaf, PackedPiece]]] = {}
        for leaf in self.leaves:
            for one in leaf.pieces:
                files.setdefault(one.file, []).append((leaf, one))
        return files


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
            return parse_manifest(body)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return [("", MANIFEST, f"is no manifest ({type(error).__name__}: {error})")]
    raise ValueError(
        f"{directory} was written by a later version of zerojax, in format {made}. Restore it with that version."
    )


def parse_manifest(body: dict[str, Any]) -> Manifest:
    """Build a manifest from its JSON. Any error means that the JSON is not a manifest."""
    leaves = tuple(map(parse_leaf, body["leaves"]))
    files = {name: (size, sha256) for name, (size, sha256) in body["files"].items()}
    found = body.get("transformation")
    described = found and Description(found["structure"], tuple(found["operations"]), found["program"])
    return Manifest(body["step"], leaves, files, body["made_by"], described, body.get("metrics"))


def parse_leaf(body: dict[str, Any]) -> SavedLeaf:
    """Build a leaf from its JSON. Leaves of format 1 have no pieces."""
    pieces, found = tuple(map(parse_piece, body.get("pieces", ()))), body.get("encoding")
    encoding = found and Encoding(**{**found, "shape": tuple(found["shape"])})
    changed = {"path": tuple(body["path"]), "shape": tuple(body["shape"]), "pieces": pieces, "encoding": encoding}
    return SavedLeaf(**{**body, **changed})


def parse_piece(body: dict[str, Any]) -> PackedPiece:
    return PackedPiece(**{**body, "start": tuple(body["start"]), "shape": tuple(body["shape"])})


def plain_file(directory: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint. Raise an `OSError` for a link, a pipe, or a file elsewhere."""
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


def read_verified(file: IO[bytes], leaf: SavedLeaf, piece: PackedPiece) -> np.ndarray | None:
    """Return the values of a piece, or None if the file has other bytes than were written."""
    file.seek(piece.offset)
    content = file.read(math.prod(piece.shape) * leaf.storage_dtype.itemsize)
    if hashlib.sha256(content).hexdigest() != piece.sha256:
        return None
    return np.frombuffer(content, leaf.storage_dtype).reshape(piece.shape)


def verify_steps(root: Path, step: int | None = None) -> list[int]:
    steps = steps_in(root)
    chosen = existing_step(root, step, steps)
    return [verified(root, one).step for one in (steps if step is None else [chosen])]


def retried(work: Callable[[], T]) -> T:
    """Call a function that reads a checkpoint. If another run replaces the checkpoint meanwhile, retry up to twice."""
    for _ in range(2):
        with contextlib.suppress(ReplacedError):
            return work()
    return work()


def newest_verified(root: Path, step: int | None, fallback: bool, processes: Processes) -> Manifest:
    """Check the files of the checkpoint of `step` (None means the newest step), and return its manifest.

    If the checkpoint is damaged and `fallback` is true, warn, and return the manifest of the newest intact checkpoint.

    Raises:
        CheckpointError: If there is no such checkpoint, or another run removed the checkpoint while it was verified.
        DamagedError: If the checkpoint is damaged and `fallback` is false, or if all checkpoints are damaged.
    """
    # The first process decides: a shared file system may show an older list to other processes.
    steps = json.loads(processes.exchange("list the checkpoints", json.dumps(steps_in(root)))[0])
    wanted = existing_step(root, step, steps)
    try:
        return verified(root, wanted, processes)
    except DamagedError as error:
        damaged = error
    for other in sorted(set(steps) - {wanted}, reverse=True):
        with contextlib.suppress(DamagedError):
            intact = verified(root, other, processes)
            break
    else:
        raise DamagedError(f"{damaged} No other checkpoint is intact.", step=wanted, damage=damaged.damage)
    if not fallback:
        remedy = f"The newest intact one is that of step {other}: pass step={other}, or fallback=True."
        raise DamagedError(f"{damaged} {remedy}", step=wanted, damage=damaged.damage, intact=other)
    warnings.warn(f"{damaged} Taking that of step {other} instead.", stacklevel=3)
    return intact


def existing_step(root: Path, step: int | None, steps: Sequence[int]) -> int:
    """Return `step`, or the newest of `steps` if `step` is None. Raise an error if there is no such checkpoint."""
    chosen = max(steps, default=None) if step is None else step_number(step)
    if chosen is None or chosen not in steps:
        of = "" if step is None else f" of step {step}"
        others = f"; it has the steps {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"There is no checkpoint{of} in {root}{others}.")
    return chosen


def verified(root: Path, step: int, processes: Processes | None = None) -> Manifest:
    """Check the files of a checkpoint, and return its manifest. Raise an error if a file is damaged.

    Each of `processes` checks a part of the files. With None, this process checks all of them.
    """
    folder = root / step_name(step)
    manifest = read_manifest(folder)
    index, count = (0, 1) if processes is None else (processes.index, processes.count)
    if not isinstance(manifest, Manifest):
        damage = manifest
    elif manifest.step != step:
        damage = [("", MANIFEST, f"is of step {manifest.step}: rename the folder to {step_name(manifest.step)}")]
    else:
        damage = damage_in(folder, manifest, list(manifest.files)[index::count])
    if processes is not None:
        messages = processes.exchange("verify a checkpoint", json.dumps(damage[:NAMED]))
        damage = [tuple(one) for text in messages for one in json.loads(text)]
    if isinstance(manifest, Manifest) and not damage:
        with reading(root, manifest):
            damage = lacking(folder, manifest)
    if damage or not isinstance(manifest, Manifest):
        require_unchanged(root, step, manifest)
        text = f"The checkpoint of step {step} in {root} is damaged ({damage_in_words(damage)})."
        raise DamagedError(text, step=step, damage=tuple(damage))
    return manifest


@contextlib.contextmanager
def reading(root: Path, manifest: Manifest) -> Iterator[None]:
    """Enter a context that reads a verified checkpoint. At the end, raise an error if another run replaced the files.

    Without this check, leaves of two checkpoints of the same step could be mixed.
    """
    try:
        yield
    except Exception as error:
        require_unchanged(root, manifest.step, manifest, error)
        raise
    require_unchanged(root, manifest.step, manifest)


def require_unchanged(root: Path, step: int, manifest: Manifest | list[Damage], cause: Exception | None = None) -> None:
    """Read the manifest of `step` again, and raise a `ReplacedError` if the result differs from `manifest`."""
    folder = root / step_name(step)
    if not folder.is_dir() or read_manifest(folder) != manifest:
        raise ReplacedError(
            f"The checkpoint of step {step} in {root} was removed or replaced while it was read, as a run that writes "
            f"there does. Restore again, or give that run's Checkpointer a larger keep=."
        ) from cause


def damage_in(directory: Path, manifest: Manifest, names: Sequence[str] | Mapping[str, object]) -> list[Damage]:
    """Return the damaged files among `names`. A file of packed leaves has one entry per damaged leaf."""
    packed = manifest.packed()

    def damage_of(name: str) -> list[Damage]:
        pieces, (expected, sha256) = packed.get(name, []), manifest.files[name]
        try:
            path = plain_file(directory, name)
            size = path.stat().st_size
            problem = "" if size == expected else f"has {size} bytes instead of {expected}"
            if not problem and digest(path) != (expected, sha256):
                problem = OTHER
            with path.open("rb") as file:
                leaves = [leaf.name for leaf, one in pieces if read_verified(file, leaf, one) is None]
        except FileNotFoundError:
            problem, leaves = "is missing", [leaf.name for leaf, _ in pieces]
        except (OSError, ValueError) as error:
            problem, leaves = f"cannot be read: {getattr(error, 'strerror', error)}", []
        # A file's digest is computed after the file is written, so a leaf can be damaged although the digest is right.
        problem = problem or (OTHER if leaves else "")
        return [(leaf, name, problem) for leaf in dict.fromkeys(leaves) or [manifest.leaf_of(name)] if problem]

    with ThreadPoolExecutor(8) as pool:
        return [damage for found in pool.map(damage_of, names) for damage in found]


def lacking(directory: Path, manifest: Manifest) -> list[Damage]:
    """Return, as damage, the files that a checkpoint needs, but that its manifest lacks or lists with a wrong size."""
    folders = {f"{ARRAYS}/{leaf.folder}": leaf for leaf in manifest.leaves if leaf.folder}
    needed = [("", data_file(i)) for i in range(manifest.made_by["processes"])]
    needed += [(leaf.name, one.file) for leaf in manifest.leaves for one in leaf.pieces]
    needed += [(leaf.name, f"{folder}/.zarray") for folder, leaf in folders.items()]
    if damage := [(leaf, name, "is missing") for leaf, name in needed if name not in manifest.files]:
        return damage
    for folder, leaf in folders.items():
        described = json.loads(plain_file(directory, f"{folder}/.zarray").read_text())
        grid = [-(-n // extent) for n, extent in zip(described["shape"], described["chunks"], strict=True)]
        expected = math.prod(described["chunks"]) * leaf.storage_dtype.itemsize
        for index in itertools.product(*map(range, grid)):
            name = f"{folder}/{'.'.join(map(str, index)) or '0'}"
            size, _ = manifest.files.get(name, (None, ""))
            if size != expected:
                problem = "is missing" if size is None else f"has {size} bytes instead of {expected}"
                damage.append((leaf.name, name, problem))
    return damage


def damage_in_words(damage: Sequence[Damage]) -> str:
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {problem}" for leaf, file, problem in damage[:NAMED])
    return f"{named}; and {len(damage) - NAMED} more" if len(damage) > NAMED else named
