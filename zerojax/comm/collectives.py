"""Move leaves between whole and divided, explicitly: called inside `shard_map`.

Leaves that are cut on a dim have a collective each. Flat leaves travel together: one
bucket for each element type, a matrix of one row a device, so that one reduce-scatter
or one all-gather serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from zerojax.layout.leaf import Leaf, shard_extent
from zerojax.layout.padded import pad, trim

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def reduce_scatter(
    values: Sequence[Shaped[Array, "*logical"]], leaves: Sequence[Leaf], axis: tuple[str, ...]
) -> list[Shaped[Array, "*local"]]:
    """Sum each leaf over the axis and keep this device's part.

    Args:
        values: One array a leaf, logical shape, different on each device.
        leaves: How each leaf is divided. A whole one is all-reduced.
        axis: The mesh axis.

    Returns:
        The sums; local shape.
    """
    flat = [i for i, leaf in enumerate(leaves) if leaf.kind == "flat"]
    sums = dict(zip(flat, scatter_bucket([values[i] for i in flat], [leaves[i] for i in flat], axis), strict=True))
    for i, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        if leaf.kind == "replicated":
            sums[i] = lax.psum(value, axis) if leaf.size else value
        elif leaf.dim is not None:
            padded = pad(value, leaf.dim, leaf.storage_shape[leaf.dim])
            sums[i] = lax.psum_scatter(padded, axis, scatter_dimension=leaf.dim, tiled=True)
    return [sums[i] for i in range(len(leaves))]


def all_gather(
    parts: Sequence[Shaped[Array, "*local"]], leaves: Sequence[Leaf], axis: tuple[str, ...]
) -> list[Shaped[Array, "*logical"]]:
    """Put each divided leaf together on every device.

    Args:
        parts: One array a leaf, local shape.
        leaves: How each leaf is divided. A whole one is returned as it is.
        axis: The mesh axis.

    Returns:
        Whole leaves; logical shape.
    """
    flat = [i for i, leaf in enumerate(leaves) if leaf.kind == "flat"]
    whole = dict(zip(flat, gather_bucket([parts[i] for i in flat], [leaves[i] for i in flat], axis), strict=True))
    for i, (part, leaf) in enumerate(zip(parts, leaves, strict=True)):
        if leaf.kind == "replicated":
            whole[i] = part
        elif leaf.dim is not None:
            gathered = lax.all_gather(part, axis, axis=leaf.dim, tiled=True)
            whole[i] = trim(gathered, leaf.dim, leaf.shape[leaf.dim])
    return [whole[i] for i in range(len(leaves))]


def flatten(value: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, " storage"]:
    """A logical array as its flat storage: flattened, zeros at the end."""
    return pad(value.reshape(-1), 0, leaf.storage_shape[0])


def unflatten(storage: Shaped[Array, " storage"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    """A flat storage array in its logical shape."""
    return trim(storage, 0, leaf.size).reshape(leaf.shape)


def by_dtype(values: Sequence[Array]) -> dict:
    """Indices grouped by element type: a bucket holds one."""
    groups: dict = {}
    for i, value in enumerate(values):
        groups.setdefault(jnp.dtype(value.dtype), []).append(i)
    return groups


def scatter_bucket(
    values: Sequence[Shaped[Array, "*logical"]], leaves: Sequence[Leaf], axis: tuple[str, ...]
) -> list[Shaped[Array, " local"]]:
    """Reduce-scatter flat leaves, one collective for each element type; logical in, local out."""
    parts: dict[int, Array] = {}
    for members in by_dtype(values).values():
        columns = [flatten(values[i], leaves[i]).reshape(leaves[i].shards, -1) for i in members]
        bucket = lax.psum_scatter(jnp.concatenate(columns, axis=1), axis, scatter_dimension=0, tiled=True)
        parts.update(zip(members, split(bucket[0], [leaves[i] for i in members]), strict=True))
    return [parts[i] for i in range(len(values))]


def gather_bucket(
    parts: Sequence[Shaped[Array, " local"]], leaves: Sequence[Leaf], axis: tuple[str, ...]
) -> list[Shaped[Array, "*logical"]]:
    """All-gather flat leaves, one collective for each element type; local in, logical out."""
    whole: dict[int, Array] = {}
    for members in by_dtype(parts).values():
        bucket = lax.all_gather(jnp.concatenate([parts[i] for i in members]), axis)
        columns = split(bucket, [leaves[i] for i in members])
        whole.update((i, unflatten(column.reshape(-1), leaves[i])) for i, column in zip(members, columns, strict=True))
    return [whole[i] for i in range(len(parts))]


def split(bucket: Shaped[Array, "*shards extent"], leaves: Sequence[Leaf]) -> list[Array]:
    """Cut a bucket's last dim back into its leaves' extents."""
    extents = [shard_extent(leaf.size, leaf.shards)[0] for leaf in leaves]
    ends = [sum(extents[: i + 1]) for i in range(len(extents) - 1)]
    return jnp.split(bucket, ends, axis=-1)
