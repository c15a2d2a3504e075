"""Find a checkpoint and verify it: every file is read and digested before one is used."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from zerojax.checkpoint.completeness import incomplete
from zerojax.checkpoint.directory import step_name, step_number, steps_in
from zerojax.checkpoint.errors import CheckpointError, DamagedError, ReplacedError
from zerojax.checkpoint.manifest import MANIFEST, NAMED, Damage, damage_in, in_words, read_manifest
from zerojax.checkpoint.processes import Processes
from zerojax.checkpoint.records import Manifest

T = TypeVar("T")


def verify_steps(root: Path, step: int | None = None) -> list[int]:
    """Check every file of one checkpoint, or of all, as `Checkpointer.verify` does."""
    steps = (steps_in(root) or [existing_step(root, None)]) if step is None else [existing_step(root, step)]
    return [verified(root, one).step for one in steps]


def retried(work: Callable[[], T]) -> T:
    """Do what reads checkpoints, at most three times where a run that writes removes what is read."""
    for _ in range(2):
        with contextlib.suppress(ReplacedError):
            return work()
    return work()


def newest_verified(root: Path, step: int | None, fallback: bool, processes: Processes) -> Manifest:
    """Return the checkpoint of a step, the newest for None, or with `fallback` the newest intact one.

    Raises:
        CheckpointError: If there is none, or it vanished.
        DamagedError: If the one wanted is damaged, and no other is intact or may be taken.
    """
    # the first process decides: a shared file system may show the others an older list
    listed = processes.exchange("steps", json.dumps([existing_step(root, step), *steps_in(root)]))
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
    """Return the step asked for, or the newest for None.

    Raises:
        CheckpointError: If it has no checkpoint, saying which have one.
        TypeError: If it is no int.
    """
    steps = steps_in(root)
    chosen = max(steps, default=None) if step is None else step_number(step)
    if chosen is None or chosen not in steps:
        of = "" if step is None else f" of step {step}"
        others = f"; there are those of steps {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"There is no checkpoint{of} in {root}{others}.")
    return chosen


def verified(root: Path, step: int, processes: Processes | None = None) -> Manifest:
    """Return the manifest of a checkpoint whose files are verified. Each process reads its share of them.

    Raises:
        DamagedError: If files are not as they were written, naming the first.
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
        damage = damage or incomplete(folder, manifest, manifest.leaves[index::count])
    if processes is not None:
        messages = processes.exchange("verified", json.dumps(damage[:NAMED]))
        damage = [tuple(one) for text in messages for one in json.loads(text)]
    if damage or not isinstance(manifest, Manifest):
        require_unchanged(root, step, manifest)
        text = f"The checkpoint of step {step} in {root} is damaged ({in_words(damage)})."
        raise DamagedError(text, step=step, damage=tuple(damage))
    return manifest


@contextlib.contextmanager
def reading(root: Path, manifest: Manifest) -> Iterator[None]:
    """Enter a context that reads a verified checkpoint while a run may remove or replace it.

    Raises:
        ReplacedError: If that happened: zarr reads files that vanish as zeros.
    """
    try:
        yield
    except Exception as error:
        require_unchanged(root, manifest.step, manifest, error)
        raise
    require_unchanged(root, manifest.step, manifest)


def require_unchanged(root: Path, step: int, manifest: Manifest | list[Damage], cause: Exception | None = None) -> None:
    """Raise unless the folder of a step still has this manifest, or the same that is wrong with it."""
    folder = root / step_name(step)
    if not folder.is_dir() or read_manifest(folder) != manifest:
        raise ReplacedError(
            f"The checkpoint of step {step} in {root} was removed or replaced while it was read, as a run that writes "
            f"there does. Restore again, or give that run's Checkpointer a larger keep=."
        ) from cause
