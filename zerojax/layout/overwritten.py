"""Find overwritten leaves: parameters that take their gradient as the new value, such as scales of Flax's FP8 layers.

Such a layer computes its next scales and amax histories in its backward pass, and returns them as gradients of the old
ones. Linen keeps them in the collection `_overwrite_with_gradient`; in NNX, the class of the variable has this name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from zerojax.config import LeafMask
from zerojax.layout.padded import is_padded

NAME = "_overwrite_with_gradient"
REASON = "overwritten with its gradient"


def overwritten_leaves(
    params: Any,
    paths: Sequence[str],
    shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    overwrite: Callable[[str, Any], bool] | None = None,
    known: Collection[int] = (),
) -> frozenset[int]:
    """Return the indices of the overwritten leaves of a tree of parameters.

    `params` are arrays, `Padded` arrays or shapes, whose nodes are inspected; () if only paths are known. `overwrite`
    chooses further leaves, and `known` has the indices of leaves that are known to be overwritten.
    """
    if isinstance(overwrite, LeafMask):
        overwrite.check(paths)
    nodes = jax.tree.leaves(params, is_leaf=lambda x: is_padded(x) or is_variable(x))
    of_class = [is_variable(node) for node in nodes for _ in jax.tree.leaves(node, is_leaf=is_padded)]
    chosen = [overwrite is not None and overwrite(path, x) for path, x in zip(paths, shapes, strict=True)]
    named = [i for i, path in enumerate(paths) if NAME in path or chosen[i]]
    return frozenset([*named, *known, *(i for i, on in enumerate(of_class) if on)])


def is_variable(node: Any) -> bool:
    """Return whether a node is an NNX variable with the name of the collection."""
    return type(node).__name__ == NAME
