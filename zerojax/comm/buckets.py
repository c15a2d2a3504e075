"""Group leaves into buckets, and pack each bucket for one collective.

Many small collectives cost more than a few large ones. The leaves of a bucket are packed as one array of shape
`(shards, elements)`, whose row i holds the elements of shard i.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from zerojax.layout.leaf import Leaf, pad, trim

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def buckets(arrays: Sequence[Array], leaves: Sequence[Leaf], limit: int) -> list[list[int]]:
    """Group arrays into buckets, and return the indices of each bucket's arrays.

    - Flat leaves of one type share a bucket.
    - Consecutive sharded leaves of one type share a bucket of up to `limit` logical bytes.
    - A leaf that is also sharded over other mesh axes is alone in its bucket. Packing would gather the leaf over them.
    - A replicated leaf is alone in its bucket.

    Quantised and unquantised leaves never share a bucket.
    """
    found: list[list[int]] = []
    filled: dict = {}
    for i, (array, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        flat = leaf.kind == "flat"
        size = 0 if flat else jnp.dtype(array.dtype).itemsize * leaf.size
        others = any(entry is not None for entry in leaf.others)
        if leaf.kind == "replicated" or (not flat and (others or size >= limit)):
            found.append([i])
            continue
        key = leaf.kind, leaf.axes, array.dtype, leaf.is_quantised
        bucket, total = filled.get(key, ([], 0))
        if not bucket or (total + size > limit and not flat):
            bucket, total = [], 0
            found.append(bucket)
        bucket.append(i)
        filled[key] = bucket, total + size
    return found


def to_rows(value: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, "shards elements"]:
    """Return a logical array as one row per shard, with zeros in the padding."""
    if leaf.dim is None:
        return flatten(value, leaf).reshape(leaf.shards, -1)
    local, dim = leaf.local_shape, leaf.dim
    divided = pad(value, dim, leaf.storage_shape[dim]).reshape(*local[:dim], leaf.shards, *local[dim:])
    return jnp.moveaxis(divided, dim, 0).reshape(leaf.shards, -1)


def from_rows(rows: Shaped[Array, "shards elements"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    """Undo `to_rows`, and return the logical array without the padding."""
    if leaf.dim is None:
        return unflatten(rows.reshape(-1), leaf)
    divided = jnp.moveaxis(rows.reshape(leaf.shards, *leaf.local_shape), 0, leaf.dim)
    return trim(divided.reshape(leaf.storage_shape), leaf.dim, leaf.shape[leaf.dim])


def split(rows: Shaped[Array, "*shards elements"], leaves: Sequence[Leaf]) -> list[Array]:
    """Split the last dim of a bucket's rows into one array per leaf.

    XLA cannot see through the barrier where each leaf begins, so it compiles one kernel for all leaves of one shape.
    Without the barrier, it compiled one kernel per leaf, which took most of the compile time. An unsigned offset would
    save a few equations, but then XLA schedules a gather of the backward pass next to no product (docs/fit.md's model).
    """
    if len(leaves) == 1:
        return [rows]
    sizes = [math.prod(leaf.local_shape) for leaf in leaves]
    starts = lax.optimization_barrier([jnp.int32(start) for start in itertools.accumulate(sizes[:-1], initial=0)])
    slices = zip(starts, sizes, strict=True)
    return [lax.dynamic_slice_in_dim(rows, start, size, axis=rows.ndim - 1) for start, size in slices]


def flatten(value: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, " storage"]:
    return pad(value.reshape(-1), 0, leaf.storage_shape[0])


def unflatten(storage: Shaped[Array, " storage"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    return trim(storage, 0, leaf.size).reshape(leaf.shape)
