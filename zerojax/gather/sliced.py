"""Slice, transpose or reshape the shard of a parameter before the gather. Loaded only for losses with such operations.

A slice that keeps the sharded dim whole is applied to the shard, so that a gather moves one layer and not a stack.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from zerojax import compat
from zerojax.layout.leaf import Leaf
from zerojax.placement.storage import to_device


def sliced_leaf(leaf: Leaf, eqn: Any) -> Leaf | None:
    """Return the layout of the result of `eqn`, or None if `eqn` cannot be applied to the shards of `leaf`."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    assert leaf.dim is not None
    if name == "transpose":
        return leaf.with_dims(eqn.params["permutation"])
    if name == "rev":
        return None if leaf.dim in eqn.params["dimensions"] else leaf
    if name == "reshape":
        kept = _dims_kept(leaf.shape, out.shape)
        first = len(leaf.shape) - kept
        if leaf.dim < first or any(leaf.others[:first]):
            return None
        missing = len(out.shape) - kept
        others = (*[None] * missing, *leaf.others[first:]) if leaf.others else ()
        return dataclasses.replace(leaf, shape=tuple(out.shape), dim=leaf.dim - first + missing, others=others)
    if name == "squeeze":
        dropped = {d % len(leaf.shape) for d in eqn.params["dimensions"]}
        if leaf.dim in dropped:
            return None
        return leaf.with_dims([d for d in range(len(leaf.shape)) if d not in dropped])
    strides = eqn.params.get("strides")  # a slice, or a dynamic slice
    if out.shape[leaf.dim] != leaf.shape[leaf.dim] or (strides is not None and strides[leaf.dim] != 1):
        return None
    sizes = zip(leaf.others, leaf.shape, out.shape, strict=False)
    others = tuple(name if before == after else None for name, before, after in sizes)
    return dataclasses.replace(leaf, shape=tuple(out.shape), others=others)


def sliced_shard(shard: jax.Array, slices: Sequence, operands: Mapping) -> jax.Array:
    """Apply equations to a shard, in order, given the values of their operands after the first."""
    for eqn in slices:
        indices = [v.val if compat.is_literal(v) else operands[v] for v in eqn.invars[1:]]
        shard = _applied(eqn, shard, indices)
    return shard


def _applied(eqn: Any, shard: jax.Array, indices: Sequence) -> jax.Array:
    """Apply an equation to a shard, given the values of the operands after the first."""
    name, params, before, after = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    # A slice keeps the whole sharded dim, in which the shard is shorter than `before`.
    own = lambda values: [a if a != b else x for a, b, x in zip(shard.shape, before, values, strict=True)]
    if name == "dynamic_slice":
        return lax.dynamic_slice(shard, indices, own(params["slice_sizes"]))
    if name == "slice":
        strides = params["strides"]
        starts = [0 if a != b else x for a, b, x in zip(shard.shape, before, params["start_indices"], strict=True)]
        # XLA copies only contiguous ranges from host memory.
        shard = to_device(shard) if any(stride != 1 for stride in strides or ()) else shard
        return lax.slice(shard, starts, own(params["limit_indices"]), strides)
    if name == "squeeze":
        return lax.squeeze(shard, params["dimensions"])
    if name == "reshape":
        kept = _dims_kept(before, after)
        return lax.reshape(to_device(shard), (*after[: len(after) - kept], *shard.shape[len(before) - kept :]))
    return compat.evaluate_one(eqn, [to_device(shard)])[0]


def _dims_kept(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the number of trailing dims that a reshape does not change."""
    pairs = zip(reversed(before), reversed(after), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))
