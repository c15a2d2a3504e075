"""Find live arrays that are placed otherwise than planned, such as by a `jax.jit(out_shardings=)` of the caller's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.core
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.config.data_mesh import entry_axes
from zerojax.layout.chunked import is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import is_padded

if TYPE_CHECKING:
    from jaxtyping import PyTree

NAMED = 3


class Misplaced(NamedTuple):
    """How an array is placed, in words.

    Attributes:
        planned: The placement over the data axes that the plan has.
        found: The placement that the array has.
    """

    planned: str
    found: str

    def __str__(self) -> str:
        """Return both placements in words."""
        return f"planned: {self.planned}; found: {self.found}"


def misplaced(leaf: Leaf, x: Any, data: Sequence[str]) -> Misplaced | None:
    """Return how a live array is placed over the data axes, if that is not the plan's way; None if it is.

    Dims that axes other than the data axes divide are left to the compiler, and not compared.

    Args:
        leaf: The plan of the array.
        x: An array in storage, or its `Padded` or `Chunked` node.
        data: The axes that divide the batch.
    """
    x = x.storage if is_padded(x) else x
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or is_chunked(x) or leaf.shards == 1:
        return None
    planned = over(leaf.local_spec, data)
    sharding = x.sharding
    if isinstance(sharding, NamedSharding) and set(data) <= set(sharding.mesh.axis_names):
        found = over(sharding.spec, data)
        return Misplaced(*in_words(planned, found)) if found != planned else None
    if planned and sharding.is_fully_replicated:
        one = len(sharding.device_set) == 1
        return Misplaced(in_words(planned, ())[0], "on one device" if one else "replicated")
    return None  # a sharding without axes, such as a compiler's, which may be the same


def over(spec: PartitionSpec, data: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return for each dim the data axes that divide it, without dims at the end that none divides."""
    dims = [tuple(axis for axis in entry_axes(entry) if axis in data) for entry in spec]
    while dims and not dims[-1]:
        dims.pop()
    return tuple(dims)


def in_words(*placements: tuple[tuple[str, ...], ...]) -> list[str]:
    """Describe placements; with dims, unless one of them is replicated."""

    def one(dims: tuple[tuple[str, ...], ...]) -> str:
        names = ", ".join(repr(axis) for axes in dims for axis in axes)
        at = " and ".join(str(i) for i, axes in enumerate(dims) if axes)
        dim = f" on dim {at}" if all(placements) else ""
        return f"sharded over {names}{dim}" if any(dims) else "replicated"

    return [one(dims) for dims in placements]


class PlacementCheck:
    """The first call with live arrays warns if arrays that should be sharded are not."""

    def __init__(self):
        """Prepare to check; nothing is checked yet."""
        self._done = False

    def first(self, parts: Iterable[tuple[str, PyTree, Sequence[Leaf]]], data: Sequence[str], *, stacklevel: int):
        """Warn, in the first call with live arrays, of arrays that are to be sharded and are on all devices in full.

        An array on one device does not count: a program shards it as it comes in.

        Args:
            parts: Names of trees, the trees, and the plans of their leaves.
            data: The axes that divide the batch.
            stacklevel: As for `warnings.warn`, seen from here.
        """
        if self._done:
            return
        trees = list(parts)
        if any(isinstance(x, jax.core.Tracer) for _, tree, _ in trees for x in jax.tree.leaves(tree)):
            return
        self._done = True
        found: dict[str, Misplaced] = {}
        for name, tree, leaves in trees:
            nodes = jax.tree.leaves(tree, is_leaf=lambda x: is_padded(x) or is_chunked(x))
            placed = zip(leaves, nodes, strict=True) if len(leaves) == len(nodes) else ()  # refused elsewhere
            how = {f"{name}{leaf.path}": misplaced(leaf, x, data) for leaf, x in placed if leaf.kind != "replicated"}
            found |= {path: one for path, one in how.items() if one and one.found != "on one device"}
        if found:
            first = ", ".join(f"{path} ({one})" for path, one in list(found.items())[:NAMED])
            more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
            warnings.warn(
                f"{len(found)} arrays are placed otherwise than planned: {first}{more}. Their memory is that of "
                f"where they are; tx.train_step returns them as planned, and a loop of the caller's goes on with them "
                f"as they are. Often a jax.jit(out_shardings=...) placed them, with shardings such as those of "
                f"nn.get_sharding. Leave these out, or give those of tx.shardings(params); tx.shard(params) places "
                f"parameters. zerojax.report names every leaf.",
                stacklevel=stacklevel + 1,
            )
