"""Find a checkpoint and verify it: every file is read and digested before one is used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from pathlib import Path

from zerojax.checkpoint.directory import step_name, steps_in
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.manifest import Manifest, damage_in, read_manifest
from zerojax.checkpoint.processes import Processes

NAMED = 5


def verify_steps(root: Path, step: int | None = None) -> list[int]:
    """Check every file of one checkpoint, or of all, as `Checkpointer.verify` does."""
    steps = (steps_in(root) or [None]) if step is None else [step]
    return [verified(root, existing_step(root, one)).step for one in steps]


def newest_verified(root: Path, step: int | None, fallback: bool, processes: Processes) -> Manifest:
    """The checkpoint of a step, None being the newest, or with `fallback` the newest one that is intact.

    Raises:
        CheckpointError: If there is none.
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
    """The step asked for, None being the newest.

    Raises:
        CheckpointError: If it has no checkpoint, saying which have one.
    """
    steps = steps_in(root)
    chosen = max(steps, default=None) if step is None else step
    if chosen is None or chosen not in steps:
        of = "" if step is None else f" of step {step}"
        others = f"; there are those of steps {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"There is no checkpoint{of} in {root}{others}.")
    return chosen


def verified(root: Path, step: int, processes: Processes | None = None) -> Manifest:
    """The manifest of a checkpoint, once all its files are verified; each process reads its share of them.

    Raises:
        DamagedError: If files are not as they were written, naming the first.
    """
    folder = root / step_name(step)
    manifest = read_manifest(folder)
    if isinstance(manifest, Manifest):
        names = list(manifest.files)
        damage = damage_in(folder, manifest, names if processes is None else names[processes.index :: processes.count])
    else:
        damage = manifest
    if processes is not None:
        messages = processes.exchange("verified", json.dumps(damage[:NAMED]))
        damage = [tuple(one) for text in messages for one in json.loads(text)]
    if damage or not isinstance(manifest, Manifest):
        named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {what}" for leaf, file, what in damage[:NAMED])
        more = f"; and {len(damage) - NAMED} more files" if len(damage) > NAMED else ""
        text = f"The checkpoint of step {step} in {root} is damaged ({named}{more})."
        raise DamagedError(text, step=step, damage=tuple(damage))
    return dataclasses.replace(manifest, step=step)  # a folder that was renamed counts as what it is named
