"""Slice the shard of a parameter, or change its layout, before it is gathered. Loaded when a loss does so.

A slice that keeps the sharded dim whole is applied to the shard, so that a gather moves one layer and not a stack.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
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
        shard = _RULES[eqn.primitive.name](shard, eqn, indices)
    return shard


def _dims_kept(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the number of trailing dims that a reshape does not change."""
    pairs = zip(reversed(before), reversed(after), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))


def _sharded_dim(value, eqn) -> int:
    """Return the dim in which the shard is shorter than the logical value, or -1 if there is none."""
    for dim, (have, full) in enumerate(zip(value.shape, eqn.invars[0].aval.shape, strict=True)):
        if have != full:
            return dim
    return -1


def _slice(value, eqn, indices):
    starts, limits = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    if (dim := _sharded_dim(value, eqn)) >= 0:
        starts[dim], limits[dim] = 0, value.shape[dim]
    if any(stride != 1 for stride in eqn.params["strides"] or ()):
        value = to_device(value)  # XLA copies only contiguous ranges from host memory.
    return lax.slice(value, starts, limits, eqn.params["strides"])


def _dynamic_slice(value, eqn, indices):
    sizes = list(eqn.params["slice_sizes"])
    if (dim := _sharded_dim(value, eqn)) >= 0:
        sizes[dim] = value.shape[dim]
    return lax.dynamic_slice(value, indices, sizes)


def _reshape(value, eqn, indices):
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    kept = _dims_kept(before, after)
    return lax.reshape(to_device(value), (*after[: len(after) - kept], *value.shape[len(before) - kept :]))


# How to apply an equation to a shard, by its primitive: `fn(shard, equation, values of the operands after the first)`.
_RULES: Mapping[str, Callable] = MappingProxyType(
    {
        "slice": _slice,
        "dynamic_slice": _dynamic_slice,
        "squeeze": lambda value, eqn, _: lax.squeeze(value, eqn.params["dimensions"]),
        "transpose": lambda value, eqn, _: lax.transpose(to_device(value), eqn.params["permutation"]),
        "rev": lambda value, eqn, _: lax.rev(to_device(value), eqn.params["dimensions"]),
        "reshape": _reshape,
    }
)
