"""Divide offloaded arrays into chunks. `Chunked` is the pytree node that contains the chunks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding

from zerojax.layout.leaf import Leaf, replace_at

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@dataclasses.dataclass(frozen=True)
class Chunking:
    """The division of each device's shard into chunks."""

    dim: int  # the dim that is divided into chunks
    # length of each chunk along `dim`, in elements; their sum is the length of `dim` in one device's shard
    extents: tuple[int, ...]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return `(start, length)` of each chunk along `dim`."""
        starts = itertools.accumulate(self.extents, initial=0)
        return tuple(zip(starts, self.extents, strict=False))  # `starts` has one more item: the end of the last chunk

    def chunk_shape(self, leaf: Leaf, extent: int) -> tuple[int, ...]:
        """Return the global shape of a chunk, which joins the chunks of all devices along `dim`."""
        shards = leaf.storage_shape[self.dim] // leaf.local_shape[self.dim]
        return replace_at(leaf.storage_shape, self.dim, extent * shards)

    def chunk_shapes(self, leaf: Leaf) -> list[tuple[int, ...]]:
        return [self.chunk_shape(leaf, extent) for extent in self.extents]

    def is_by_row(self, leaf: Leaf) -> bool:
        """Return whether each chunk is one row of dim 0, such as a layer of a stack."""
        return leaf.kind == "sharded" and len(leaf.shape) > 1 and self == Chunking(0, (1,) * leaf.shape[0])


def chunking_of(leaf: Leaf, chunk_bytes: int) -> Chunking:
    """Divide each device's shard into equal chunks of at most `chunk_bytes`. The last chunk may be shorter.

    The first dim that is long enough is chunked, because chunks along dim 0 are contiguous in memory. Dims that other
    mesh axes divide are not chunked. A chunk has a length of at least 1, even if that exceeds `chunk_bytes`.
    """
    local = leaf.local_shape
    free = [d for d in range(len(local)) if d >= len(leaf.others) or not leaf.others[d]]
    if not free:
        return Chunking(0, local[:1])
    wanted = -(-leaf.local_bytes // chunk_bytes)
    dim = next((d for d in free if local[d] >= wanted), max(free, key=lambda d: local[d]))
    extent = max(1, local[dim] // wanted)
    count = -(-local[dim] // extent)
    return Chunking(dim, (extent,) * (count - 1) + (local[dim] - extent * (count - 1),))


MOST_ROWS = 256


def row_chunkings_of(leaves: Sequence[Leaf], chunk_bytes: int) -> dict[int, Chunking]:
    """Divide sharded parameters on disk into chunks, by index. Their gradients and state are divided in the same way.

    Each layer of a stack is one chunk, so that a scan reads it alone. The loss that scans is not known here. So an
    array of three or more dims counts as a stack if its dim 0 is not sharded and at most `MOST_ROWS` long. A matrix,
    such as the biases of all layers, counts as a stack only if it is as long as such an array. All other arrays are
    divided by `chunking_of`.
    """
    may_be = {
        i: leaf.shape[0]
        for i, leaf in enumerate(leaves)
        if len(leaf.shape) > 1 and leaf.dim != 0 and not any(leaf.others[:1]) and 0 < leaf.shape[0] <= MOST_ROWS
    }
    lengths = {n for i, n in may_be.items() if len(leaves[i].shape) > 2}
    return {
        i: Chunking(0, (1,) * may_be[i]) if may_be.get(i) in lengths else chunking_of(leaf, chunk_bytes)
        for i, leaf in enumerate(leaves)
        if leaf.kind == "sharded"
    }


@dataclasses.dataclass(frozen=True)
class ChunkedLayout:
    """The layout of an array that is kept in chunks."""

    leaf: Leaf  # the layout of the whole array
    chunking: Chunking  # the division of each shard into chunks
    sharding: NamedSharding  # the sharding of the array when it is on the devices


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chunks"], meta_fields=["leaf", "chunking", "sharding", "store"]
)
@dataclasses.dataclass(frozen=True)
class Chunked(ChunkedLayout):
    """An optimizer state leaf in host memory or on disk, or a parameter on disk, in chunks. A pytree node.

    `chunks[k]` contains chunk k of every device's shard, so the chunks do not always concatenate to the array.
    """

    # arrays in host memory; for a leaf on disk, one int32 scalar: the version of its files
    chunks: tuple[Shaped[Array, "*chunk"], ...]
    store: Any = None  # the store that reads and writes the chunks on disk; None for chunks in host memory

    def __reduce__(self):
        """Raise a TypeError, because offloaded state cannot be pickled."""
        part = "opt_state" if self.store is None else self.store.files.part
        raise TypeError(
            f"{part}{self.leaf.path} is offloaded, and cannot be pickled or deep-copied. Save "
            f"the state with a zerojax.checkpoint.Checkpointer, or convert it with tx.unshard({part})."
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.storage_shape

    @property
    def dtype(self):
        return self.leaf.dtype


def concrete_mesh(sharding: NamedSharding) -> Mesh:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh


def is_chunked(x) -> bool:
    return isinstance(x, Chunked)
