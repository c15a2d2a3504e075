"""Where one leaf lives: which dim is sharded, what is padded, and why it is not sharded.

Pure arithmetic over shapes: a layout for 1,000 devices needs none of them. A leaf is
laid out in one of three ways:

replicated   every device holds all of it
sharded      one dim is divided over mesh axes, padded in storage where it must be
flat         flattened, padded and divided: for leaves too small to be worth sharding by
             dim, whose shards share one bucket
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec

from zerojax.config.data_mesh import axes_of, spec_entry

Kind = Literal["replicated", "sharded", "flat"]


def shard_extent(size: int, shards: int) -> tuple[int, int]:
    """Divide one dim into equal extents, one per shard.

    When `shards` does not divide `size` the end is padded, so that every device
    holds the same number of elements.

    Args:
        size: Length of the dim, in elements; at least 1.
        shards: Devices it is divided over; at least 1.

    Returns:
        `(extent, pad)` in elements: `extent * shards == size + pad`, `0 <= pad < shards`.

    Raises:
        ValueError: If `size` or `shards` is below 1.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, section 5.
    """
    if size < 1 or shards < 1:
        raise ValueError(f"A dim of {size} elements cannot be divided into {shards} shards: both must be at least 1.")
    extent = -(-size // shards)
    return extent, extent * shards - size


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one array is laid out over the data axes of a mesh.

    Attributes:
        path: Where the leaf is in its tree, as `jax.tree_util.keystr` writes it.
        shape: Logical shape.
        dtype: Element type.
        axes: Mesh axes the leaf is divided over, where it is divided.
        shards: Devices along them.
        kind: `"replicated"`, `"sharded"` or `"flat"`.
        dim: The dim that is sharded; None unless `kind` is `"sharded"`.
        others: For each dim, the other mesh axes it is divided over already (tensor
            parallel), which stay as they are.
        reason: Why the leaf is replicated or flat, for the report; empty for a sharded leaf.
        host: Whether it is kept in host memory.
        further: Into how many parts a shard is divided in turn, over other axes, for its gradient and its optimizer
            state; padding is for these parts.
        is_quantised: Whether collectives send the leaf quantised.
        unquantised: Why collectives send the leaf as it is, in a run that quantises other leaves; otherwise empty.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]
    shards: int
    kind: Kind = "replicated"
    dim: int | None = None
    others: tuple = ()
    reason: str = ""
    host: bool = False
    further: int = 1
    is_quantised: bool = False
    unquantised: str = ""

    @property
    def sent(self) -> str:
        """Describe how a run that quantises some leaves sends this one; empty in any other run."""
        if self.is_quantised:
            return "quantised"
        return self.unquantised and f"sent as it is: {self.unquantised}"

    @property
    def size(self) -> int:
        """Return the logical size, in elements."""
        return math.prod(self.shape)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored array, padding included."""
        if self.kind == "flat":
            return (shard_extent(self.size, self.shards)[0] * self.shards,)
        if self.dim is None:
            return self.shape
        parts = self.shards * self.further
        extent, _ = shard_extent(self.shape[self.dim], parts)
        return replace_at(self.shape, self.dim, extent * parts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of one device's shard along the data axes; other axes are not counted."""
        at = 0 if self.kind == "flat" else self.dim
        if at is None:
            return self.shape
        return replace_at(self.storage_shape, at, self.storage_shape[at] // self.shards)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Return the shape of one part, if a shard is divided further."""
        if self.dim is None:
            return self.local_shape
        return replace_at(self.local_shape, self.dim, self.local_shape[self.dim] // self.further)

    def divided(self, axes: tuple[str, ...]) -> Leaf:
        """Return a shard of this leaf as a leaf, divided `further` over the given axes that do not divide it yet."""
        rest = tuple(axis for axis in axes if axis not in self.axes)
        return dataclasses.replace(self, shape=self.local_shape, axes=rest, shards=self.further, further=1)

    def along_others(self, sizes: Mapping[str, int]) -> Leaf:
        """Return, as a leaf, the part of this leaf on one slice of the other mesh axes, which have these `sizes`."""
        if self.kind == "flat" or not any(self.others):
            return self
        parts = [math.prod(sizes[axis] for axis in axes_of([(entry,)])) for entry in self.others]
        shape = (*(size // n for size, n in zip(self.shape, parts, strict=False)), *self.shape[len(parts) :])
        return dataclasses.replace(self, shape=shape, others=())

    @property
    def bytes(self) -> int:
        """Return the bytes of the logical array."""
        return self.size * self._itemsize

    @property
    def local_bytes(self) -> int:
        """Return the bytes of one device's shard along the data axes, padding included."""
        return math.prod(self.local_shape) * self._itemsize

    @property
    def _itemsize(self) -> int:
        return getattr(self.dtype, "itemsize", 0) or np.dtype(self.dtype).itemsize

    @property
    def padding(self) -> int:
        """Return the number of stored elements that are not in the logical array."""
        return math.prod(self.storage_shape) - self.size

    def __str__(self) -> str:
        """Return type, logical shape, and how the leaf is sharded."""
        shape = f"{self.dtype}{list(self.shape)}"
        if self.kind == "replicated":
            return f"{shape} replicated" + (f": {self.reason}" if self.reason else "")
        where = f"flat over {self.shards}" if self.kind == "flat" else f"dim {self.dim} over {self.shards}"
        padding = f", {self.padding} elements of padding" if self.padding else ""
        return f"{shape} {where}{padding}"

    @property
    def spec(self) -> PartitionSpec:
        """Return the `PartitionSpec` of the storage array, other mesh axes included."""
        if self.kind == "flat":
            return PartitionSpec(spec_entry(self.axes))
        entries = list(self.others) + [None] * (len(self.shape) - len(self.others))
        if self.dim is not None:
            entries[self.dim] = spec_entry(self.axes)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def other_spec(self) -> PartitionSpec:
        """Return the part of `spec` that names other mesh axes."""
        return PartitionSpec() if self.kind == "flat" else PartitionSpec(*self.others)

    @property
    def local_spec(self) -> PartitionSpec:
        """Return the part of `spec` that names data axes, as `shard_map` over them needs it."""
        if self.kind == "flat":
            return PartitionSpec(spec_entry(self.axes))
        if self.dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.dim, spec_entry(self.axes))


def replace_at(items: tuple, index: int, value) -> tuple:
    """Return `items` with the one at `index` replaced."""
    return (*items[:index], value, *items[index + 1 :])
