"""Read annotations of a model, which say which mesh axes divide a leaf, and whether the leaf is overwritten.

An overwritten leaf takes its gradient as its new value. Flax's FP8 layers have such leaves. Their backward pass
computes the next scales and amax histories, and returns them as gradients of the old values. Linen keeps these leaves
in the collection `_overwrite_with_gradient`. In NNX, their variable class is registered under this name.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.config import Config, DataMesh
from zerojax.config.data_mesh import axes_of, entry_axes, in_words
from zerojax.layout.leaf import OVERWRITE, Leaf, is_padded, restricted, shard_extent, without_last_nones


def partition_metadata(params) -> list:
    """Return, for each leaf, the mesh axes that its Flax box or Variable names for each dim, or () without axes.

    Logical axis names are converted to mesh axes by the node's own rules, or by Flax's current `logical_axis_rules`.
    """

    def names(node) -> tuple | None:
        if hasattr(type(node), "get_partition_spec"):
            spec = node.get_partition_spec()
            logical = hasattr(node, "rules")
            return tuple(sys.modules["flax.linen"].logical_to_mesh_axes(spec, node.rules) if logical else spec)
        return axes_of_variable(node, "out_sharding") or None

    def expand(node):
        spec = () if is_padded(node) else tuple(names(node) or ())
        return [spec] * len(jax.tree.leaves(node, is_leaf=is_padded))

    nodes = jax.tree.leaves(params, is_leaf=lambda x: is_padded(x) or bool(names(x)))
    return [spec for node in nodes for spec in expand(node)]


def metadata_of(node: Any) -> dict:
    """Return the metadata of an NNX Variable, or an empty dict."""
    # Look at the class, because a user's node may return a value for any attribute, or raise any error.
    metadata = node.get_metadata() if callable(getattr(type(node), "get_metadata", None)) else None
    return metadata if isinstance(metadata, dict) else {}


def axes_of_variable(node: Any, key: str) -> tuple:
    """Return the mesh axes per dim that an NNX Variable names under `key`. For any other node, return ()."""
    metadata = metadata_of(node)
    spec = metadata.get(key) or ()
    flax = sys.modules.get("flax.core.spmd")
    rules = dict((*(flax.get_logical_axis_rules() if flax else ()), *(metadata.get("sharding_rules") or ())))
    return tuple(rules.get(name, name) for name in getattr(spec, "spec", spec))


def check_optimizer_sharding(params: Any, data: DataMesh) -> None:
    """Raise a ValueError if NNX's `optimizer_sharding` names an axis that does not divide the optimizer state.

    zerojax chooses the dim itself, so only the axes are compared.
    """
    named = lambda node: axes_of_variable(node, "optimizer_sharding")
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: bool(named(x))):
        divide = {*data.opt_state, *axes_of(axes_of_variable(node, "out_sharding"))}
        if wrong := [axis for axis in axes_of(named(node)) if axis not in divide]:
            is_of_mesh = wrong[0] in dict(data.sizes)
            use = "Use stage=1 or higher with it in axis=" if is_of_mesh else "Name an axis by nnx.logical_axis_rules"
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} has optimizer_sharding={named(node)}, and this zero_shard does "
                f"not divide its optimizer state over {wrong[0]!r}, "
                f"{'an axis' if is_of_mesh else 'which is no axis'} of the mesh. {use}, or drop the annotation."
            )


def axes_of_model(params: Any, data: DataMesh, known: Sequence[tuple] = ()) -> Sequence[tuple]:
    """Return `Leaf.others` of each leaf: `known` if it is given, otherwise what shardings and annotations name."""
    check_optimizer_sharding(params, data)
    if known:
        return known
    pairs = zip(jax.tree.leaves(params, is_leaf=is_padded), partition_metadata(params), strict=True)
    return [other_axes(x, spec, data) for x, spec in pairs]


def axes_of_last_plan(config: Config, params: Any) -> Sequence[tuple]:
    """Return `Leaf.others` of the parameters in the last plan that fits them, or () if no plan is needed or fits.

    The plan is needed in two cases. Inside the caller's `jax.jit`, the type of an array does not name Auto axes, but
    `shard` or `init` made a plan before the call. And if an axis of experts divides a stored array, the sharding does
    not say why: either the array holds experts, or the stage shards the array over this axis.
    """
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)
    is_traced = any(isinstance(x.storage if is_padded(x) else x, jax.core.Tracer) for x in leaves)
    if not (config.expert_axis or is_traced):
        return ()
    for layout in reversed(config.plans):
        if layout.treedef == treedef and all(map(is_stored_as, leaves, layout.params)):
            return [leaf.others for leaf in layout.params]
    return ()


def is_stored_as(x: Any, leaf: Leaf) -> bool:
    """Return whether an array has a leaf's logical shape and, if it shows its sharding, the leaf's spec."""
    array = x.storage if is_padded(x) else x
    if tuple(getattr(x, "shape", ())) != leaf.shape:
        return False
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return sharding is None
    return PartitionSpec(*without_last_nones(sharding.spec)) == leaf.spec


def other_axes(x, metadata: tuple, data: DataMesh) -> tuple:
    """Return, for each dim of `x`, the mesh axes that already divide it: experts' axes, and the compiler's axes."""
    array = x.storage if is_padded(x) else x
    # The sharding of a traced array is in its type, and names only Explicit axes.
    sharding = getattr(jax.typeof(array) if isinstance(array, jax.core.Tracer) else array, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    if not any(spec):
        spec = metadata
    # Flax's metadata may also name other data axes, and axes that this mesh does not have.
    return tuple(restricted(spec, {*data.compiler_axes, *data.experts}))


def overwritten_leaves(
    params: Any,
    paths: Sequence[str],
    shapes: Sequence[jax.ShapeDtypeStruct],
    *,
    overwrite: Callable[[str, Any], bool] | None = None,
    known: Collection[int] = (),
) -> frozenset[int]:
    """Return the indices of the overwritten leaves of a tree of parameters.

    `params` is the tree of arrays, `Padded` arrays or shapes, or () if only `paths` and `shapes` are known. Its NNX
    Variables are inspected. `overwrite(path, shape)` chooses further leaves, and so does `known`, by index.
    """
    nodes = jax.tree.leaves(params, is_leaf=lambda x: is_padded(x) or is_variable(x))
    of_class = [is_variable(node) for node in nodes for _ in jax.tree.leaves(node, is_leaf=is_padded)]
    chosen = lambda path, x: (overwrite is not None and overwrite(path, x)) or OVERWRITE in path
    named = [i for i, pair in enumerate(zip(paths, shapes, strict=True)) if chosen(*pair)]
    return frozenset([*named, *known, *(i for i, on in enumerate(of_class) if on)])


def is_variable(node: Any) -> bool:
    """Return whether a node is an NNX Variable of the class that Flax registers under `OVERWRITE`."""
    nnx = sys.modules.get("flax.nnx")
    return (
        nnx is not None
        and isinstance(node, nnx.Variable)
        and type(node) is nnx.variable_type_from_name(OVERWRITE, allow_register=True)
    )


def check_experts(leaf: Leaf, data: DataMesh) -> None:
    """Raise a ValueError if the axes of experts do not divide a dim evenly, as a `jax.shard_map` needs."""
    for dim, entry in enumerate(leaf.others):
        names = entry_axes(entry)
        if not set(names).isdisjoint(data.experts) and leaf.shape[dim] % (devices := data.size(names)):
            even = shard_extent(leaf.shape[dim], devices)[0] * devices
            raise ValueError(
                f"params{leaf.path} has {leaf.shape[dim]} experts on dim {dim}, which {in_words(names)} with {devices} "
                f"devices cannot divide evenly. Use {even} experts, some of which get no tokens, or fewer devices."
            )
