"""What a loss returns beside its loss: what a leaf means where it was computed in several parts.

In global view and without microbatches there is one part, and aux comes back as it was returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax.comm.collectives import Collectives
from zerojax.config.precision import common_dtype

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Marker:
    """What the leaves of a part of aux are.

    Attributes:
        tree: Arrays.
    """

    tree: PyTree


def marker(cls: type) -> type:
    """Make a marker a pytree node."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls), ["tree"], [])


@marker
class Mean(Marker):
    """Means over the rows, floats: the mean is taken, weighted where the loss is. Unmarked float scalars are these."""


@marker
class Sum(Marker):
    """Sums over the rows, counts among them: the sum is taken."""


@marker
class Rows(Marker):
    """One entry a row of the batch on dim 0, such as logits: all are returned, in the order of the rows."""


@marker
class Same(Marker):
    """Equal on every device, such as a counter: the last microbatch's is returned."""


def is_marker(x: Any) -> bool:
    """Return whether a node of aux is a marker."""
    return isinstance(x, Marker)


def unmarked(aux: PyTree) -> PyTree:
    """Return the tree without its markers."""
    return jax.tree.map(lambda x: x.tree if is_marker(x) else x, aux, is_leaf=is_marker)


def combine(
    aux: PyTree, weights: Array, total: Array | int, comm: Collectives, rows_of: Callable[[Array], Array]
) -> tuple[PyTree, PyTree]:
    """Combine the aux of all microbatches and devices.

    Args:
        aux: Each leaf with the microbatches on dim 0.
        weights: One weight a microbatch.
        total: Their sum over the devices.
        comm: Sums over the devices.
        rows_of: Puts the rows of the microbatches, dims 0 and 1, in the order of the batch.

    Returns:
        `(aux, rows)`, two trees of one structure: what is equal on every device, and this view's
        own rows; each None where the other has something.

    Raises:
        TypeError: If a leaf is no float scalar and nothing says what it is.
    """

    def mean(path, x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(f"aux{path} is {x.dtype}, which has no mean. Mark a count with zerojax.Sum.")
        wide = x.astype(common_dtype(x.dtype, jnp.float32))
        each = (weights.astype(wide.dtype) / total).reshape(-1, *[1] * (x.ndim - 1))
        # with weight 0 the mean itself may be 0/0
        return comm.psum(jnp.where(each == 0, 0, each * wide).sum(0)).astype(x.dtype)

    def scalar_mean(path, x):
        if x.ndim > 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
            raise TypeError(
                f"aux{path} is {x.dtype}{list(x.shape[1:])}, computed by each device and microbatch for rows of its "
                "own. Say what becomes of it: zerojax.Mean(x), zerojax.Sum(x), zerojax.Rows(x) for one entry a row, "
                'zerojax.Same(x) for what is equal everywhere; or see all rows: zero_shard(..., view="global") without '
                "microbatches."
            )
        return mean(path, x)

    def rows(path, x):
        if x.ndim < 2:
            raise TypeError(f"aux{path} is marked with zerojax.Rows, and is a scalar: it has no rows on dim 0.")
        return rows_of(x)

    kinds = {
        Mean: mean,
        Sum: lambda path, x: comm.psum(x.sum(0, dtype=None if x.dtype == bool else x.dtype)),
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
    """Merge the two trees of `combine`."""
    is_none = lambda x: x is None
    return jax.tree.map(lambda a, b: b if a is None else a, aux, rows, is_leaf=is_none)
