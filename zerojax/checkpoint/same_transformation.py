"""Whether a state was saved by the transformation that it is restored for: other ones may have the same leaves."""

from __future__ import annotations

import warnings
from typing import Any

from zerojax.checkpoint.manifest import made_by
from zerojax.checkpoint.records import Manifest
from zerojax.optim.description import Describe, Description

NAMED = 6


def check_transformation(manifest: Manifest, describe: Describe | None, *, partial: bool, where: str) -> None:
    """Refuse the state of another kind of transformation, and warn of one that computes something else.

    A program is compared with one of the same versions alone: others may write the same update in other operations.

    Args:
        manifest: Of the checkpoint; one of an older version of zerojax says nothing, and all is taken.
        describe: Of the state that is restored into.
        partial: Whether the two may differ, without a word.
        where: The checkpoint, for the error.

    Raises:
        ValueError: If the types in the two states differ, naming both.
    """
    saved = manifest.transformation
    if saved is None or describe is None or partial:
        return
    wanted, old = describe.description, other_versions(manifest.made_by)
    if saved.structure != wanted.structure:
        message = f"{where} is of another transformation than the state given as like=: {structures(saved, wanted)}"
        if not old:
            raise ValueError(f"{message} Give the same one, or pass partial=True to restore what matches.")
        warnings.warn(f"{message} They may be the same: it was saved with {old}.", stacklevel=9)
    elif saved.program != wanted.program and not old:
        warnings.warn(
            f"{where} was saved by an optimizer that computes something else than that of like=: "
            f"{changes(saved, wanted)}. Its state is restored as it was. If that is meant, as for another learning "
            f"rate, nothing is to be done; partial=True says so.",
            stacklevel=9,
        )


def other_versions(made: dict[str, Any]) -> str:
    """Describe the libraries that made the checkpoint in another version; empty if there are none."""
    now = made_by(1)
    return ", ".join(f"{name} {made.get(name)}" for name in ("jax", "optax") if made.get(name) != now[name])


def structures(saved: Description, wanted: Description) -> str:
    """Describe two structures, from where they begin to differ."""
    a, b = saved.structure, wanted.structure
    begin = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(0, begin - 60)
    shown = lambda text: (
        f"{'...' if begin else ''}{text[begin : begin + 200]}{'...' if len(text) > begin + 200 else ''}"
    )
    return f"{shown(a)} was saved, {shown(b)} is wanted."


def changes(saved: Description, wanted: Description) -> str:
    """Describe what only one of two programs has."""
    before = [one for one in saved.operations if one not in wanted.operations]
    after = [one for one in wanted.operations if one not in saved.operations]
    if not before and not after:
        return "the same operations, put together otherwise"
    listed = lambda these: ", ".join(these[:NAMED]) + (f" and {len(these) - NAMED} more" if len(these) > NAMED else "")
    return f"saved with {listed(before) or 'nothing else'}; now {listed(after) or 'nothing else'}"
