"""Find a checkpoint and verify it. Every file is read and digested before the checkpoint is used.

`damage_in` checks that each file of the manifest has the bytes that were written. Before a checkpoint is committed,
`lacking` checks that the manifest lists all files that its leaves need.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from zerojax.checkpoint.arrays import read_verified
from zerojax.checkpoint.directory import step_name, step_number, steps_in
from zerojax.checkpoint.errors import CheckpointError, DamagedError, Processes, ReplacedError
from zerojax.checkpoint.manifest import (
    ARRAYS,
    MANIFEST,
    Damage,
    Manifest,
    SavedLeaf,
    data_file,
    digest,
    plain_file,
    read_manifest,
)

T = TypeVar("T")
NAMED = 5
OTHER = "has other contents than were written"


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
    """Return the manifest of a checkpoint, or raise a `DamagedError`. Each process verifies its share of the files."""
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
    if damage or not isinstance(manifest, Manifest):
        require_unchanged(root, step, manifest)
        text = f"The checkpoint of step {step} in {root} is damaged ({in_words(damage)})."
        raise DamagedError(text, step=step, damage=tuple(damage))
    return manifest


@contextlib.contextmanager
def reading(root: Path, manifest: Manifest) -> Iterator[None]:
    """Enter a context in which a verified checkpoint is read. At its end, raise an error if another run replaced it.

    Without this check, a replaced checkpoint could restore zeros, because zarr reads missing files as zeros.
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
        # A leaf can be damaged although the file's digest is right: the leaf's digest is computed before it is written.
        problem = problem or (OTHER if leaves else "")
        return [(leaf, name, problem) for leaf in dict.fromkeys(leaves) or [manifest.leaf_of(name)] if problem]

    with ThreadPoolExecutor(8) as pool:
        return [damage for found in pool.map(damage_of, names) for damage in found]


def lacking(directory: Path, manifest: Manifest) -> list[Damage]:
    """Return the files that the leaves and processes of a checkpoint need, and that it lacks or has in another size."""
    damage = [("", data_file(i), "is missing") for i in range(manifest.made_by["processes"])]
    damage += [(leaf.name, one.file, "is missing") for leaf in manifest.leaves for one in leaf.pieces]
    damage = [one for one in damage if one[1] not in manifest.files]
    for leaf in manifest.leaves:
        if leaf.folder:
            damage += damage_of_folder(directory, leaf, manifest.files)
    return damage


def damage_of_folder(directory: Path, leaf: SavedLeaf, files: Mapping[str, tuple[int, str]]) -> Iterator[Damage]:
    prefix = f"{ARRAYS}/{leaf.folder}/"
    try:
        described = json.loads((directory / f"{prefix}.zarray").read_text())
    except FileNotFoundError:
        yield leaf.name, f"{prefix}.zarray", "is missing"
        return
    grid = [-(-n // extent) for n, extent in zip(described["shape"], described["chunks"], strict=True)]
    expected = math.prod(described["chunks"]) * leaf.storage_dtype.itemsize
    for index in itertools.product(*map(range, grid)):
        name = prefix + (".".join(map(str, index)) or "0")
        size = files[name][0] if name in files else None
        if size != expected:
            yield leaf.name, name, "is missing" if size is None else f"has {size} bytes instead of {expected}"


def in_words(damage: Sequence[Damage]) -> str:
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {problem}" for leaf, file, problem in damage[:NAMED])
    return f"{named}; and {len(damage) - NAMED} more" if len(damage) > NAMED else named
