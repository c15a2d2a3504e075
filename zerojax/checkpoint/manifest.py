"""Describe a checkpoint in `manifest.json`, find a checkpoint, and verify it.

The manifest lists the leaves, where each piece of a leaf is, and the sha256 of everything that was written.
`manifest.sha256` has the digest of `manifest.json` itself, in the format of the command `sha256sum`. Every file is read
and digested before the checkpoint is used: `damage_in` finds bytes that differ from those that were written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from zerojax.checkpoint.directory import MANIFEST, MANIFEST_DIGEST, step_name, step_number, steps_in, write_synced
from zerojax.checkpoint.errors import CheckpointError, DamagedError, ReplacedError
from zerojax.comm.processes import Processes
from zerojax.optim.description import Description
from zerojax.version import version

VERSION = 3
BUFFER_BYTES = 256 << 10  # bytes that are read and digested at once, while a processor's cache holds them
# (leaf, file, problem). The name of the leaf is empty if the file belongs to no leaf.
Damage = tuple[str, str, str]
NAMED = 5
OTHER = "has other contents than were written"

T = TypeVar("T")


def data_file(process: int) -> str:
    return f"data.{process}.json"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes with a digest: a box of a leaf's storage (one range per dim), row-major and little-endian, or a file."""

    file: str  # name of the file in the checkpoint
    offset: int  # offset of the first byte in the file
    size: int  # in bytes
    start: tuple[int, ...]  # index of the box's first element in the storage
    shape: tuple[int, ...]  # shape of the box
    sha256: str


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """A leaf as it was saved."""

    name: str  # the name that errors print
    path: tuple[str, ...]  # the leaf's keys, starting with the field of the state
    shape: tuple[int, ...]  # logical shape
    dtype: str  # name of the element type
    kind: str  # layout of the storage: "replicated", "sharded" or "flat"
    key: str | None = None  # name of the PRNG implementation, if the leaf holds PRNG keys
    pieces: tuple[Piece, ...] = ()  # where the storage is

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
    data: tuple[Piece, ...]  # the file of each process with its data
    made_by: dict[str, Any]  # versions of the libraries, and the number of processes that wrote
    transformation: Description  # the optimizer's description

    def pieces(self) -> list[tuple[str, Piece]]:
        """Return every piece with the name of its leaf, or "". The pieces of a file cover all of it."""
        of_leaves = [(leaf.name, one) for leaf in self.leaves for one in leaf.pieces]
        return [*(("", one) for one in self.data), *of_leaves]


def write_manifest(manifest: Manifest, directory: Path) -> None:
    body = {"version": VERSION, **dataclasses.asdict(manifest)}
    text = json.dumps(body) + "\n"
    write_synced(directory / MANIFEST, text)
    write_synced(directory / MANIFEST_DIGEST, digest_line(text.encode()))


def made_by(processes: int) -> dict[str, Any]:
    return {"zerojax": version(), "jax": jax.__version__, "optax": optax.__version__, "processes": processes}


def read_manifest(directory: Path) -> Manifest | list[Damage]:
    """Return the manifest, or the damage found in it. Raise a `ValueError` if another version of zerojax wrote it."""
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
        if (made := int(body.pop("version"))) == VERSION:
            return manifest_of(body)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return [("", MANIFEST, f"is no manifest ({type(error).__name__}: {error})")]
    raise ValueError(
        f"{directory} was written by another version of zerojax, in format {made}, and this version reads only format "
        f"{VERSION}. Restore the checkpoint with that version, and export its parameters."
    )


def manifest_of(body: dict[str, Any]) -> Manifest:
    """Build a manifest from its JSON. Any error means that the JSON is not a manifest."""
    leaves = tuple(map(leaf_of, body["leaves"]))
    made = body["transformation"]
    described = Description(made["structure"], tuple(made["operations"]), made["program"])
    return Manifest(body["step"], leaves, tuple(map(piece_of, body["data"])), body["made_by"], described)


def leaf_of(body: dict[str, Any]) -> SavedLeaf:
    pieces = tuple(map(piece_of, body["pieces"]))
    return SavedLeaf(**{**body, "path": tuple(body["path"]), "shape": tuple(body["shape"]), "pieces": pieces})


def piece_of(body: dict[str, Any]) -> Piece:
    return Piece(**{**body, "start": tuple(body["start"]), "shape": tuple(body["shape"])})


def plain_file(directory: Path, name: str) -> Path:
    """Return the path of a file of a checkpoint. Raise an `OSError` for a link, a pipe, or a path out of the folder."""
    root = os.path.realpath(directory)
    path = os.path.realpath(directory / name, strict=True)
    if path != f"{root}{os.sep}{name}" or not os.path.isfile(path):
        raise OSError(errno.EPERM, "it is no plain file in the checkpoint's folder", name)
    return Path(path)


def digest_line(text: bytes) -> str:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n"


def digest(path: Path, piece: Piece) -> str:
    left, sha256, buffer = piece.size, hashlib.sha256(), memoryview(bytearray(min(piece.size, BUFFER_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while count := file.readinto(buffer[:left]):
            sha256.update(buffer[:count])
            left -= count
    return sha256.hexdigest()


def verify_steps(root: Path, step: int | None = None) -> list[int]:
    steps = (steps_in(root) or [existing_step(root, None)]) if step is None else [existing_step(root, step)]
    return [verified(root, one).step for one in steps]


def retried(work: Callable[[], T]) -> T:
    """Call a function that reads a checkpoint. If another run replaces the checkpoint meanwhile, retry up to twice."""
    for _ in range(2):
        with contextlib.suppress(ReplacedError):
            return work()
    return work()


def newest_verified(root: Path, step: int | None, fallback: bool, processes: Processes) -> Manifest:
    """Check the files of `step`'s checkpoint (None means the newest step), and return the checkpoint's manifest.

    Raises:
        CheckpointError: If there is no such checkpoint, or another run removed the checkpoint while it was verified.
        DamagedError: If the checkpoint is damaged. With `fallback`, only if every other checkpoint is damaged, too.
    """
    # The first process decides: a shared file system may show an older list to other processes.
    listed = processes.exchange("list the checkpoints", json.dumps([existing_step(root, step), *steps_in(root)]))
    wanted, *steps = json.loads(listed[0])
    damaged: DamagedError | None = None
    for one in [wanted, *sorted(set(steps) - {wanted}, reverse=True)]:
        try:
            intact = verified(root, one, processes)
        except DamagedError as error:
            damaged = damaged or error
            continue
        if damaged is None:
            return intact
        if fallback:
            warnings.warn(f"{damaged} Taking that of step {one} instead.", stacklevel=3)
            return intact
        remedy = f"The newest intact one is that of step {one}: pass step={one}, or fallback=True."
        raise DamagedError(f"{damaged} {remedy}", step=wanted, damage=damaged.damage, intact=one)
    assert damaged is not None
    raise DamagedError(f"{damaged} No other checkpoint is intact.", step=wanted, damage=damaged.damage)


def existing_step(root: Path, step: int | None) -> int:
    """Return `step`, or the newest step if `step` is None. Raise an error if there is no such checkpoint."""
    steps = steps_in(root)
    chosen = max(steps, default=None) if step is None else step_number(step)
    if chosen is None or chosen not in steps:
        of = "" if step is None else f" of step {step}"
        others = f"; there are those of steps {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"There is no checkpoint{of} in {root}{others}.")
    return chosen


def verified(root: Path, step: int, processes: Processes | None = None) -> Manifest:
    """Return the manifest of a checkpoint, or raise a `DamagedError`. Each process verifies its share."""
    folder = root / step_name(step)
    manifest = read_manifest(folder)
    index, count = (0, 1) if processes is None else (processes.index, processes.count)
    if not isinstance(manifest, Manifest):
        damage = manifest
    elif manifest.step != step:
        damage = [("", MANIFEST, f"is of step {manifest.step}: rename the folder to {step_name(manifest.step)}")]
    else:
        damage = damage_in(folder, manifest.pieces(), index, count)
    if processes is not None:
        messages = processes.exchange("verify a checkpoint", json.dumps(damage[:NAMED]))
        damage = [tuple(one) for text in messages for one in json.loads(text)]
    if damage or not isinstance(manifest, Manifest):
        require_unchanged(root, step, manifest)
        text = f"The checkpoint of step {step} in {root} is damaged ({damage_in_words(damage)})."
        raise DamagedError(text, step=step, damage=tuple(damage))
    return manifest


@contextlib.contextmanager
def reading(root: Path, manifest: Manifest) -> Iterator[None]:
    """Enter a context in which a verified checkpoint is read. At its end, raise an error if another run replaced it.

    Without this check, a replaced checkpoint could restore a mixture of two.
    """
    try:
        yield
    finally:  # also after an error, which a replaced file may have caused
        require_unchanged(root, manifest.step, manifest)


def require_unchanged(root: Path, step: int, manifest: Manifest | list[Damage]) -> None:
    """Read the manifest of `step` again, and raise a `ReplacedError` if the result differs from `manifest`."""
    folder = root / step_name(step)
    if not folder.is_dir() or read_manifest(folder) != manifest:
        raise ReplacedError(
            f"The checkpoint of step {step} in {root} was removed or replaced while it was read, as a run that writes "
            f"there does. Restore again, or give that run's Checkpointer a larger keep=."
        )


def damage_in(directory: Path, pieces: Sequence[tuple[str, Piece]], index: int = 0, count: int = 1) -> list[Damage]:
    """Return the damage found by process `index` of `count`, which share the reading of named `pieces`."""
    sizes: dict[str, int] = {}
    for _, one in pieces:
        sizes[one.file] = max(sizes.get(one.file, 0), one.offset + one.size)

    checked = functools.cache(functools.partial(plain_file, directory))

    def problem_of(one: Piece) -> str:
        try:
            path, expected = checked(one.file), sizes[one.file]
            size = path.stat().st_size
            is_long = size > expected == one.offset + one.size  # the last piece of a file says so
            if digest(path, one) == one.sha256 and not is_long:
                return ""
            return OTHER if size == expected else f"has {size} bytes instead of {expected}"
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError) as error:
            return f"cannot be read: {getattr(error, 'strerror', error)}"

    names, ours = zip(*pieces[index::count], strict=True) if pieces[index::count] else ((), ())
    with ThreadPoolExecutor(8) as pool:
        problems = pool.map(problem_of, ours)
        return [(name, one.file, what) for name, one, what in zip(names, ours, problems, strict=True) if what]


def damage_in_words(damage: Sequence[Damage]) -> str:
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {problem}" for leaf, file, problem in damage[:NAMED])
    return f"{named}; and {len(damage) - NAMED} more" if len(damage) > NAMED else named
