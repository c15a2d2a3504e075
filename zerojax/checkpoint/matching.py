"""The leaves of a checkpoint against those of the state it is restored into: which go where, and what differs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from zerojax.checkpoint.arrays import is_key
from zerojax.checkpoint.records import SavedLeaf
from zerojax.checkpoint.state_leaves import ERRORS, StateLeaf
from zerojax.config.precision import common_dtype
from zerojax.layout.leaf import Leaf

NAMED = 5


@dataclasses.dataclass(frozen=True)
class Match:
    """Which leaves are restored, and what is left over.

    Attributes:
        pairs: Leaf by leaf, what was saved and where it goes.
        missing: Names of leaves wanted that were not saved, or with another shape or type.
        unused: Names of saved leaves that are not wanted, or with another shape or type.
        cast: Names of parameters that are rounded to the narrower type they are stored in.
    """

    pairs: tuple[tuple[SavedLeaf, StateLeaf], ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]


def match(saved: tuple[SavedLeaf, ...], wanted: dict[str, StateLeaf], *, partial: bool, where: str) -> Match:
    """Match saved leaves with those of a state, by name.

    Args:
        saved: The leaves of a checkpoint.
        wanted: The leaves of the state.
        partial: Whether the two may differ.
        where: The checkpoint, for the error.

    Raises:
        ValueError: If they differ and `partial` is false, naming the first paths and both values.
    """
    by_name = {leaf.name: leaf for leaf in saved}
    differences = {name: why for name, leaf in wanted.items() if (why := difference(by_name.get(name), leaf))}
    surplus = {name: f"{leaf.described} was saved, nothing is wanted" for name, leaf in by_name.items()}
    differences |= {name: why for name, why in surplus.items() if name not in wanted}
    # parameters first: what differs elsewhere mostly follows from them
    differences = dict(sorted(differences.items(), key=lambda one: not one[0].startswith("params")))
    if differences and not partial:
        first = "\n".join(f"  {name}: {why}" for name, why in list(differences.items())[:NAMED])
        more = f"\n  and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
        raise ValueError(
            f"{where} is of another model, optimizer or precision than the state given as like=:\n{first}{more}\n"
            f"Make that state as the saved one was made, or pass partial=True to restore what matches."
        )
    pairs = tuple((by_name[name], leaf) for name, leaf in wanted.items() if name not in differences)
    return Match(
        pairs,
        missing=tuple(name for name in wanted if name in differences),
        unused=tuple(name for name in by_name if name in differences),
        cast=tuple(leaf.name for saved, leaf in pairs if is_rounded(saved, leaf)),
    )


def unfit_errors(saved: tuple[SavedLeaf, ...], wanted: dict[str, StateLeaf]) -> set[str]:
    """Return names of rounding errors that only one side has, or that belong to other groups of devices."""
    by_name = {leaf.name: leaf for leaf in saved}
    names = {leaf.name for leaf in (*saved, *wanted.values()) if leaf.path[0] == ERRORS}
    return {name for name in names if name not in wanted or difference(by_name.get(name), wanted[name])}


def difference(saved: SavedLeaf | None, wanted: StateLeaf) -> str:
    """Explain why a leaf cannot be restored; empty if it can."""
    needed = f"{wanted.dtype}{list(wanted.leaf.shape)}"
    if saved is None:
        return f"nothing was saved, {needed} is wanted"
    if saved.shape != tuple(wanted.leaf.shape):
        return f"{saved.described} was saved, {needed} is wanted"
    if (saved.key is None) == is_key(wanted.array):
        return f"{'PRNG keys were' if saved.key else 'no PRNG keys were'} saved, {needed} is wanted"
    if saved.dtype == wanted.dtype or takes_any_dtype(wanted) or is_rounded(saved, wanted):
        return ""
    if saved.key is None and widens_exactly(saved.dtype, wanted.array.dtype):
        return ""
    return f"{saved.described} was saved, {needed} is wanted, which cannot represent every value of it"


def target_layout(saved: SavedLeaf, wanted: StateLeaf) -> Leaf:
    """Return the layout and type in which a leaf is restored."""
    dtype = jnp.dtype(saved.dtype) if saved.key is None and takes_any_dtype(wanted) else wanted.array.dtype
    return dataclasses.replace(wanted.leaf, dtype=dtype)


def is_rounded(saved: SavedLeaf, wanted: StateLeaf) -> bool:
    """Return whether the saved parameter is rounded, as `create` would, to the type of this stage."""
    return wanted.narrow and saved.dtype != wanted.dtype and widens_exactly(wanted.dtype, saved.dtype)


def takes_any_dtype(wanted: StateLeaf) -> bool:
    """Return whether any type is accepted: optax makes floats of integer parameters' moments at its first update."""
    return wanted.path[0] == "opt_state" and jnp.issubdtype(wanted.leaf.dtype, jnp.integer)


def widens_exactly(narrow: Any, wide: Any) -> bool:
    """Return whether a floating type represents every value of another one."""
    narrow, wide = jnp.dtype(narrow), jnp.dtype(wide)
    both = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return both and narrow != wide and common_dtype(narrow, wide) == wide
