"""Gather shards into logical arrays and reduce-scatter their cotangents, several leaves to a bucket.

Many small collectives cost more than a few large ones, so the leaves of a block that
share a type travel together: each shard is flattened, the flat shards are joined, one
collective moves them, and the result is taken apart again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.gather.sharded_param import ShardedParam


def tie(anchor: Sequence[jax.Array], *groups: Sequence[jax.Array]) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """Let nothing that reads one of `groups` or `anchor` start before all of them are there; gives them back."""
    if not anchor or not any(groups):
        return list(anchor), [list(group) for group in groups]
    tied = iter(lax.optimization_barrier((*anchor, *[x for group in groups for x in group])))
    return [next(tied) for _ in anchor], [[next(tied) for _ in group] for group in groups]


def zero_after(anchor: Sequence[jax.Array]) -> jax.Array:
    """An int32 zero that is not there before `anchor` is.

    XLA:CPU takes barriers away before it schedules, and then makes first what reads nothing:
    it needs a dependence in the data. No simplification sees through this one.
    """
    zero = lax.optimization_barrier(jnp.int32(0))
    for array in anchor:
        if jnp.issubdtype(array.dtype, jnp.floating) and array.size:
            some = array[(0,) * array.ndim].astype(jnp.float32)
            return lax.bitcast_convert_type(some, jnp.int32) & zero
    return zero


def gather(
    shards: Sequence[jax.Array], weights: Sequence[ShardedParam], *, axis: tuple[str, ...], bucket_bytes: int
) -> list[jax.Array]:
    """All-gather the shards of `weights` into logical arrays, padding trimmed."""
    whole: list = [None] * len(shards)
    for bucket in buckets(shards, weights, bucket_bytes):
        with jax.named_scope(f"zerojax_gather[{_label(weights, bucket)}]"):
            parts = [shards[i] for i in bucket]
            if len(bucket) == 1:
                gathered = [lax.all_gather(parts[0], axis, axis=weights[bucket[0]].dim, tiled=True)]
            else:
                flat = lax.all_gather(jnp.concatenate([part.ravel() for part in parts]), axis)
                gathered = _taken_apart(flat, parts, [weights[i].dim for i in bucket])
            for i, value in zip(bucket, gathered, strict=True):
                whole[i] = lax.slice_in_dim(value, 0, weights[i].shape[weights[i].dim], axis=weights[i].dim)
    return whole


def reduce_scatter(
    cotangents: Sequence[jax.Array],
    weights: Sequence[ShardedParam],
    *,
    axis: tuple[str, ...],
    bucket_bytes: int,
    in_turn: bool = False,
) -> list[jax.Array]:
    """Sum logical cotangents over the devices and keep this device's shard; zeros in the padding.

    With `in_turn`, one bucket after the other, that of the last weights first, whose cotangents
    are there first: else XLA combines the buckets into one, which waits for the last cotangent.
    """
    padded = [_padded(value, weight) for value, weight in zip(cotangents, weights, strict=True)]
    shards: list = [None] * len(padded)
    found = buckets(padded, weights, bucket_bytes)
    before: list[jax.Array] = []
    for bucket in reversed(found) if in_turn else found:
        for i in bucket if in_turn else ():
            (padded[i],), _ = tie([padded[i]], before)
        with jax.named_scope(f"zerojax_reduce_scatter[{_label(weights, bucket)}]"):
            if len(bucket) == 1:
                (i,) = bucket
                shards[i] = lax.psum_scatter(padded[i], axis, scatter_dimension=weights[i].dim, tiled=True)
                before = [shards[i]]
                continue
            rows = [_rows(padded[i], weights[i]) for i in bucket]
            flat = lax.psum_scatter(jnp.concatenate(rows, axis=1), axis, scatter_dimension=0)
            start = 0
            for i, row in zip(bucket, rows, strict=True):
                shards[i] = flat[start : start + row.shape[1]].reshape(weights[i].local_shape)
                start += row.shape[1]
            before = [shards[i] for i in bucket]
    return shards


def _label(weights: Sequence[ShardedParam], bucket: Sequence[int]) -> str:
    """Leaves and line, by which a collective is known again in the compiled program."""
    others = f" and {len(bucket) - 1} more" if len(bucket) > 1 else ""
    return f"{weights[bucket[0]].label}{others}"


def buckets(arrays: Sequence[jax.Array], weights: Sequence[ShardedParam], limit: int) -> list[list[int]]:
    """Which arrays travel together: consecutive ones of one type, up to `limit` logical bytes a bucket.

    A leaf that other mesh axes cut too travels alone: flattening it would gather it over those axes.
    """
    found: list[list[int]] = []
    open_bucket: dict = {}
    for i, (array, weight) in enumerate(zip(arrays, weights, strict=True)):
        size = jnp.dtype(array.dtype).itemsize
        for extent in weight.shape:
            size *= extent
        if any(entry is not None for entry in weight.leaf.others) or size >= limit:
            found.append([i])
            continue
        index, held = open_bucket.get(array.dtype, (None, 0))
        if index is None or held + size > limit:
            open_bucket[array.dtype] = len(found), size
            found.append([i])
        else:
            open_bucket[array.dtype] = index, held + size
            found[index].append(i)
    return found


def _taken_apart(flat, parts: Sequence[jax.Array], dims: Sequence[int]) -> list[jax.Array]:
    """Logical arrays out of `(shards, elements)`, one row a device."""
    found, start = [], 0
    for part, dim in zip(parts, dims, strict=True):
        rows = flat[:, start : start + part.size].reshape(flat.shape[0], *part.shape)
        shape = (*part.shape[:dim], flat.shape[0] * part.shape[dim], *part.shape[dim + 1 :])
        found.append(jnp.moveaxis(rows, 0, dim).reshape(shape))
        start += part.size
    return found


def _rows(value, weight: ShardedParam):
    """`(shards, elements)`: row i is what device i keeps."""
    local, dim = weight.local_shape, weight.dim
    split = value.reshape(*local[:dim], weight.leaf.shards, *local[dim:])
    return jnp.moveaxis(split, dim, 0).reshape(weight.leaf.shards, -1)


def _padded(value, weight: ShardedParam):
    storage = weight.local_shape[weight.dim] * weight.leaf.shards
    missing = storage - value.shape[weight.dim]
    if not missing:
        return value
    return jnp.pad(value, [(0, missing if d == weight.dim else 0) for d in range(value.ndim)])
