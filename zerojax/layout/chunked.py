"""An array that waits outside the device's memory, in the pieces in which it travels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding

from zerojax.layout.leaf import Leaf, replace_at

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How each device's part of an array is cut into pieces.

    Attributes:
        dim: The dim that is cut.
        extents: The pieces' lengths on it; they add up to the length on one device.
    """

    dim: int
    extents: tuple[int, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where on `dim` each piece begins."""
        return tuple(sum(self.extents[:k]) for k in range(len(self.extents)))

    def chunk_shape(self, leaf: Leaf, extent: int) -> tuple[int, ...]:
        """Storage shape of a piece: that of all devices' pieces together."""
        shards = leaf.storage_shape[self.dim] // leaf.local_shape[self.dim]
        return replace_at(leaf.storage_shape, self.dim, extent * shards)


def chunking_of(leaf: Leaf, chunk_bytes: int) -> Chunking:
    """Cut an array into equal pieces (the last may be shorter) of at most `chunk_bytes` on each device.

    On the first dim that is long enough, so that a piece is in one stretch of memory where
    that is possible.

    Args:
        leaf: How the array lies; other mesh axes' dims are not cut.
        chunk_bytes: At least one index of the longest dim goes into a piece all the same.
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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chunks"], meta_fields=["leaf", "chunking", "sharding", "store"]
)
@dataclasses.dataclass(frozen=True)
class Chunked:
    """A leaf of the optimizer's state that waits in host memory or on disk, in pieces.

    A pytree node. `chunks[k]` holds, on each device, piece k of that device's part; so on
    the dim that is divided over the mesh the pieces do not join to the array by
    concatenation.

    Attributes:
        pieces: Arrays in host memory; of a leaf on disk, the version of its files, an int32 scalar.
        leaf: How the whole array lies.
        cut: How it is cut into pieces.
        sharding: How the whole array would lie on the devices.
        store: Where its pieces are on disk; None in host memory.
    """

    chunks: tuple[Shaped[Array, "*piece"], ...]
    leaf: Leaf
    chunking: Chunking
    sharding: NamedSharding
    store: Any = None

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Storage shape of the whole array."""
        return self.leaf.storage_shape

    @property
    def dtype(self):
        """Element type."""
        return self.leaf.dtype


def is_chunked(x) -> bool:
    """Whether a node is a `Chunked`; for `is_leaf=`."""
    return isinstance(x, Chunked)


def chunk_shapes(leaf: Leaf, chunking: Chunking) -> Iterator[tuple[int, ...]]:
    """The storage shapes of an array's pieces."""
    return (chunking.chunk_shape(leaf, extent) for extent in chunking.extents)
