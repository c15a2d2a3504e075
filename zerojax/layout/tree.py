"""Lay out a whole tree of parameters: which leaf is cut, on which dim, at which stage."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from ..config import Paths, Precision, path_of
from .leaf import Leaf, shard_extent
from .padded import Padded, is_padded


@dataclasses.dataclass(frozen=True)
class Rules:
    """What decides a layout: the stage, the mesh axis, and what counts as small.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        axis: The mesh axis leaves are divided over.
        shards: Size of that axis.
        axes: Names of all axes of the mesh.
        persist_below: A leaf of fewer elements is not cut by dim.
        narrows: Whether parameters are stored in the type they are computed in.
        host: Whether parameters that are cut wait in host memory.
    """

    stage: int
    axis: str
    shards: int
    axes: tuple[str, ...]
    persist_below: int
    narrows: bool = True
    host: bool = False


class HashedOnce:
    """A frozen record that rides in a pytree's structure, where jit hashes and compares it at every call.

    The hash is computed once, and the same object is equal to itself at no cost.
    """

    @functools.cached_property
    def _fields(self) -> tuple:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # pyright: ignore[reportArgumentType]

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        """Hash of all fields."""
        return self._hash

    def __getstate__(self) -> dict:
        """The fields alone: another process hashes strings differently."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def __eq__(self, other) -> bool:
        """Equality of all fields."""
        return self is other or (
            type(self) is type(other) and self._hash == other._hash and self._fields == other._fields
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Layout(HashedOnce):
    """Where every leaf of a parameter tree lives.

    Attributes:
        rules: What decided it.
        treedef: Structure of the parameters, in logical form (no `Padded` nodes).
        params: One `Leaf` a parameter: how it is stored.
        parts: One `Leaf` a parameter: how its gradient and optimizer state are divided
            when the stage divides them, in the type of the master weights. A small leaf
            is `"flat"` here.
        compute: The type in which the loss function sees each parameter.
        trained: Indices of the parameters that are trained.
    """

    rules: Rules
    treedef: jax.tree_util.PyTreeDef
    params: tuple[Leaf, ...]
    parts: tuple[Leaf, ...]
    compute: tuple[np.dtype, ...]
    trained: tuple[int, ...]

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the parameters as predicates are given them."""
        keyed, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self.treedef, self.params))
        return tuple(path_of(path) for path, _ in keyed)

    def only_trained(self) -> "Layout":
        """The layout of the parameters that are trained, the others holes in the tree, as `optax.masked` makes them."""
        if len(self.trained) == len(self.params):
            return self
        inside = frozenset(self.trained)
        holes = [0 if i in inside else optax.MaskedNode() for i in range(len(self.params))]
        pick = lambda items: tuple(items[i] for i in self.trained)
        return Layout(
            self.rules,
            jax.tree.structure(jax.tree.unflatten(self.treedef, holes)),
            pick(self.params),
            pick(self.parts),
            pick(self.compute),
            tuple(range(len(self.trained))),
        )


def lay_out(
    params,
    rules: Rules,
    *,
    precision: Precision | None = None,
    trainable: Callable[[str, Any], bool] | None = None,
) -> Layout:
    """Decide where each leaf of `params` lives.

    Args:
        params: Arrays, `Padded` arrays or `jax.ShapeDtypeStruct`s. A leaf that is already
            divided over another mesh axis (by its sharding, or by Flax's partition
            metadata) stays so, and the data axis goes on a free dim.
        rules: Stage, axis and thresholds.
        precision: Types; None leaves every leaf its own.
        trainable: Which leaves are trained; None is all of them.

    Returns:
        The layout of parameters, gradients and parameter-shaped optimizer state.

    Raises:
        TypeError: If a leaf is no array and no shape.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)
    for path, x in found:
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is a {type(x).__name__}, not an array. "
                f"Make arrays of all leaves: jax.tree.map(jnp.asarray, params)."
            )
    paths = [path_of(path) for path, _ in found]
    if isinstance(trainable, Paths):
        trainable.check(paths)
    types = [types_of(path, x, precision) for path, (_, x) in zip(paths, found, strict=True)]
    divided = [
        divide(jax.tree_util.keystr(path), tuple(x.shape), master, other_axes(x, spec, rules), rules)
        for (path, x), spec, (master, _) in zip(found, partition_metadata(params), types, strict=True)
    ]
    compute = tuple(compute for _, compute in types)
    params = tuple(stored(leaf, rules, narrow) for leaf, narrow in zip(divided, compute, strict=True))
    seen = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in divided]
    chosen = [trainable is None or bool(trainable(path, x)) for path, x in zip(paths, seen, strict=True)]
    trained = tuple(i for i, on in enumerate(chosen) if on)
    return Layout(rules, treedef, params, tuple(divided), compute, trained)


def types_of(path: str, x: Any, precision: Precision | None) -> tuple[Any, Any]:
    """`(master, compute)`: the types in which a parameter is updated and used."""
    if precision is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x.dtype, x.dtype
    kept = precision.keep is not None and precision.keep(path, jax.ShapeDtypeStruct(x.shape, precision.master))
    return precision.master, precision.master if kept else precision.compute


def divide(path: str, shape: tuple[int, ...], dtype, others: tuple, rules: Rules) -> Leaf:
    """How one leaf is divided over the axis: by dim, flat because it is small, or not at all."""
    leaf = Leaf(path, shape, dtype, rules.axis, rules.shards, others=others)
    whole = functools.partial(dataclasses.replace, leaf)
    if rules.stage == 0:
        return whole(reason="stage 0 divides nothing")
    if not leaf.size:
        return whole(reason="no elements")
    if not is_numeric(dtype):
        return whole(reason=f"{dtype} has no arithmetic")
    if leaf.size < rules.persist_below and not any(others):
        return whole(kind="flat", reason=f"small: {leaf.size} elements, under persist_below={rules.persist_below}")
    free = [i for i in range(len(shape)) if i >= len(others) or not others[i]]
    if not free:
        return whole(reason="every dim is divided over another mesh axis, or there is none")
    return whole(kind="cut", dim=best_dim(shape, free, rules.shards))


def best_dim(shape: tuple[int, ...], free: list[int], shards: int) -> int:
    """The dim whose cut pads least; among those the longest, then the first."""

    def cost(dim):
        extent, _ = shard_extent(shape[dim], shards)
        return extent * shards / shape[dim], -shape[dim], dim

    return min(free, key=cost)


def stored(leaf: Leaf, rules: Rules, compute: Any) -> Leaf:
    """How the parameter itself is stored, given how its gradient is divided, and the type it is used in."""
    leaf = dataclasses.replace(leaf, dtype=compute if rules.narrows else leaf.dtype)
    if rules.stage == 3 and leaf.kind == "cut":
        return dataclasses.replace(leaf, host=rules.host)
    reason = leaf.reason if rules.stage in (0, 3) else f"stage {rules.stage} keeps parameters whole"
    return dataclasses.replace(leaf, kind="whole", dim=None, reason=reason)


def owners_of(state, layout: Layout) -> tuple[int | None, ...]:
    """For each leaf of an optimizer's state, the parameter it belongs to, found by structure.

    A state leaf belongs to the parameter whose path its own path ends with, whatever
    the transformation calls the tree it stands in.

    Args:
        state: What `init` gives for logical parameters; shapes are enough.
        layout: Layout of the parameters.

    Returns:
        Indices into the parameters, None for a leaf that belongs to none (a count).
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    keyed, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(layout.treedef, layout.parts))
    by_path = {path: i for i, (path, _) in enumerate(keyed)}
    # a parameter that is a tree of its own has the empty path, which every path ends with
    by_path = {path: i for path, i in by_path.items() if path or layout.parts[i].shape}
    suffixes = ([by_path[path[k:]] for k in range(len(path) + 1) if path[k:] in by_path] for path, _ in found)
    return tuple(next(iter(matches), None) for matches in suffixes)


def match_state(
    state, layout: Layout, rules: Rules, *, owners: tuple[int | None, ...], flat: frozenset[int]
) -> tuple[Leaf, ...]:
    """Lay out an optimizer's state, whatever the transformation.

    A leaf of its parameter's shape (perhaps with dims in front, as a history has) is
    divided like the parameter; a leaf of any other shape on its own best dim, or it
    stays whole.

    Args:
        state: What `init` gives for logical parameters; shapes are enough.
        layout: Layout of the parameters.
        rules: Stage, axis and thresholds.
        owners: What `owners_of` found.
        flat: Indices of the parameters whose state may lie flattened.

    Returns:
        One `Leaf` for each leaf of `state`, in order.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves = []
    for (path, x), owner in zip(found, owners, strict=True):
        name = jax.tree_util.keystr(path)
        leaf = None if owner is None else like_parameter(name, x, layout.parts[owner], owner in flat)
        leaves.append(leaf or divide_state(name, x, rules))
    return tuple(leaves)


def like_parameter(path: str, x, part: Leaf, may_be_flat: bool) -> Leaf | None:
    """A state leaf of its parameter's shape, divided like the parameter; None if the shape differs."""
    lead = len(x.shape) - len(part.shape)
    if lead < 0 or tuple(x.shape[lead:]) != part.shape:
        return None
    leaf = dataclasses.replace(part, path=path, shape=tuple(x.shape), dtype=x.dtype)
    if part.kind == "flat" and (lead or not may_be_flat):
        return dataclasses.replace(leaf, kind="whole", reason=f"{part.reason}; its update is not elementwise")
    if not lead:
        return leaf
    dim = None if part.dim is None else part.dim + lead
    return dataclasses.replace(leaf, dim=dim, others=(None,) * lead + part.others)


def divide_state(path: str, x, rules: Rules) -> Leaf:
    """A state leaf that has no parameter's shape: cut when it is large, else whole."""
    leaf = divide(path, tuple(x.shape), x.dtype, (), rules)
    return dataclasses.replace(leaf, kind="whole") if leaf.kind == "flat" else leaf


def is_numeric(dtype) -> bool:
    """Whether a dtype can be added and padded with zeros (PRNG keys cannot)."""
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def partition_metadata(params) -> list:
    """For each leaf, the dims' axis names that Flax's boxes and Variables carry; () where there are none."""

    def names(node) -> tuple | None:
        if hasattr(node, "get_partition_spec"):
            return tuple(node.get_partition_spec())
        read = getattr(node, "get_metadata", None)
        metadata: dict = (read() if callable(read) else None) or {}  # pyright: ignore[reportAssignmentType]
        return metadata.get("out_sharding") or metadata.get("sharding_names") or None  # newer and older nnx

    def expand(node):
        spec = () if is_padded(node) else tuple(names(node) or ())
        return [spec] * len(jax.tree.leaves(node, is_leaf=is_padded))

    nodes = jax.tree.leaves(params, is_leaf=lambda x: is_padded(x) or bool(names(x)))
    return [spec for node in nodes for spec in expand(node)]


def other_axes(x, metadata: tuple, rules: Rules) -> tuple:
    """The mesh axes, other than the data axis, that already divide each dim of `x`."""
    sharding = getattr(x.storage if isinstance(x, Padded) else x, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    if not any(spec):
        spec = metadata
    kept = [keep(entry, rules) for entry in spec]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept)


def keep(entry, rules: Rules):
    """One dim's entry of a spec without the data axis and without names the mesh does not have."""
    names = entry if isinstance(entry, tuple) else (entry,)
    left = tuple(n for n in names if n != rules.axis and n in rules.axes)
    return left[0] if len(left) == 1 else left or None
