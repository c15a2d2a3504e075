"""How shards become full arrays and gradients become shards: every explicit collective of leaves.

`Collectives` is what callers know. `ManualCollectives` runs inside `shard_map`, where an
array is one device's, and writes each collective itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs
from zerojax.comm import quantised
from zerojax.comm.barriers import barrier, zero_after
from zerojax.comm.buckets import buckets, from_rows, split, to_rows
from zerojax.comm.encoding import Encoding
from zerojax.config import BUCKET_BYTES
from zerojax.config.data_mesh import in_words
from zerojax.dims import Follower, State
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import pad, trim

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped

    from zerojax.jaxprs import Rule

# Where each of some values holds the rows of the batch.
Rows = Sequence[State]
# What the scopes below become in the name of an operation of a compiled program: what is done, and the leaves.
LABEL = re.compile(r"zerojax_(gather|reduce_scatter|all_reduce)\[(.*?)\][/)]")
UPDATE = "zerojax_update"  # the scope of the optimizer's update in a step


class Collectives(Protocol):
    """Move leaves between shards and full arrays.

    What a shard is, one device's part of an array or a global array that is sharded, only
    an implementation knows.
    """

    @property
    def encoding(self) -> Encoding:
        """Return the object that encodes and decodes values."""
        ...

    def check(self, shards: Sequence[Any], leaves: Sequence[Leaf]) -> None:
        """Raise a `ValueError` for a shard that is not laid out as its leaf says."""
        ...

    @property
    def losses(self) -> int:
        """Return how many losses are computed at once. Their mean is taken."""
        ...

    @property
    def defers(self) -> bool:
        """Return whether the backward pass leaves `reduce_across` to its caller."""
        ...

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of a shard."""
        ...

    def psum(self, tree: PyTree) -> PyTree:
        """Return the sum over these losses."""
        ...

    def pmean(self, tree: PyTree) -> PyTree:
        """Return the mean over these losses."""
        ...

    def pmax(self, tree: PyTree) -> PyTree:
        """Return the elementwise maximum over these losses."""
        ...

    def all_gather(self, shards: Sequence[Array], leaves: Sequence[Leaf], *, exposed: bool = False) -> list[Array]:
        """Gather shards into full arrays, in logical shape.

        Args:
            shards: One a leaf, as `Encoding.encode_param` gave it.
            leaves: How each is laid out. A replicated one is returned as it is.
            exposed: Whether no other compute hides the collectives.
        """
        ...

    def reduce_scatter(self, grads: Sequence[Array], leaves: Sequence[Leaf], *, exposed: bool = False) -> list[Array]:
        """Return shards of the sums over the devices that hold different shards of a leaf, with zeros in the padding.

        Those are all data-parallel workers, unless `across` says otherwise.

        Args:
            grads: One a leaf, logical shape.
            leaves: How each sum is left. A replicated one is all-reduced, over all workers.
            exposed: Whether no other compute hides the collectives.

        Returns:
            One a leaf, in the type it was reduced in; `Encoding.decode_grad` gives it another.
        """
        ...

    def across(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the axes over which a leaf is not sharded (hybrid sharding). `reduce_across` sums over them."""
        ...

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of a leaf's gradient after the backward pass."""
        ...

    def reduce_across(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Return the sums over all data-parallel workers, given the results of `reduce_scatter`.

        Where a leaf's gradient is divided further than the leaf, its parts.
        """
        ...

    def rounding_errors(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Return what quantisation in `reduce_across` loses of each shard, in float32."""
        ...

    def backward(
        self, fn: Callable, values: Sequence, rows: Rows, grads: Sequence[int], rule: Rule | None = None
    ) -> list:
        """Run a backward pass.

        Args:
            fn: The backward pass: from a list of values, residuals and cotangents, to a tree of results.
            values: Its argument.
            rows: For each of them, where it holds the rows of the batch. Only global view reads it.
            grads: Which of its results are gradients for `reduce_scatter`.
            rule: If given, how its equations are evaluated, as for `jaxprs.evaluate`.

        Returns:
            The leaves of its results. A gradient may have a leading dim with one partial sum per worker.
        """
        ...

    def each_worker(self, fn: Callable, cotangents: Sequence[Array], shapes: Sequence[tuple]) -> PyTree:
        """Run a linear function of cotangents that may still be per-worker partial sums.

        Args:
            fn: `fn(collectives, cotangents)`, which is given those of one worker.
            cotangents: Its argument. Some may have a leading dim with one partial sum per worker.
            shapes: Their shapes without it.

        Returns:
            What `fn` returns, with one partial sum per worker where a cotangent has them.
        """
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return a zero gradient, to which unreduced gradients of a shape can be added."""
        ...

    def add(self, a: Array, b: Array) -> Array:
        """Return the sum of two unreduced gradients, as partial sums if one of them has partial sums."""
        ...

    def like(self, grad: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
        """Return a gradient as partial sums, if another one has partial sums."""
        ...

    @property
    def follower(self) -> Follower | None:
        """Return the analysis that follows the rows of the batch, or None where every array belongs to one worker."""
        ...

    def element(self, x: Array, rows: State) -> Array:
        """Return some element of an array, without communication if the dim of its rows is known."""
        ...

    def zero_after(self, anchor: Sequence[Array], rows: Rows) -> Array:
        """Return `barriers.zero_after`, without communication if the dim of `anchor`'s rows is known."""
        ...


@dataclasses.dataclass(frozen=True)
class ManualCollectives:
    """Collectives inside a `shard_map` that is manual over the data axes.

    Attributes:
        axes: Mesh axes the rows of the batch are divided over, which gradients are summed over.
            Each leaf is sharded over all of them, or some.
        bucket_bytes: Sharded leaves share a bucket up to this many logical bytes; 0: none do.
        encoding: Types and formats of what the collectives send.
        defers: Whether the backward pass leaves gradients to its caller to `reduce_across`.

    Raises:
        ValueError: If `bucket_bytes` is negative.
    """

    axes: tuple[str, ...]
    # Measured on the GPT yardstick (8 x H200, unrolled): 32 MiB hides 87% of the bytes, 128 MiB, a full layer, 96%.
    bucket_bytes: int = BUCKET_BYTES
    encoding: Encoding = dataclasses.field(default_factory=Encoding)
    defers: bool = False

    def __post_init__(self):
        """Check the limit."""
        if self.bucket_bytes < 0:
            raise ValueError(f"bucket_bytes={self.bucket_bytes} must be at least 0; 0 gathers every leaf by itself.")

    @property
    def losses(self) -> int:
        """Return how many losses are computed at once, one per worker. Their mean is taken."""
        return lax.axis_size(self.axes)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the local shape."""
        return leaf.local_shape

    def check(self, shards: Sequence[Any], leaves: Sequence[Leaf]) -> None:
        """Raise a `ValueError` for a shard that is not of its leaf's local shape."""
        for leaf, shard in zip(leaves, shards, strict=True):
            if leaf.kind != "replicated" and leaf.shards != (size := lax.axis_size(leaf.axes)):
                raise ValueError(
                    f"params{leaf.path} is laid out for {leaf.shards} shards, but there are {size} devices along mesh "
                    f"{in_words(leaf.axes)}. Build the layout for this mesh."
                )
            if tuple(shard.shape) != leaf.local_shape:
                raise ValueError(
                    f"params{leaf.path} has shape {tuple(shard.shape)} on a device, but its layout ({leaf.kind}) "
                    f"requires {leaf.local_shape}. Pass the leaf in its storage layout, with `Leaf.local_spec` in "
                    "`in_specs`."
                )

    def all_gather(
        self, shards: Sequence[Shaped[Array, "*local"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*logical"]]:
        """Gather shards in local shape, with one collective per bucket; see `Collectives`."""
        full = list(shards)
        for bucket in buckets(shards, leaves, self._limit(exposed)):
            members = [leaves[i] for i in bucket]
            if members[0].kind != "replicated":
                with jax.named_scope(f"zerojax_gather[{_label(members)}]"):
                    gathered = self._gather([shards[i] for i in bucket], members)
                for i, value in zip(bucket, gathered, strict=True):
                    full[i] = value
        return full

    def reduce_scatter(
        self, grads: Sequence[Shaped[Array, "*logical"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*local"]]:
        """Reduce-scatter gradients to shards in local shape, with one collective per bucket; see `Collectives`.

        Exposed buckets are reduced one after the other, that of the last leaves first, whose gradients
        are computed first: else XLA combines them into one, which waits for the last gradient.
        """
        values = [self.encoding.encode_grad(grad) for grad in grads]
        found = buckets(values, leaves, self._limit(exposed))
        before: list[Array] = []
        for bucket in reversed(found) if exposed else found:
            for i in bucket if exposed else ():
                (values[i],), _ = barrier([values[i]], before)
            members = [leaves[i] for i in bucket]
            with jax.named_scope(f"zerojax_reduce_scatter[{_label(members)}]"):
                before = self._reduce([values[i] for i in bucket], members)
            for i, shard in zip(bucket, before, strict=True):
                values[i] = shard
        return values

    def across(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the axes over which a leaf is not sharded; see `Collectives`."""
        return () if leaf.kind == "replicated" else tuple(axis for axis in self.axes if axis not in leaf.axes)

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape of a leaf's gradient after the backward pass; see `Collectives`."""
        return leaf.local_shape if self.defers else leaf.part_shape

    def reduce_across(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Reduce shards over the axes of `across`; see `Collectives`."""
        sums = list(shards)
        for i, leaf in enumerate(leaves):
            if (axes := self.across(leaf)) and leaf.further == 1:
                with jax.named_scope(f"zerojax_all_reduce[{_label([leaf])}]"):
                    sums[i] = lax.psum(shards[i], axes)
        further = [i for i, leaf in enumerate(leaves) if leaf.further > 1]
        parts = [leaves[i].divided(self.axes) for i in further]
        for bucket in buckets([shards[i] for i in further], parts, self.bucket_bytes):
            members = [parts[j] for j in bucket]
            with jax.named_scope(f"zerojax_reduce_scatter[{_label(members)}]"):
                reduced = self._reduce([shards[further[j]] for j in bucket], members)
            for j, x in zip(bucket, reduced, strict=True):
                sums[further[j]] = x
        return sums

    def rounding_errors(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Return what quantisation loses, without communication; see `Collectives`."""

        def one(shard: Array, leaf: Leaf) -> Array:
            part = leaf.divided(self.axes)
            codec, rows = self.encoding.reduce_codec(part), to_rows(shard, part)
            assert codec is not None
            return from_rows(rows - codec.decode(codec.encode(rows), rows.shape[-1]), part)

        return [one(*pair) for pair in zip(shards, leaves, strict=True)]

    def backward(
        self, fn: Callable, values: Sequence, rows: Rows, grads: Sequence[int], rule: Rule | None = None
    ) -> list:
        """Compute this worker's gradients; see `Collectives`."""
        if rule is None:
            return jax.tree.leaves(fn(values))
        closed = jax.make_jaxpr(fn)(values)
        return jaxprs.evaluate(*compat.opened(closed), values, rule)

    def each_worker(self, fn: Callable, cotangents: Sequence[Array], shapes: Sequence[tuple]) -> PyTree:
        """Call `fn` once, because these collectives belong to one worker; see `Collectives`."""
        return fn(self, cotangents)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return a zero gradient; see `Collectives`."""
        return jnp.zeros(shape, dtype)

    def add(self, a: Array, b: Array) -> Array:
        """Add two unreduced gradients; see `Collectives`."""
        return compat.add_cotangents(a, b)

    def like(self, grad: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
        """Return the gradient unchanged; see `Collectives`."""
        return grad

    @property
    def follower(self) -> None:
        """Return None: every array belongs to one worker; see `Collectives`."""
        return None

    def element(self, x: Array, rows: State) -> Array:
        """Return some element of an array; see `Collectives`."""
        return x.ravel()[0]

    def zero_after(self, anchor: Sequence[Array], rows: Rows) -> Array:
        """Return a zero that depends on the anchor; see `barriers.zero_after`."""
        return zero_after(anchor)

    def psum(self, tree: PyTree) -> PyTree:
        """Return the sum over all data-parallel workers."""
        return lax.psum(tree, self.axes)

    def pmean(self, tree: PyTree) -> PyTree:
        """Return the mean over all data-parallel workers."""
        return lax.pmean(tree, self.axes)

    def pmax(self, tree: PyTree) -> PyTree:
        """Return the elementwise maximum over all data-parallel workers."""
        return lax.pmax(tree, self.axes)

    def _limit(self, exposed: bool) -> int:
        """Return the bytes of a bucket.

        Exposed collectives hide only behind their own block, which begins on its first leaves.
        """
        return self.bucket_bytes // 4 if exposed else self.bucket_bytes

    def _gather(self, shards: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Gather one bucket."""
        codec = self.encoding.gather_codec(leaves[0])
        if codec is None:
            return _all_gather(shards, leaves)
        return quantised.all_gather(shards, leaves, codec, self.encoding.axes(leaves[0]))

    def _reduce(self, values: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Reduce one bucket."""
        leaf = leaves[0]
        if (codec := self.encoding.reduce_codec(leaf)) is not None:
            return quantised.reduce_scatter(values, leaves, codec, self.encoding.axes(leaf))
        if leaf.kind == "replicated":
            return [lax.psum(values[0], self.axes) if leaf.size else values[0]]
        if leaf.dim is not None and len(leaves) == 1:
            padded = pad(values[0], leaf.dim, leaf.storage_shape[leaf.dim])
            return [lax.psum_scatter(padded, leaf.axes, scatter_dimension=leaf.dim, tiled=True)]
        rows = jnp.concatenate([to_rows(*pair) for pair in zip(values, leaves, strict=True)], axis=1)
        row = lax.psum_scatter(rows, leaf.axes, scatter_dimension=0)
        return [x.reshape(leaf.local_shape) for x, leaf in zip(split(row, leaves), leaves, strict=True)]


def _all_gather(shards: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
    """Gather one bucket as it is."""
    leaf = leaves[0]
    if leaf.dim is not None and len(leaves) == 1:
        gathered = lax.all_gather(shards[0], leaf.axes, axis=leaf.dim, tiled=True)
        return [trim(gathered, leaf.dim, leaf.shape[leaf.dim])]
    rows = lax.all_gather(jnp.concatenate([shard.ravel() for shard in shards]), leaf.axes)
    return [from_rows(x, leaf) for x, leaf in zip(split(rows, leaves), leaves, strict=True)]


def _label(leaves: Sequence[Leaf]) -> str:
    """Return the first leaf's path and the number of others, to name a collective in the compiled program."""
    return leaves[0].path + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")
