"""Describe how an array is not sharded as planned, for example because of a user's `jax.jit(out_shardings=)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.config.data_mesh import entry_axes
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded

if TYPE_CHECKING:
    pass

NAMED = 3


class Misplaced(NamedTuple):
    """Texts that describe the planned and the found placement of an array over the data axes."""

    planned: str
    found: str

    def __str__(self) -> str:
        return f"planned: {self.planned}; found: {self.found}"


def misplaced(leaf: Leaf, x: Any, data: Sequence[str]) -> Misplaced | None:
    """Describe the placement of a real (not traced) array if it differs from the plan. Otherwise, return None.

    Only the axes `data`, which divide the batch, are compared. The compiler decides about all other mesh axes. `leaf`
    is the planned layout. `x` is an array in storage, or its `Padded` or `Chunked` node.
    """
    x = x.storage if is_padded(x) else x
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or is_chunked(x) or leaf.shards == 1:
        return None
    planned = over(leaf.spec, data)
    sharding = x.sharding
    if isinstance(sharding, NamedSharding) and set(data) <= set(sharding.mesh.axis_names):
        found = over(sharding.spec, data)
        return Misplaced(*in_words(planned, found)) if found != planned else None
    if planned and sharding.is_fully_replicated:
        one = len(sharding.device_set) == 1
        return Misplaced(in_words(planned, ())[0], "on one device" if one else "replicated")
    return None  # a sharding without mesh axes, such as the compiler's, may equal the plan


def over(spec: PartitionSpec, data: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return, for each dim of `spec`, the axes of `data` that divide the dim. Drop undivided dims at the end."""
    dims = [tuple(axis for axis in entry_axes(entry) if axis in data) for entry in spec]
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


def in_words(*placements: tuple[tuple[str, ...], ...]) -> list[str]:
    """Describe each placement. Texts name the sharded dims, unless one of the placements is replicated."""

    def one(dims: tuple[tuple[str, ...], ...]) -> str:
        names = ", ".join(repr(axis) for axes in dims for axis in axes)
        at = " and ".join(str(i) for i, axes in enumerate(dims) if axes)
        dim = f" on dim {at}" if all(placements) else ""
        return f"sharded over {names}{dim}" if any(dims) else "replicated"

    return [one(dims) for dims in placements]
