"""From a folder to a state: find an intact checkpoint, read it into the layout wanted."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.checkpoint import arrays as disk
from zerojax.checkpoint import position
from zerojax.checkpoint.canonical import Slot, convert, put_together, slots_of
from zerojax.checkpoint.errors import CheckpointError, DamagedError
from zerojax.checkpoint.files import step_name, steps_in
from zerojax.checkpoint.integrity import ARRAYS, Damage, Manifest, Record, damage_in, data_file, read_manifest
from zerojax.checkpoint.matching import match, reading
from zerojax.checkpoint.peers import Peers
from zerojax.layout.chunked import is_chunked
from zerojax.placement.chunking import joined, replaced
from zerojax.train.state import ZeroState

log = logging.getLogger("zerojax.checkpoint")
NAMED = 5


class Restored(NamedTuple):
    """What came out of a checkpoint.

    Attributes:
        state: In the layout of `like`.
        data: What was saved with it.
        step: Its step.
        missing: Names of the leaves of `like` that were not restored; only with `partial=True`.
        unused: Names of the saved leaves that were not wanted; only with `partial=True`.
        cast: Names of frozen parameters that were rounded to the type this stage keeps them in.
    """

    state: ZeroState
    data: Any
    step: int
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


def examined(directory: Path, step: int, peers: Peers | None = None) -> Manifest | list[Damage]:
    """The manifest of a checkpoint if all its files are as they were written, else what is wrong.

    Each process looks at its share of the files.
    """
    folder = directory / step_name(step)
    manifest = read_manifest(folder)
    damage: list[Damage] = manifest if isinstance(manifest, list) else []
    if isinstance(manifest, Manifest):
        share = list(manifest.files) if peers is None else list(manifest.files)[peers.index :: peers.count]
        damage = damage_in(folder, manifest, share)
    if peers is not None:
        told = peers.tell("examined", json.dumps(damage[:NAMED]))
        damage = [tuple(one) for text in told for one in json.loads(text)]
    return damage or manifest


def found_step(directory: Path, step: int | None) -> int:
    """The step asked for if it has a checkpoint, None being the newest.

    Raises:
        CheckpointError: If there is none, saying which there are.
    """
    there = steps_in(directory)
    chosen = max(there, default=None) if step is None else step
    if chosen is None or chosen not in there:
        of = "" if step is None else f" of step {step}"
        have = f"; there are those of steps {', '.join(map(str, there))}" if there else ""
        raise CheckpointError(f"There is no checkpoint{of} in {directory}{have}.")
    return chosen


def newest_intact(directory: Path, step: int | None, fallback: bool, peers: Peers) -> tuple[int, Manifest]:
    """The checkpoint of a step, None being the newest, or with `fallback` the newest intact one.

    Raises:
        CheckpointError: If there is none.
        DamagedError: If the one wanted is damaged, and no other is intact or may be taken.
    """
    # the first process says which: a shared file system may show the others an older list
    there = json.loads(peers.tell("steps", json.dumps([found_step(directory, step), *steps_in(directory)]))[0])
    wanted = there[0]
    found = examined(directory, wanted, peers)
    if isinstance(found, Manifest):
        return wanted, found
    intact = None
    for other in sorted(set(there) - {wanted}, reverse=True):
        manifest = examined(directory, other, peers)
        if isinstance(manifest, Manifest):
            intact = other, manifest
            break
    message = described(directory, wanted, found)
    if intact is None:
        raise DamagedError(f"{message} No other checkpoint is intact.", step=wanted, damage=tuple(found))
    if not fallback:
        raise DamagedError(
            f"{message} The newest intact one is that of step {intact[0]}: pass step={intact[0]}, or fallback=True.",
            step=wanted,
            damage=tuple(found),
            intact=intact[0],
        )
    warnings.warn(f"{message} Taking that of step {intact[0]} instead.", stacklevel=3)
    return intact


def described(directory: Path, step: int, damage: Sequence[Damage]) -> str:
    """What is wrong with a checkpoint, in words."""
    named = "; ".join(f"{leaf + ', ' if leaf else ''}{file}: {what}" for leaf, file, what in damage[:NAMED])
    more = f"; and {len(damage) - NAMED} more files" if len(damage) > NAMED else ""
    return f"The checkpoint of step {step} in {directory} is damaged ({named}{more})."


def verify_steps(directory: Path, step: int | None = None) -> list[int]:
    """Check every file of one checkpoint, or of all.

    Args:
        directory: Where the checkpoints lie.
        step: Which one; None is all.

    Returns:
        The steps checked.

    Raises:
        CheckpointError: If there is none.
        DamagedError: Naming leaf and file of the first that is damaged.
    """
    there = steps_in(directory)
    return [intact(directory, one)[0] for one in (there or [step] if step is None else [step])]


def intact(directory: Path, step: int | None = None) -> tuple[int, Manifest]:
    """The step and manifest of a checkpoint, None being the newest, after a look at every file; raises as above."""
    chosen = found_step(directory, step)
    found = examined(directory, chosen)
    if not isinstance(found, Manifest):
        raise DamagedError(described(directory, chosen, found), step=chosen, damage=tuple(found))
    return chosen, found


def restore_step(
    directory: Path, step: int, manifest: Manifest, like: ZeroState, data: Any, partial: bool, peers: Peers
) -> Restored:
    """Read an intact checkpoint; arguments as for `Checkpointer.restore`."""
    if not isinstance(like, ZeroState):
        raise TypeError(f"restore takes like=a ZeroState, as tx.create makes it, not {type(like).__name__}.")
    folder, slots = directory / step_name(step), slots_of(like)
    matched = match(manifest.leaves, slots, partial=partial, where=f"The checkpoint of step {step} in {directory}")
    arrays = read_leaves(folder, matched.pairs)
    for name in matched.missing:
        array = slots[name].array
        if isinstance(array.chunks[0] if is_chunked(array) and array.chunks else array, jax.ShapeDtypeStruct):
            raise ValueError(f"{name} was not saved, and like= has only its shape: give live arrays to keep the rest.")
        arrays[name] = replaced(array, joined(array)) if is_chunked(array) else jnp.copy(array)
    if matched.cast:
        log.info("Rounded to the type this stage keeps them in: %s.", ", ".join(matched.cast))
    return Restored(
        put_together(like, arrays),
        read_data(folder, manifest, data, peers),
        step,
        matched.missing,
        matched.unused,
        matched.cast,
    )


def read_leaves(folder: Path, pairs: Sequence[tuple[Record, Slot]]) -> dict[str, Any]:
    """The leaves as they are wanted, by name; storage shape."""
    arrays: dict[str, Any] = {}
    for pair in (pair for pair in pairs if is_chunked(pair[1].array)):  # one by one: the devices may not hold all
        ((name, x),) = read_near(folder, [pair]).items()
        arrays[name] = replaced(pair[1].array, x)
    return arrays | read_near(folder, [pair for pair in pairs if not is_chunked(pair[1].array)])


def read_near(folder: Path, pairs: Sequence[tuple[Record, Slot]]) -> dict[str, Any]:
    """Leaves on the devices, by name; storage shape."""
    arrays = {
        slot.name: disk.zeros(tuple(slot.array.shape), slot.array.dtype, slot.array.sharding)
        for record, slot in pairs
        if not record.folder
    }
    stored = [(slot.name, *reading(record, slot)) for record, slot in pairs if record.folder]
    found = disk.read(folder / ARRAYS, [wanted for _, wanted, _ in stored])
    arrays |= {name: x for (name, _, move), x in zip(stored, found, strict=True) if move is None}
    moved = [(name, x, move) for (name, _, move), x in zip(stored, found, strict=True) if move is not None]
    converted = convert([x for _, x, _ in moved], [move for *_, move in moved])
    return arrays | {name: x for (name, _, _), x in zip(moved, converted, strict=True)}


def read_data(folder: Path, manifest: Manifest, template: Any, peers: Peers) -> Any:
    """What was saved with the state by this process."""
    count = manifest.made_by["processes"]
    same = len({manifest.files[data_file(i)] for i in range(count)}) == 1
    if count != peers.count and not same:
        warnings.warn(
            f"The position in the data was saved by {count} processes, each its own, and there are {peers.count} now: "
            f"it is not restored. Keep a position that holds for all processes, or restore on as many.",
            stacklevel=4,
        )
        return None
    return position.loads((folder / data_file(0 if same else peers.index)).read_text(), template)
