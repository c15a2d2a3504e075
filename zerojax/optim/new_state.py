"""Refuse a state whose tree an update changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

from zerojax.layout.leaf import Leaf

if TYPE_CHECKING:
    from jaxtyping import PyTree


def check_new_state(leaves: Sequence[Leaf], state: PyTree) -> None:
    """Refuse a state that an update has given another tree than `init` had.

    Raises:
        ValueError: Naming the first leaf that one has and the other has not.
    """
    found = jax.tree_util.tree_leaves_with_path(state)
    if len(found) != len(leaves):
        what = tree_difference(found, leaves)
        raise ValueError(
            f"The transformation changes the tree of its state: what update returns {what}, and init did not. How the "
            f"state is sharded is planned from init: let it return a state of the same tree."
        )


def tree_difference(found: Sequence, required: Sequence[Leaf]) -> str:
    """Describe how the paths of a flattened tree differ from the required ones."""
    paths, wanted = [jax.tree_util.keystr(path) for path, _ in found], [leaf.path for leaf in required]
    if lacking := [path for path in wanted if path not in paths]:
        return f"lacks {lacking[0]}"
    surplus = [path for path in paths if path not in wanted]
    return f"has {surplus[0]} beyond that" if surplus else "has other nodes"
