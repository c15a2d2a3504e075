"""Find a checkpoint and verify it. Every file is read and digested before the checkpoint is used.

`damage_in` checks that each file of the manifest has the bytes that were written. `incomplete` checks that the manifest
lists all files that its leaves need.
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

import jax.numpy as jnp

from zerojax.checkpoint.directory import step_name, step_number, steps_in
from zerojax.checkpoint.errors import CheckpointError, DamagedError, ReplacedError
from zerojax.checkpoint.manifest import MANIFEST, Damage, digest, plain_file, read_limited, read_manifest
from zerojax.checkpoint.packing import damaged_leaves
from zerojax.checkpoint.processes import Processes
from zerojax.checkpoint.records import ARRAYS, Manifest, SavedLeaf, data_file
from zerojax.checkpoint.soundness import is_storage_of

T = TypeVar("T")
NAMED = 5
OTHER = "has other contents than were written"
ZARRAY, ZARRAY_BYTES = ".zarray", 1 << 20
# The zarr metadata that `arrays.write` makes. It determines the name and size of every file of an array.
WRITTEN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}


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
        damage = damage or incomplete(folder, manifest, manifest.leaves[index::count])
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
        extents, (expected, sha256) = packed.get(name, []), manifest.files[name]
        try:
            path = plain_file(directory, name)
            size = path.stat().st_size
            problem = "" if size == expected else f"has {size} bytes instead of {expected}"
            # A file of another size is not digested, because a huge sparse file is cheap to forge, and slow to read.
            if not problem and digest(path) != (expected, sha256):
                problem = OTHER
            leaves = damaged_leaves(path, extents)
        except FileNotFoundError:
            problem, leaves = "is missing", [one.leaf for one in extents]
        except (OSError, ValueError) as error:
            problem, leaves = f"cannot be read: {getattr(error, 'strerror', error)}", []
        # If a leaf is damaged although the file's digest is right, then the leaf's digest is forged.
        problem = problem or (OTHER if leaves else "")
        return [(leaf, name, problem) for leaf in dict.fromkeys(leaves) or [manifest.leaf_of(name)] if problem]

    with ThreadPoolExecutor(8) as pool:
        return [damage for found in pool.map(damage_of, names) for damage in found]


def incomplete(directory: Path, manifest: Manifest, leaves: Sequence[SavedLeaf]) -> list[Damage]:
    """Return each leaf's first file that the manifest does not list, or lists with another size."""
    data = [data_file(i) for i in range(manifest.made_by["processes"])]
    damage = [("", name, "is missing") for name in data if name not in manifest.files]
    for leaf in leaves:
        missing = [(leaf.name, one.file, "is missing") for one in leaf.pieces if one.file not in manifest.files]
        damage += missing[:1]
        if leaf.folder:
            damage += itertools.islice(damage_of_folder(directory, leaf, manifest.files), 1)
    return damage


def damage_of_folder(directory: Path, leaf: SavedLeaf, files: Mapping[str, tuple[int, str]]) -> Iterator[Damage]:
    """Yield each problem with the files of a leaf that has a folder. `files` are all files of the manifest."""
    prefix = f"{ARRAYS}/{leaf.folder}/"
    if prefix + ZARRAY not in files:
        yield leaf.name, prefix + ZARRAY, "is missing"
        return
    try:
        described = json.loads(read_limited(directory, f"{prefix}{ZARRAY}", ZARRAY_BYTES))
        shape, extents, dtype = described["shape"], described["chunks"], jnp.dtype(described["dtype"])
        grid = [-(-n // extent) for n, extent in zip(shape, extents, strict=True)]
        # These bounds come first, because the loops below take time and memory in proportion to the grid.
        fits = (
            WRITTEN.items() <= described.items()
            and all(isinstance(n, int) and n > 0 for n in grid)
            # A chunk must not be larger than the array, because a reader loads a whole chunk into memory.
            and all(type(n) is int and 0 < n <= max(m, 1) for n, m in zip(extents, shape, strict=True))
            and math.prod(grid) <= len(files)
        )
        fits = fits and is_storage_of(leaf, shape, dtype)
        size = math.prod(extents) * dtype.itemsize
    except OSError as error:  # the file was just digested, so another run may have removed it since
        yield leaf.name, prefix + ZARRAY, f"cannot be read: {error.strerror}"
        return
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        yield leaf.name, prefix + ZARRAY, f"does not describe an array ({type(error).__name__}: {error})"
        return
    if not fits:
        yield leaf.name, prefix + ZARRAY, f"describes another array than {leaf.described} in so many files"
        return
    for index in itertools.product(*map(range, grid)):
        name = prefix + (".".join(map(str, index)) or "0")
        if name not in files:
            yield leaf.name, name, "is missing"
        elif files[name][0] != size:
            yield leaf.name, name, f"has {files[name][0]} bytes instead of {size}"


def in_words(damage: Sequence[Damage]) -> str:
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {problem}" for leaf, file, problem in damage[:NAMED])
    return f"{named}; and {len(damage) - NAMED} more" if len(damage) > NAMED else named
