"""Read what the nodes of a model say about its leaves: which mesh axes divide them, and which are overwritten.

An overwritten leaf takes its gradient as the new value, such as a scale of Flax's FP8 layers. Such a layer computes its
next scales and amax histories in its backward pass, and returns them as gradients of the old ones. Linen keeps them in
the collection `_overwrite_with_gradient`; in NNX, the class of the variable has this name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import NamedSharding

from zerojax.config import DataMesh, LeafMask
from zerojax.config.data_mesh import entry_axes, spec_entry
from zerojax.layout.padded import Padded, is_padded

NAME = "_overwrite_with_gradient"
REASON = "overwritten with its gradient"


def partition_metadata(params) -> list:
    """Return, for each leaf, the axis names per dim in its Flax box or Variable; () if there are none.

    Logical names are converted to mesh axes by the rules of the node, or by the current `logical_axis_rules` of Flax.
    """

    def names(node) -> tuple | None:
        # The class is asked: a node of the user may return a value for any attribute, or raise any error.
        if hasattr(type(node), "get_partition_spec"):
            spec = node.get_partition_spec()
            logical = hasattr(node, "rules")
            return tuple(sys.modules["flax.linen"].logical_to_mesh_axes(spec, node.rules) if logical else spec)
        has_metadata = callable(getattr(type(node), "get_metadata", None))
        metadata: dict = (node.get_metadata() if has_metadata else None) or {}
        spec = metadata.get("out_sharding") or metadata.get("sharding_names") or ()  # newer and older nnx
        flax = sys.modules.get("flax.core.spmd")
        rules = dict((*(flax.get_logical_axis_rules() if flax else ()), *(metadata.get("sharding_rules") or ())))
        return tuple(rules.get(name, name) for name in getattr(spec, "spec", spec)) or None

    def expand(node):
        spec = () if is_padded(node) else tuple(names(node) or ())
        return [spec] * len(jax.tree.leaves(node, is_leaf=is_padded))

    nodes = jax.tree.leaves(params, is_leaf=lambda x: is_padded(x) or bool(names(x)))
    return [spec for node in nodes for spec in expand(node)]


def other_axes(x, metadata: tuple, data: DataMesh) -> tuple:
    """Return the mesh axes, other than data axes, that already divide each dim of `x`."""
    array = x.storage if isinstance(x, Padded) else x
    # The type of a traced array names Explicit axes.
    sharding = getattr(jax.typeof(array) if isinstance(array, jax.core.Tracer) else array, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    if not any(spec):
        spec = metadata
    # Flax's metadata may also name data axes, and axes that this mesh does not have.
    kept = [spec_entry(tuple(axis for axis in entry_axes(entry) if axis in data.compiler_axes)) for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


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
