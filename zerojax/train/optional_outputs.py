"""Compute what a step returns only on request: auxiliary results (aux), mutable state, and norms per parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree, Shaped

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.layout.leaf import Leaf
from zerojax.metrics import Mean, PerRow, Replicated, Sum, is_marker, unmarked
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import to_device
from zerojax.train.loss import View, at_least_float32


@jax.named_scope(names.MEAN)
def combine(view: View, aux: PyTree, weights: Array, total: Array | int) -> tuple[PyTree, PyTree]:
    """Combine the aux of all microbatches and devices, as the markers of `metrics` say.

    `aux` has this device's microbatches, stacked along dim 0. `weights` has the weight of each microbatch, and `total`
    is the sum of all weights over microbatches and devices. Return `(aux, rows)`, two trees of the same structure. The
    tree `rows` has the leaves marked as `PerRow`. The tree `aux` has all other leaves, combined to values that are
    equal on every device. Each tree has None for the leaves of the other tree.

    Raises:
        TypeError: If a leaf without a marker is not a float scalar, unless the loss is called only once.
    """
    comm = view.comm
    if view.is_one_loss:
        only_one = unmarked(jax.tree.map(lambda x: x.squeeze(0), aux))
        return only_one, jax.tree.map(lambda _: None, only_one)

    def mean(path, x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"aux{path} is {x.dtype}, which has no mean. If it is a count, mark it with zerojax.metrics.Sum."
            )
        wide = at_least_float32(x)
        each = (weights.astype(wide.dtype) / total).reshape(-1, *[1] * (x.ndim - 1))
        # If the weight of a mean is 0, the mean itself may be 0/0.
        return comm.over_workers(lax.psum, jnp.where(each == 0, 0, each * wide).sum(0)).astype(x.dtype)

    def scalar_mean(path, x):
        if x.ndim > 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"aux{path} is {x.dtype}{list(x.shape[1:])}, which each device computes for the rows of each "
                "microbatch. Say how to combine the values, with a marker of zerojax.metrics: Mean(x), Sum(x), "
                "PerRow(x) for one entry per row, or Replicated(x) for values that are equal everywhere. Or let the "
                'loss see all rows: zero_shard(..., view="global") without microbatches.'
            )
        return mean(path, x)

    def rows(path, x):
        if x.ndim < 2:
            raise TypeError(
                f"aux{path} is marked with zerojax.metrics.PerRow, but it is a scalar without rows. Mark it with "
                "zerojax.metrics.Mean or zerojax.metrics.Sum."
            )
        return view.rows_of(x)

    kinds = {
        Mean: mean,
        Sum: lambda path, x: comm.over_workers(lax.psum, x.sum(0, dtype=None if x.dtype == bool else x.dtype)),
        PerRow: rows,
        Replicated: lambda path, x: x[-1],
    }

    def only(wanted: bool) -> PyTree:
        def each(path, node):
            name, kind = jax.tree_util.keystr(path), kinds.get(type(node), scalar_mean)
            chosen = isinstance(node, PerRow) == wanted
            leaf = lambda below, x: kind(name + jax.tree_util.keystr(below), x) if chosen else None
            return jax.tree_util.tree_map_with_path(leaf, unmarked(node))

        return jax.tree_util.tree_map_with_path(each, aux, is_leaf=is_marker)

    return only(False), only(True)


def whole_aux(aux: PyTree, rows: PyTree) -> PyTree:
    """Merge the two trees that `combine` returns."""
    is_none = lambda x: x is None
    return jax.tree.map(lambda a, b: b if a is None else a, aux, rows, is_leaf=is_none)


@jax.named_scope(names.MEAN)
def mean_mutable(mutable: PyTree, comm: Collectives) -> Any:
    """Average the float leaves of the mutable state over the devices. Return other leaves unchanged."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return comm.over_workers(lax.pmean, at_least_float32(x)).astype(x.dtype)

    return jax.tree.map(mean, mutable)


@jax.named_scope(names.GRAD_NORM)
def norms_of_update(plan: ShardingPlan, old: Sequence[Array], updated: Mapping[int, Array]) -> dict[str, Any]:
    """Return the norm of each trained parameter before its update, and the norm of its change."""
    before = [at_least_float32(to_device(x)) for x in old]
    changes = [at_least_float32(updated[i]) - x for i, x in enumerate(before)]
    norms = lambda arrays: plan.trained.treedef.unflatten(
        [norm(*pair) for pair in zip(arrays, plan.grads, strict=True)]
    )
    return {"param_norms": norms(before), "update_norms": norms(changes)}


def norm(x: Shaped[Array, "*storage"], leaf: Leaf) -> Array:
    """Return the norm of a stored array without its padding.

    The padding is masked and not sliced off, because a slice may move elements between devices.
    """
    shape = leaf.shape if x.ndim == len(leaf.shape) else (leaf.size,)  # a flat array has another rank
    squares = jnp.square(at_least_float32(jnp.abs(x)))
    for d, n in enumerate(shape):
        if n < x.shape[d]:
            squares = jnp.where(lax.broadcasted_iota(np.uint32, x.shape, d) < n, squares, 0)
    return jnp.sqrt(jnp.sum(squares))
