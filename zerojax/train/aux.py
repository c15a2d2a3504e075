"""Combine the auxiliary results (aux) of a loss over microbatches and devices. Markers choose how.

In global view without microbatches, the loss is called only once, and its aux is returned unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.compat import common_dtype

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Marker:
    """A pytree node in aux. The class of the node says how the arrays in the node are combined."""

    tree: PyTree


def marker(cls: type) -> type:
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls), ["tree"], [])


@marker
class Mean(Marker):
    """Mark floats that are means over rows. They are averaged over microbatches and devices.

    The average uses the weights of a weighted loss. Float scalars without a marker count as `Mean`.

    Examples:
        >>> return loss, zerojax.Mean(jnp.mean(correct))
    """


@marker
class Sum(Marker):
    """Mark sums over rows, such as counts. They are added up over microbatches and devices.

    Examples:
        >>> return loss, zerojax.Sum(jnp.sum(mask))
    """


@marker
class Rows(Marker):
    """Mark arrays whose dim 0 has one entry per row, such as logits. The entries of all rows are returned, in order.

    Examples:
        >>> return loss, zerojax.Rows(logits)
    """


@marker
class Same(Marker):
    """Mark values that are equal on every device, such as a counter. The last microbatch's value is returned.

    Examples:
        >>> return loss, zerojax.Same(count + 1)
    """


def is_marker(x: Any) -> bool:
    return isinstance(x, Marker)


def unmarked(aux: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.tree if is_marker(x) else x, aux, is_leaf=is_marker)


@jax.named_scope(names.MEAN)
def combine(
    aux: PyTree, weights: Array, total: Array | int, comm: Collectives, rows_of: Callable[[Array], Array]
) -> tuple[PyTree, PyTree]:
    """Combine the aux of all microbatches and devices.

    Args:
        aux: The auxiliary results of this device, with the microbatches stacked along dim 0.
        weights: One weight per microbatch.
        total: The sum of all weights, over microbatches and devices.
        comm: Collectives over the devices.
        rows_of: Function that merges dims 0 and 1 (microbatches, rows) into rows in the order of the batch.

    Returns:
        `(aux, rows)`, two trees with the same structure. `aux` has the leaves that are equal on every device, and None
        instead of rows. `rows` has the leaves marked as `Rows`, and None instead of all other leaves.

    Raises:
        TypeError: If an unmarked leaf is not a float scalar.
    """

    def mean(path, x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"aux{path} is {x.dtype}, which has no mean. If it is a count, mark it with zerojax.Sum.")
        wide = x.astype(common_dtype(x.dtype, jnp.float32))
        each = (weights.astype(wide.dtype) / total).reshape(-1, *[1] * (x.ndim - 1))
        # If the weight of a mean is 0, the mean itself may be 0/0.
        return comm.over_workers(lax.psum, jnp.where(each == 0, 0, each * wide).sum(0)).astype(x.dtype)

    def scalar_mean(path, x):
        if x.ndim > 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"aux{path} is {x.dtype}{list(x.shape[1:])}, which each device computes for the rows of each "
                "microbatch. Say how to combine the values: zerojax.Mean(x), zerojax.Sum(x), zerojax.Rows(x) for one "
                "entry per row, or zerojax.Same(x) for values that are equal everywhere. Or let the loss see all rows: "
                'zero_shard(..., view="global") without microbatches.'
            )
        return mean(path, x)

    def rows(path, x):
        if x.ndim < 2:
            raise TypeError(
                f"aux{path} is marked with zerojax.Rows, but it is a scalar without rows. Mark it with zerojax.Mean or "
                "zerojax.Sum."
            )
        return rows_of(x)

    kinds = {
        Mean: mean,
        Sum: lambda path, x: comm.over_workers(lax.psum, x.sum(0, dtype=None if x.dtype == bool else x.dtype)),
        Rows: rows,
        Same: lambda path, x: x[-1],
    }

    def only(wanted: bool) -> PyTree:
        def each(path, node):
            name, kind = jax.tree_util.keystr(path), kinds.get(type(node), scalar_mean)
            chosen = isinstance(node, Rows) == wanted
            leaf = lambda below, x: kind(name + jax.tree_util.keystr(below), x) if chosen else None
            return jax.tree_util.tree_map_with_path(leaf, unmarked(node))

        return jax.tree_util.tree_map_with_path(each, aux, is_leaf=is_marker)

    return only(False), only(True)


def merged(aux: PyTree, rows: PyTree) -> PyTree:
    """Merge the two trees that `combine` returns."""
    is_none = lambda x: x is None
    return jax.tree.map(lambda a, b: b if a is None else a, aux, rows, is_leaf=is_none)
