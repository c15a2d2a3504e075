"""Lay out an optimizer state. A leaf that belongs to a parameter, by its path, is laid out like the parameter."""

import dataclasses

import jax

from zerojax.config import LayoutPolicy
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout, shard_leaf
from zerojax.layout.undivided import keep_whole


def params_of_state(state, layout: Layout) -> tuple[int | None, ...]:
    """Return, for each leaf of an optimizer state, the index of its parameter; None for a leaf such as a count.

    The path of a state leaf ends with its parameter's path, because optimizers keep trees like the parameters.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    keyed, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(layout.treedef, layout.grads))
    by_path = {path: i for i, (path, _) in enumerate(keyed)}
    # If the parameters are one array, its path is empty and matches every leaf. A scalar would match counts: drop it.
    by_path = {path: i for path, i in by_path.items() if path or layout.grads[i].shape}
    suffixes = ([by_path[path[k:]] for k in range(len(path) + 1) if path[k:] in by_path] for path, _ in found)
    return tuple(next(iter(matches), None) for matches in suffixes)


def lay_out_state(
    state, layout: Layout, policy: LayoutPolicy, *, param_of: tuple[int | None, ...], flat: frozenset[int]
) -> tuple[Leaf, ...]:
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
            leaf = shard_leaf(name, tuple(x.shape), x.dtype, (), policy)
            leaf = dataclasses.replace(leaf, kind="replicated") if leaf.kind == "flat" else leaf
        leaves.append(leaf)
    every = (*leaves, *layout.grads)
    return keep_whole(every, others, (range(len(every)),), dict(policy.data.sizes))[: len(leaves)]


def like_parameter(path: str, x, grad: Leaf, may_be_flat: bool) -> Leaf | None:
    """Return the layout of a state leaf if its last dims have its parameter's shape, otherwise None."""
    lead = len(x.shape) - len(grad.shape)
    if tuple(x.shape[lead:]) != grad.shape:  # also not equal if `x` has fewer dims than `grad`
        return None
    leaf = dataclasses.replace(grad, path=path, shape=tuple(x.shape), dtype=x.dtype)
    if grad.kind == "flat" and (lead or not may_be_flat):
        return dataclasses.replace(leaf, kind="replicated", reason=f"{grad.reason}; its update is not elementwise")
    if not lead:
        return leaf
    dim = None if grad.dim is None else grad.dim + lead
    return dataclasses.replace(leaf, dim=dim, others=(None,) * lead + grad.others)
