"""Lay out an optimizer's state: each leaf like the parameter it belongs to, which is found by structure."""

import dataclasses

import jax

from zerojax.config import LayoutPolicy
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout, shard_leaf
from zerojax.layout.undivided import keep_whole


def params_of_state(state, layout: Layout) -> tuple[int | None, ...]:
    """Return, for each leaf of an optimizer state, the parameter that it belongs to, found by structure.

    A state leaf belongs to the parameter whose path its own path ends with, whatever
    the transformation calls the tree around it; a leaf that belongs to none (a count) gives None.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    keyed, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(layout.treedef, layout.grads))
    by_path = {path: i for i, (path, _) in enumerate(keyed)}
    # a parameter that is a tree of its own has the empty path, which every path ends with
    by_path = {path: i for path, i in by_path.items() if path or layout.grads[i].shape}
    suffixes = ([by_path[path[k:]] for k in range(len(path) + 1) if path[k:] in by_path] for path, _ in found)
    return tuple(next(iter(matches), None) for matches in suffixes)


def lay_out_state(
    state, layout: Layout, policy: LayoutPolicy, *, param_of: tuple[int | None, ...], flat: frozenset[int]
) -> tuple[Leaf, ...]:
    """Lay out an optimizer's state, whatever the transformation.

    A leaf of its parameter's shape (perhaps with dims in front, as a history has) is
    sharded like the parameter, flat where its index is in `flat`; a leaf of any other shape
    on its own best dim, or it stays replicated. `param_of` is what `params_of_state` found.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves, others = [], []
    for k, ((path, x), param) in enumerate(zip(found, param_of, strict=True)):
        name = jax.tree_util.keystr(path)
        leaf = None if param is None else like_parameter(name, x, layout.grads[param], param in flat)
        others += [] if leaf else [k]
        leaves.append(leaf or shard_state_leaf(name, x, policy))
    every = (*leaves, *layout.grads)
    return keep_whole(every, others, (range(len(every)),), dict(policy.data.sizes))[: len(leaves)]


def like_parameter(path: str, x, grad: Leaf, may_be_flat: bool) -> Leaf | None:
    """Shard a state leaf of its parameter's shape like the parameter; None if the shape differs."""
    lead = len(x.shape) - len(grad.shape)
    if lead < 0 or tuple(x.shape[lead:]) != grad.shape:
        return None
    leaf = dataclasses.replace(grad, path=path, shape=tuple(x.shape), dtype=x.dtype)
    if grad.kind == "flat" and (lead or not may_be_flat):
        return dataclasses.replace(leaf, kind="replicated", reason=f"{grad.reason}; its update is not elementwise")
    if not lead:
        return leaf
    dim = None if grad.dim is None else grad.dim + lead
    return dataclasses.replace(leaf, dim=dim, others=(None,) * lead + grad.others)


def shard_state_leaf(path: str, x, policy: LayoutPolicy) -> Leaf:
    """Shard a state leaf without a parameter's shape when it is large; otherwise replicate it."""
    leaf = shard_leaf(path, tuple(x.shape), x.dtype, (), policy)
    return dataclasses.replace(leaf, kind="replicated") if leaf.kind == "flat" else leaf
