"""How an offloaded array is chunked, and the pytree node that holds its chunks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding

from zerojax.layout.leaf import Leaf, replace_at

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@dataclasses.dataclass(frozen=True)
class Chunking:
    """How each device's shard of an array is divided into chunks.

    Attributes:
        dim: The dim that is divided.
        extents: The chunks' lengths on it; they add up to the length on one device.
    """

    dim: int
    extents: tuple[int, ...]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return `(start, length)` of each chunk on `dim`."""
        starts = itertools.accumulate(self.extents, initial=0)
        return tuple(zip(starts, self.extents, strict=False))  # one start more: the end

    def chunk_shape(self, leaf: Leaf, extent: int) -> tuple[int, ...]:
        """Return the storage shape of a chunk: that of all devices' chunks together."""
        shards = leaf.storage_shape[self.dim] // leaf.local_shape[self.dim]
        return replace_at(leaf.storage_shape, self.dim, extent * shards)

    def chunk_shapes(self, leaf: Leaf) -> list[tuple[int, ...]]:
        """Return the storage shapes of all chunks."""
        return [self.chunk_shape(leaf, extent) for extent in self.extents]


def chunking_of(leaf: Leaf, chunk_bytes: int) -> Chunking:
    """Divide an array into equal chunks (the last may be shorter) of at most `chunk_bytes` on each device.

    On the first dim that is long enough, so that a chunk is contiguous in memory where
    that is possible.

    Args:
        leaf: Its layout; dims over other mesh axes are not chunked.
        chunk_bytes: A chunk has at least one index of the longest dim all the same.
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


def row_chunking_of(leaf: Leaf, chunk_bytes: int) -> Chunking:
    """Divide a parameter on disk, and its gradient and state: a stack of layers by layer, anything else by bytes.

    A stack has at most `MOST_ROWS` layers on dim 0, which is not sharded. So a scan, or an indexed layer, reads no
    other layers.
    """
    rows = leaf.shape[0] if len(leaf.shape) > 1 and leaf.dim != 0 and not any(leaf.others[:1]) else 0
    return Chunking(0, (1,) * rows) if 0 < rows <= MOST_ROWS else chunking_of(leaf, chunk_bytes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chunks"], meta_fields=["leaf", "chunking", "sharding", "store"]
)
@dataclasses.dataclass(frozen=True)
class Chunked:
    """A leaf of the optimizer's state that is offloaded to host memory or disk, in chunks.

    A pytree node. `chunks[k]` holds chunk k of every device's shard: on the sharded dim
    the chunks do not concatenate to the array.

    Attributes:
        chunks: Arrays in host memory; of a leaf on disk, the version of its files, an int32 scalar.
        leaf: Layout of the array.
        chunking: How it is chunked.
        sharding: Its sharding on the devices.
        store: Where its chunks are on disk; None in host memory.
    """

    chunks: tuple[Shaped[Array, "*chunk"], ...]
    leaf: Leaf
    chunking: Chunking
    sharding: NamedSharding
    store: Any = None

    def __reduce__(self):
        """Refuse to be pickled.

        Raises:
            TypeError: Always.
        """
        part = getattr(self.store, "part", "opt_state")
        raise TypeError(
            f"{part}{self.leaf.path} is offloaded, and cannot be pickled or deep-copied, or serialized by "
            f"Flax. Save the state with a zerojax.checkpoint.Checkpointer, or tx.unshard({part})."
        )

    @property
    def mesh(self) -> Mesh:
        """Return the mesh."""
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the storage shape of the array."""
        return self.leaf.storage_shape

    @property
    def dtype(self):
        """Return the element type."""
        return self.leaf.dtype


def is_chunked(x) -> bool:
    """Return whether a node is a `Chunked`; for `is_leaf=`."""
    return isinstance(x, Chunked)
