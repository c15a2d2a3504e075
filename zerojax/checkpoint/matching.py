"""Compare a checkpoint with the state that it is restored into: all leaves, and the two optimizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from zerojax.checkpoint.arrays import is_key
from zerojax.checkpoint.manifest import Manifest, SavedLeaf, made_by
from zerojax.checkpoint.state_leaves import StateLeaf, state_leaves
from zerojax.config.precision import common_dtype
from zerojax.layout.leaf import Leaf
from zerojax.optim.description import Describe, Description
from zerojax.train.state import ZeroState

NAMED = 5
NAMED_OPERATIONS = 6
WEIGHTS = ("params", "mutable")  # the fields that partial="params" restores


@dataclasses.dataclass(frozen=True)
class Match:
    """The pairs of a saved leaf and the leaf that it is restored into. `Restored` explains the other fields."""

    pairs: tuple[tuple[SavedLeaf, StateLeaf], ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    cast: tuple[str, ...]
    warning: str  # how the optimizers differ although their states have the same leaves


def match(manifest: Manifest, like: ZeroState, *, partial: bool | str, where: str, remedy: str) -> Match:
    """Match saved leaves with those of `like` by name. Raise a `ValueError` if they differ, unless `partial` is true.

    With `partial="params"`, leaves of other fields than parameters and mutable state do not match. `where` names the
    saved state in errors, and `remedy` ends them.
    """
    saved, wanted = manifest.leaves, state_leaves(like)
    by_name = {leaf.name: leaf for leaf in saved}
    differences = {name: why for name, leaf in wanted.items() if (why := difference(by_name.get(name), leaf))}
    surplus = {name: f"{leaf.described} is there, nothing is wanted" for name, leaf in by_name.items()}
    differences |= {name: why for name, why in surplus.items() if name not in wanted}
    others = [] if partial != "params" else [leaf for leaf in (*saved, *wanted.values()) if leaf.path[0] not in WEIGHTS]
    differences |= dict.fromkeys((leaf.name for leaf in others), "not restored")
    # List parameters first, because differences in other fields mostly follow from differences in the parameters.
    differences = dict(sorted(differences.items(), key=lambda one: not one[0].startswith("params")))
    if differences and not partial:
        first = "\n".join(f"  {name}: {why}" for name, why in list(differences.items())[:NAMED])
        more = f"\n  and {len(differences) - NAMED} more" if len(differences) > NAMED else ""
        raise ValueError(
            f"{where} is of another model, optimizer or precision than the wanted state:\n{first}{more}\n{remedy}"
        )
    pairs = tuple((by_name[name], leaf) for name, leaf in wanted.items() if name not in differences)
    if not any(leaf.path[0] == "params" for _, leaf in pairs) and any(leaf.path[0] == "params" for leaf in saved):
        names = [leaf.name for leaf in saved if leaf.path[0] == "params"]
        raise ValueError(
            f"{where} has no parameter with a name, shape and type of the wanted state. It has "
            f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}. Rename the parameters: "
            f"zerojax.checkpoint.export_checkpoint writes them to a folder, and import_params(..., mapping=) reads "
            f"them under other names."
        )
    return Match(
        pairs,
        missing=tuple(name for name in wanted if name in differences),
        unused=tuple(name for name in by_name if name in differences),
        cast=tuple(leaf.name for saved, leaf in pairs if is_rounded(saved, leaf)),
        warning="" if partial else other_optimizer(manifest, like.plan.describe, where, remedy),
    )


def difference(saved: SavedLeaf | None, wanted: StateLeaf) -> str:
    """Explain why `saved` cannot be restored into `wanted`, or return an empty string if it can."""
    needed = f"{wanted.dtype}{list(wanted.leaf.shape)}"
    if saved is None:
        return f"nothing is there, {needed} is wanted"
    if saved.shape != tuple(wanted.leaf.shape):
        return f"{saved.described} is there, {needed} is wanted"
    if (saved.key is None) == is_key(wanted.array):
        return f"an array {'of' if saved.key else 'without'} PRNG keys is there, {needed} is wanted"
    if saved.dtype == wanted.dtype or takes_any_dtype(wanted) or is_rounded(saved, wanted):
        return ""
    if saved.key is None and widens_exactly(saved.dtype, wanted.array.dtype):
        return ""
    return f"{saved.described} is there, {needed} is wanted, which cannot represent every value"


def target_layout(saved: SavedLeaf, wanted: StateLeaf) -> Leaf:
    """Return the layout of `wanted`, with the type of `saved` if `wanted` accepts any type."""
    dtype = jnp.dtype(saved.dtype) if saved.key is None and takes_any_dtype(wanted) else wanted.array.dtype
    return dataclasses.replace(wanted.leaf, dtype=dtype)


def is_rounded(saved: SavedLeaf, wanted: StateLeaf) -> bool:
    """Return whether restoring rounds the parameter `saved` to the narrower type of `wanted`, as `create` would."""
    return wanted.narrow and saved.dtype != wanted.dtype and widens_exactly(wanted.dtype, saved.dtype)


def takes_any_dtype(wanted: StateLeaf) -> bool:
    """Return whether `wanted` accepts any saved type. Integer state does: optax's first update makes it float."""
    return wanted.path[0] == "opt_state" and jnp.issubdtype(wanted.leaf.dtype, jnp.integer)


def widens_exactly(narrow: Any, wide: Any) -> bool:
    narrow, wide = jnp.dtype(narrow), jnp.dtype(wide)
    both = jnp.issubdtype(narrow, jnp.floating) and jnp.issubdtype(wide, jnp.floating)
    return both and narrow != wide and common_dtype(narrow, wide) == wide


def other_optimizer(manifest: Manifest, describe: Describe | None, where: str, remedy: str) -> str:
    """Raise an error if the saved transformation has another structure, and warn if it computes another update.

    Different transformations may have the same leaves. If another version of JAX or optax saved the checkpoint, another
    structure only causes a warning, and programs are not compared, because they may differ for the same update. Return
    the warning, or an empty string. An early zerojax saved no description.
    """
    saved = manifest.transformation
    if saved is None or describe is None:
        return ""
    wanted, now = describe.description, made_by(1)
    others = ((name, manifest.made_by.get(name)) for name in ("jax", "optax"))
    old = ", ".join(f"{name} {made}" for name, made in others if made != now[name])
    if saved.structure != wanted.structure:
        message = f"{where} is of another transformation than the wanted state: {structures(saved, wanted)}"
        if not old:
            raise ValueError(f"{message} {remedy}")
        return f"{message} They may be the same: it was saved with {old}."
    if saved.program == wanted.program or old:
        return ""
    return (
        f"{where} is of an optimizer that computes something else than that of the wanted state: "
        f"{changes(saved, wanted)}. The optimizer state keeps its values. If you changed the optimizer on purpose, "
        f"such as its learning rate, nothing needs to be done."
    )


def structures(saved: Description, wanted: Description) -> str:
    """Describe the structures of `saved` and `wanted`, starting shortly before their first difference."""
    a, b = saved.structure, wanted.structure
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    begin = max(0, next(differs, min(len(a), len(b))) - 60)
    end = begin + 200
    shown = lambda text: f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}"
    return f"{shown(a)} is there, {shown(b)} is wanted."


def changes(saved: Description, wanted: Description) -> str:
    before = [one for one in saved.operations if one not in wanted.operations]
    after = [one for one in wanted.operations if one not in saved.operations]
    if not before and not after:
        return "the same operations, in another arrangement"
    more = lambda names: f" and {len(names) - NAMED_OPERATIONS} more" if len(names) > NAMED_OPERATIONS else ""
    listed = lambda names: (", ".join(names[:NAMED_OPERATIONS]) + more(names)) or "nothing else"
    return f"before {listed(before)}; now {listed(after)}"
