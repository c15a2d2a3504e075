"""Describe how one leaf is stored, with its sharded dim and its padding, or the reason why it is not sharded.

A layout is computed from shapes alone, so a layout for 1,000 devices needs no device. A leaf has one of three kinds:

replicated   every device holds the whole leaf
sharded      one dim is divided over mesh axes, after padding if they do not divide it evenly
flat         the leaf is flattened, padded and divided; used for small leaves, which share one bucket

A leaf without an evenly divisible dim is replicated if this costs little memory, so that padding is rare.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from zerojax.config.data_mesh import entry_axes, spec_entry

if TYPE_CHECKING:
    from zerojax.layout.encoding import Encoding

# The part of a path, or the name of a class, that marks a leaf which takes its gradient as its new value.
OVERWRITE = "_overwrite_with_gradient"
Kind = Literal["replicated", "sharded", "flat"]


def shard_extent(size: int, shards: int) -> tuple[int, int]:
    """Divide one dim into equal extents, one per shard.

    If `shards` does not divide `size`, the end is padded, so that every device holds the same number of elements.

    Args:
        size: Length of the dim, in elements. At least 1.
        shards: Number of devices that share the dim. At least 1.

    Returns:
        `(extent, pad)` in elements, with `extent * shards == size + pad` and `0 <= pad < shards`.

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
    """The layout of one array over the data axes of a mesh.

    `path`, `reason` and `unquantised` are labels for messages and reports. Equality and hash ignore them, so that
    leaves with the same layout share compiled programs.

    Attributes:
        path: The path of the leaf in its tree, as returned by `jax.tree_util.keystr`. A label.
        shape: Logical shape.
        dtype: Element type.
        axes: Mesh axes that divide the leaf, unless it is replicated.
        shards: Number of devices along `axes`.
        kind: `"replicated"`, `"sharded"` or `"flat"`.
        dim: The sharded dim. None unless `kind` is `"sharded"`.
        others: For each dim, the mesh axes other than `axes` that divide it, as an entry of a `PartitionSpec`. These
            are axes of the compiler, and data axes over which experts stay divided.
        reason: Why the leaf is replicated or flat. Empty for a sharded leaf. A label.
        host: Whether the array is kept in host memory.
        further: Number of parts into which each shard of a parameter is divided in its gradient and optimizer state,
            over data axes that are not in `axes`. For example 4, if parameters are sharded over the 8 devices of each
            of 4 hosts, and gradients over all devices. The parameter is padded so that these parts are equal.
        is_quantised: Whether collectives quantise the leaf.
        unquantised: In a run that quantises some leaves, why collectives do not quantise this leaf. A label.
        encoding: The format of an encoded array of the optimizer state. None for any other array.
    """

    path: str = dataclasses.field(compare=False)
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str, ...]
    shards: int
    kind: Kind = "replicated"
    dim: int | None = None
    others: tuple = ()
    reason: str = dataclasses.field(default="", compare=False)
    host: bool = False
    further: int = 1
    is_quantised: bool = False
    unquantised: str = dataclasses.field(default="", compare=False)
    encoding: "Encoding | None" = None

    @property
    def sent(self) -> str:
        """Describe how collectives send the leaf, in a run that quantises some leaves. Empty in any other run."""
        if self.is_quantised:
            return "quantised"
        return self.unquantised and f"sent as it is: {self.unquantised}"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored array, with padding."""
        if self.kind == "flat":
            return (shard_extent(self.size, self.shards)[0] * self.shards,)
        if self.dim is None:
            return self.shape
        parts = self.shards * self.further
        extent, _ = shard_extent(self.shape[self.dim], parts)
        return replace_at(self.shape, self.dim, extent * parts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of one shard over `axes`. The axes in `others` are ignored."""
        at = 0 if self.kind == "flat" else self.dim
        if at is None:
            return self.shape
        return replace_at(self.storage_shape, at, self.storage_shape[at] // self.shards)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Return the shape of one of the `further` parts of a shard."""
        if self.dim is None:
            return self.local_shape
        return replace_at(self.local_shape, self.dim, self.local_shape[self.dim] // self.further)

    def divided(self, axes: tuple[str, ...]) -> "Leaf":
        """Return the layout of one shard of this leaf, divided over each of `axes` that does not divide it yet."""
        rest = tuple(axis for axis in axes if axis not in self.axes)
        return dataclasses.replace(self, shape=self.local_shape, axes=rest, shards=self.further, further=1)

    def along_others(self, sizes: Mapping[str, int]) -> "Leaf":
        """Return the layout of a device's slice of this leaf along `others`. `sizes` has the size of each mesh axis."""
        if self.kind == "flat" or not any(self.others):
            return self
        parts = [math.prod(sizes[axis] for axis in entry_axes(entry)) for entry in self.others]
        shape = (*(size // n for size, n in zip(self.shape, parts, strict=False)), *self.shape[len(parts) :])
        return dataclasses.replace(self, shape=shape, others=())

    def with_dims(self, dims: Iterable[int]) -> "Leaf":
        """Return a leaf with only the given dims, in the given order. The sharded dim must be among them."""
        assert self.dim is not None
        dims, others = list(dims), [*self.others, *[None] * len(self.shape)]
        return dataclasses.replace(
            self,
            shape=tuple(self.shape[d] for d in dims),
            dim=dims.index(self.dim),
            others=tuple(others[d] for d in dims) if self.others else (),
        )

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        return math.prod(self.local_shape) * self.dtype.itemsize

    @property
    def padding(self) -> int:
        return math.prod(self.storage_shape) - self.size

    def __str__(self) -> str:
        """Return type, logical shape, and how the leaf is sharded."""
        shape = str(self.encoding or f"{self.dtype}{list(self.shape)}")
        if self.kind == "replicated":
            return f"{shape} replicated" + (f": {self.reason}" if self.reason else "")
        where = f"flat over {self.shards}" if self.kind == "flat" else f"dim {self.dim} over {self.shards}"
        padding = f", {self.padding} elements of padding" if self.padding else ""
        return f"{shape} {where}{padding}"

    @property
    def spec(self) -> PartitionSpec:
        """Return the `PartitionSpec` of the stored array, with `axes` and `others`."""
        if self.kind == "flat":
            return PartitionSpec(spec_entry(self.axes))
        entries = list(self.others) + [None] * (len(self.shape) - len(self.others))
        if self.dim is not None:
            entries[self.dim] = spec_entry(self.axes)
        return PartitionSpec(*without_last_nones(entries))

    @property
    def other_spec(self) -> PartitionSpec:
        return PartitionSpec() if self.kind == "flat" else PartitionSpec(*self.others)

    @property
    def local_spec(self) -> PartitionSpec:
        return self.spec_over(self.axes)

    def spec_over(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Return the `PartitionSpec` with only some axes, for `shard_map` over these axes."""
        return PartitionSpec(*restricted(self.spec, axes))


def without_last_nones(entries: Iterable) -> list:
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def restricted(entries: Iterable, axes: Collection[str]) -> list:
    """Return the entries of a `PartitionSpec` with only the mesh axes that are in `axes`."""
    return without_last_nones(spec_entry(tuple(a for a in entry_axes(entry) if a in axes)) for entry in entries)


def replace_at(items: tuple, index: int, value) -> tuple:
    return (*items[:index], value, *items[index + 1 :])


def replace_items(items: Sequence, indices: Iterable[int], values: Iterable) -> list:
    return [*(dict(enumerate(items)) | dict(zip(indices, values, strict=True))).values()]


# Leaves that stay replicated to avoid padding add at most this fraction to the bytes of a device.
MOST_EXTRA = 0.03


def reason_for(shards: int) -> str:
    """Return the `reason` of a leaf that is replicated because the shards divide none of its dims evenly."""
    return f"{shards} divides none of its dims; such leaves add at most {MOST_EXTRA:.0%} to a device's share"


def is_kept_whole(leaf: Leaf) -> bool:
    return leaf.kind == "replicated" and leaf.reason == reason_for(leaf.shards)


def keep_whole(
    leaves: Sequence[Leaf], candidates: Collection[int], shares: Sequence[Collection[int]], sizes: Mapping[str, int]
) -> tuple[Leaf, ...]:
    """Replicate leaves that would need padding, as long as this adds little to the memory of a device.

    A device holds `1 / shards` of every sharded leaf. Replicating a leaf of `b` bytes adds `b * (1 - 1 / shards)`.
    Leaves with the same shape and type are decided together, so that equal layers have equal layouts. The group of
    leaves that adds the fewest bytes is decided first.

    Only `candidates`, given by index, may become replicated. `shares` are sets of indices, such as all parameters and
    the trained ones: in each set, replicated leaves add at most the fraction `MOST_EXTRA` to the bytes of a device.
    `sizes` has the size of each mesh axis, because axes other than data axes also divide leaves.
    """
    held = [leaf.along_others(sizes).bytes for leaf in leaves]
    extra = [size * (leaf.shards - 1) for size, leaf in zip(held, leaves, strict=True)]
    shares = [frozenset(share) for share in shares]
    left = [MOST_EXTRA * sum(held[i] for i in s) - sum(extra[i] for i in s if is_kept_whole(leaves[i])) for s in shares]
    groups: dict[tuple, list[int]] = {}
    for i in sorted(candidates):
        if leaves[i].kind == "sharded" and leaves[i].padding > 0:
            groups.setdefault((leaves[i].shape, str(leaves[i].dtype), leaves[i].others), []).append(i)
    whole = list(leaves)
    for group in sorted(groups.values(), key=lambda group: sum(extra[i] for i in group)):
        rest = [now - sum(extra[i] for i in share.intersection(group)) for now, share in zip(left, shares, strict=True)]
        if min(rest) < 0:
            continue
        left = rest
        for i in group:
            reason = reason_for(leaves[i].shards)
            whole[i] = dataclasses.replace(leaves[i], kind="replicated", dim=None, reason=reason)
    return tuple(whole)


class CachedHash:
    """A base class for frozen dataclasses in the structure of a pytree, which jit hashes and compares at every call.

    To make this fast, the hash is computed once, and an object equals itself without a comparison of fields.
    """

    @functools.cached_property
    def _fields(self) -> tuple:
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return tuple(getattr(self, field.name) for field in fields if field.compare)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fields)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict:
        """Return only the fields, without the cached hash, because hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def __eq__(self, other) -> bool:
        return self is other or (
            type(self) is type(other) and self._hash == other._hash and self._fields == other._fields
        )


class PaddedNode:
    """The base class of `Padded`, by which plain steps recognise padded arrays without importing `layout/padded.py`."""


class ChunkedNode:
    """The base class of `Chunked`, by which plain steps recognise offloaded arrays without importing `offload/`."""


def is_padded(x: Any) -> bool:
    return isinstance(x, PaddedNode)


def is_chunked(x: Any) -> bool:
    return isinstance(x, ChunkedNode)


def has_chunked(tree: PyTree) -> bool:
    return any(map(is_chunked, jax.tree.leaves(tree, is_leaf=is_chunked)))


def shapes_of_chunked(tree: PyTree) -> PyTree:
    """Return the tree with each node of chunks replaced by the logical shape of its array."""
    one = lambda x: jax.ShapeDtypeStruct(x.leaf.shape, x.leaf.dtype) if is_chunked(x) else x
    return jax.tree.map(one, tree, is_leaf=is_chunked)


def without_padding(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.logical() if is_padded(x) else x, tree, is_leaf=is_padded)


def is_stored_node(x: Any) -> bool:
    """Return whether `x` is a node that represents one array. Callers pass this function as `is_leaf=`."""
    return isinstance(x, PaddedNode | ChunkedNode)


def trim(x: Shaped[Array, "*storage"], dim: int, size: int) -> Shaped[Array, "*logical"]:
    return x if x.shape[dim] == size else jax.lax.slice_in_dim(x, 0, size, axis=dim)


def pad(x: Shaped[Array, "*logical"], dim: int, size: int) -> Shaped[Array, "*storage"]:
    """Pad the end of `dim` with zeros to a length of `size` elements."""
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[dim] if i == dim else 0) for i in range(x.ndim)])
