"""Lay out a tree of parameters, and an optimizer state, by deciding which leaves are sharded, and along which dim."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.config import Config, LayoutPolicy, path_of
from zerojax.config.data_mesh import axes_of, in_words
from zerojax.layout.leaf import OVERWRITE, CachedHash, Leaf, is_padded, keep_whole, shard_extent

if TYPE_CHECKING:
    from zerojax.config.precision import Precision
    from zerojax.config.wire import Wire

UNSAFE = frozenset({"int1", "uint1", "int2", "uint2"})
REASON = "overwritten with its gradient"
NOT_FLAT = "its update depends on other elements or the shape"


@dataclasses.dataclass(frozen=True, eq=False)
class Layout(CachedHash):
    """The layout of every leaf of a tree of parameters.

    Attributes:
        policy: The options from which the layout was computed.
        treedef: The structure of the logical parameters, without `Padded` nodes.
        params: How each parameter is stored.
        grads: How the reduced gradient and the optimizer state of each parameter are sharded, at stages that shard
            them. The `dtype` of each leaf is the type of the master weight. Small leaves are `"flat"`.
        compute: The type in which the loss function sees each parameter.
        trained: Indices of the parameters that are trained: neither frozen, nor overwritten, nor integers.
        overwritten: Indices of the parameters that take their gradient as their new value.
    """

    policy: LayoutPolicy
    treedef: jax.tree_util.PyTreeDef
    params: tuple[Leaf, ...]
    grads: tuple[Leaf, ...]
    compute: tuple[np.dtype, ...]
    trained: tuple[int, ...]
    overwritten: tuple[int, ...] = ()

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Return the "/"-separated paths of the parameters, as predicates such as `trainable` get them."""
        keyed, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self.treedef, self.params))
        return tuple(path_of(path) for path, _ in keyed)

    def why_not_trained(self, i: int) -> str:
        """Return the reason why parameter `i` is not trained, or an empty string if it is trained."""
        if i in self.trained:
            return ""
        if i in self.overwritten:
            return REASON
        dtype = self.grads[i].dtype
        return "frozen" if has_gradient(dtype) else f"not trained: {dtype} has no gradient"

    def trained_only(self) -> "Layout":
        """Return the layout of the trained parameters. In the tree, `optax.MaskedNode()` replaces all other leaves."""
        if len(self.trained) == len(self.params):
            return self
        inside = frozenset(self.trained)
        holes = [0 if i in inside else optax.MaskedNode() for i in range(len(self.params))]
        pick = lambda items: tuple(items[i] for i in self.trained)
        return Layout(
            self.policy,
            jax.tree.structure(jax.tree.unflatten(self.treedef, holes)),
            pick(self.params),
            pick(self.grads),
            pick(self.compute),
            tuple(range(len(self.trained))),
        )


def layout_of(config: Config, params, *, others: Sequence[tuple] = (), overwritten: Collection[int] = ()) -> Layout:
    """Lay out a tree of parameters (arrays, `Padded` arrays or shapes) for a configuration. See `lay_out`."""
    policy = config.layout_policy
    if not others and (config.expert_axis or config.data.compiler_axes):
        from zerojax.layout.annotations import axes_of_last_plan

        others = axes_of_last_plan(config, params)
    chosen = {"precision": config.precision, "trainable": config.trainable, "wire": config.wire}
    return lay_out(params, policy, others=others, overwrite=config.overwrite, overwritten=overwritten, **chosen)


def lay_out(
    params,
    policy: LayoutPolicy,
    *,
    precision: "Precision | None" = None,
    trainable: Callable[[str, Any], bool] | None = None,
    overwrite: Callable[[str, Any], bool] | None = None,
    wire: "Wire | None" = None,
    others: Sequence[tuple] = (),
    overwritten: Collection[int] = (),
) -> Layout:
    """Decide how each leaf of `params` is stored. The leaves are arrays, `Padded` arrays or shapes.

    If `others`, the leaf's sharding or Flax's metadata say that another mesh axis divides a dim, then the data axes
    divide another dim. Without `precision`, every leaf keeps its type. Without `trainable`, all leaves with a gradient
    are trained. Without `wire`, no leaf is quantised. `overwrite` and `overwritten` choose leaves to overwrite, in
    addition to those with the name `_overwrite_with_gradient`. Raise a TypeError for a leaf that is no array, or whose
    type is unsafe.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    _check_leaves(found)
    is_annotated = any(map(has_annotation, jax.tree.leaves(params, is_leaf=has_annotation)))
    if is_annotated or policy.data.compiler_axes or policy.data.experts:
        from zerojax.layout.annotations import axes_of_model

        others = axes_of_model(params, policy.data, others)
    others = others or [()] * len(found)
    paths = [path_of(path) for path, _ in found]
    for option in filter(None, (trainable, overwrite)):
        from zerojax.config.chosen import LeafMask

        if isinstance(option, LeafMask):
            option.check(paths)
    given = [jax.ShapeDtypeStruct(x.shape, canonical(x.dtype)) for _, x in found]
    named = frozenset(overwritten)
    if is_annotated or overwrite is not None or any(OVERWRITE in path for path in paths):
        from zerojax.layout.annotations import overwritten_leaves

        named = overwritten_leaves(params, paths, given, overwrite=overwrite, known=overwritten)
    kept = {i for i in named if has_gradient(given[i].dtype)}
    types = [types_of(paths[i], x, None if i in kept else precision) for i, x in enumerate(given)]
    grads = [
        shard_leaf(jax.tree_util.keystr(path), tuple(x.shape), master, other, policy)
        for (path, x), other, (master, _) in zip(found, others, types, strict=True)
    ]
    replicated = functools.partial(dataclasses.replace, kind="replicated", dim=None, reason=REASON)
    grads = [replicated(leaf) if i in kept else leaf for i, leaf in enumerate(grads)]
    seen = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in grads]
    chosen = [trainable is None or bool(trainable(path, x)) for path, x in zip(paths, seen, strict=True)]
    trained = tuple(i for i, on in enumerate(chosen) if on and has_gradient(seen[i].dtype) and i not in kept)
    # A parameter that is already stored with padding stays padded. The decision of `keep_whole` depends on the whole
    # tree. For a part of the tree the decision could differ, but gradients must have the form of the parameters.
    stored = {i for i, (_, x) in enumerate(found) if is_padded(x) and x.storage.shape == grads[i].storage_shape}
    every = range(len(grads))
    grads = keep_whole(grads, set(every) - stored, (every, trained), dict(policy.data.sizes))
    if wire is not None:
        with_reason = lambda leaf, reason: dataclasses.replace(leaf, is_quantised=not reason, unquantised=reason)
        grads = [with_reason(leaf, unquantised(wire, path, leaf)) for path, leaf in zip(paths, grads, strict=True)]
    compute = tuple(compute for _, compute in types)
    params = tuple(storage_leaf(leaf, policy, narrow) for leaf, narrow in zip(grads, compute, strict=True))
    return Layout(policy, treedef, params, tuple(grads), compute, trained, tuple(sorted(kept)))


def _check_leaves(found: Sequence[tuple[Any, Any]]) -> None:
    for path, x in found:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is a {type(x).__name__}, not an array. "
                "Convert numbers to arrays: jax.tree.map(jnp.asarray, params). If a model also holds functions or "
                "flags, pass only its arrays: params, static = eqx.partition(model, eqx.is_array), and in the loss "
                "model = eqx.combine(params, static)."
            )
        if str(x.dtype) in UNSAFE:
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {x.dtype}. JAX's operations on arrays of this type corrupt the "
                f"memory of the process. Keep it as int4, uint4 or wider."
            )


def has_annotation(node: Any) -> bool:
    """Return whether a node may be annotated: it is a Flax box or Variable."""
    return hasattr(type(node), "get_partition_spec") or hasattr(type(node), "get_metadata")


def types_of(path: str, x: Any, precision: "Precision | None") -> tuple[Any, Any]:
    """Return `(master, compute)`: the type in which a parameter is updated, and the type that the loss sees."""
    if precision is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.dtype, x.dtype
    kept = precision.keep is not None and precision.keep(path, jax.ShapeDtypeStruct(x.shape, precision.master))
    return precision.master, precision.master if kept else precision.compute


def shard_leaf(path: str, shape: tuple[int, ...], dtype, others: tuple, policy: LayoutPolicy) -> Leaf:
    """Return the layout of one leaf, which is sharded along a dim, flat if the leaf is small, or replicated."""
    stays = axes_of(others)
    axes = tuple(axis for axis in policy.data.opt_state or policy.data.batch if axis not in stays)
    leaf = Leaf(path, shape, dtype, axes, policy.data.size(axes), others=others)
    if policy.data.experts:
        from zerojax.layout.annotations import check_experts

        check_experts(leaf, policy.data)
    with_changes = functools.partial(dataclasses.replace, leaf)
    if policy.stage == 0:
        return with_changes(reason="stage 0 shards nothing")
    if not axes:
        return with_changes(reason=f"its sharding divides it over {in_words(tuple(stays))}")
    if not leaf.size:
        return with_changes(reason="no elements")
    if not is_numeric(dtype):
        return with_changes(reason=f"{dtype} has no arithmetic")
    if leaf.size < policy.persist_below and not any(others):
        reason = f"small: {leaf.size} elements, under persist_below={policy.persist_below}"
        return with_changes(kind="flat" if leaf.shards > 1 else "replicated", reason=reason)
    free = [i for i in range(len(shape)) if i >= len(others) or not others[i]]
    if policy.encodes_state:
        from zerojax.layout.encoding import is_encodable

        free = [i for i in free if i < len(shape) - 1 or not is_encodable(shape, policy.persist_below)]
    if not free:
        return with_changes(reason="it has no dim, or other mesh axes divide every dim")
    return with_changes(kind="sharded", dim=best_dim(shape, free, leaf.shards))


def check_experts_named(layout: Layout) -> None:
    """Raise a ValueError if there are axes for experts, but no parameter names one. All experts would be gathered."""
    data = layout.policy.data
    if data.experts and set(axes_of(*(leaf.others for leaf in layout.params))).isdisjoint(data.experts):
        raise ValueError(
            f"expert_axis= gives {in_words(data.experts)} to experts, but no parameter's sharding or Flax metadata "
            "names it. Give create the experts as arrays or shapes with a NamedSharding, such as P('expert'), for "
            "example from jax.jit(init, out_shardings=...)."
        )


def unquantised(wire: "Wire", path: str, leaf: Leaf) -> str:
    """Return the reason why collectives do not quantise a leaf, or an empty string if they quantise it."""
    if leaf.kind != "sharded" or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.reason or f"{leaf.dtype} is no floating type"
    return wire.reason_against(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), math.prod(leaf.local_shape))


def best_dim(shape: tuple[int, ...], free: list[int], shards: int) -> int:
    """Return the dim that needs the least padding. Among equals, prefer the longest dim, and then the first."""

    def cost(dim):
        extent, _ = shard_extent(shape[dim], shards)
        return extent * shards / shape[dim], -shape[dim], dim

    return min(free, key=cost)


def storage_leaf(leaf: Leaf, policy: LayoutPolicy, compute: Any) -> Leaf:
    """Return the layout in which a parameter is stored. `leaf` is the layout of its gradient."""
    leaf = dataclasses.replace(leaf, dtype=compute if policy.stores_compute_dtype else leaf.dtype)
    if policy.data.params and leaf.kind == "sharded":
        axes = tuple(axis for axis in policy.data.params if axis in leaf.axes)
        shards = policy.data.size(axes)
        further = leaf.shards // shards
        return dataclasses.replace(leaf, host=policy.params_on_host, axes=axes, shards=shards, further=further)
    has_reason = policy.stage in (0, 3) or leaf.reason == REASON
    reason = leaf.reason if has_reason else f"stage {policy.stage} keeps parameters replicated"
    return dataclasses.replace(leaf, kind="replicated", dim=None, reason=reason)


def has_gradient(dtype) -> bool:
    """Return whether arrays of a type have a gradient. True for PRNG keys, so that training them raises an error."""
    return jnp.issubdtype(dtype, jnp.inexact) or not is_numeric(dtype)


def canonical(dtype) -> Any:
    """Return the type of JAX's copy of an array, such as float32 for NumPy's float64 unless x64 is enabled."""
    return jax.dtypes.canonicalize_dtype(dtype) if is_numeric(dtype) else dtype


def is_numeric(dtype) -> bool:
    """Return whether a type is numeric or bool. False for PRNG keys, which cannot be added or padded with zeros."""
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def params_of_state(state, layout: Layout) -> tuple[int | None, ...]:
    """Return, for each leaf of an optimizer state, the index of its parameter; None for a leaf such as a count.

    The path of a state leaf ends with its parameter's path, because optimizers keep trees like the parameters.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    keyed, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(layout.treedef, layout.grads))
    by_path = {path: i for i, (path, _) in enumerate(keyed)}
    # If the only parameter is an array, its path is empty and matches every leaf. A scalar would match counts: drop it.
    by_path = {path: i for path, i in by_path.items() if path or layout.grads[i].shape}
    suffixes = ([by_path[path[k:]] for k in range(len(path) + 1) if path[k:] in by_path] for path, _ in found)
    return tuple(next(iter(matches), None) for matches in suffixes)


def lay_out_state(state, layout: Layout, *, param_of: tuple[int | None, ...], flat: frozenset[int]) -> tuple[Leaf, ...]:
    """Lay out the state of any transformation.

    A leaf whose last dims have its parameter's shape is sharded like the parameter. Further dims may come first, as in
    a history. A leaf of any other shape is sharded along its best dim, or replicated. `param_of` is the result of
    `params_of_state`. `flat` has the indices of parameters with an elementwise update, whose state may be flat.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves, others = [], []
    for k, ((path, x), param) in enumerate(zip(found, param_of, strict=True)):
        name = jax.tree_util.keystr(path)
        leaf = None if param is None else like_parameter(name, x, layout.grads[param], param in flat)
        others += [] if leaf else [k]
        if leaf is None:
            leaf = shard_leaf(name, tuple(x.shape), x.dtype, (), layout.policy)
            leaf = dataclasses.replace(leaf, kind="replicated") if leaf.kind == "flat" else leaf
        leaves.append(leaf)
    every = (*leaves, *layout.grads)
    return keep_whole(every, others, (range(len(every)),), dict(layout.policy.data.sizes))[: len(leaves)]


def like_parameter(path: str, x, grad: Leaf, may_be_flat: bool) -> Leaf | None:
    """Return the layout of a state leaf if its last dims have its parameter's shape, otherwise None."""
    lead = len(x.shape) - len(grad.shape)
    if tuple(x.shape[lead:]) != grad.shape:  # also not equal if `x` has fewer dims than `grad`
        return None
    leaf = dataclasses.replace(grad, path=path, shape=tuple(x.shape), dtype=x.dtype)
    if grad.kind == "flat" and (lead or not may_be_flat):
        return dataclasses.replace(leaf, kind="replicated", reason=f"{grad.reason}; {NOT_FLAT}")
    if not lead:
        return leaf
    dim = None if grad.dim is None else grad.dim + lead
    return dataclasses.replace(leaf, dim=dim, others=(None,) * lead + grad.others)
