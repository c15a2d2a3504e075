"""Gather shards into full arrays, and reduce gradients to shards, with explicit collectives.

`Collectives` does so inside a `shard_map`. `GlobalCollectives`, in another file, does so outside of any `shard_map`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.comm import quantised
from zerojax.comm.barriers import barrier, zero_after
from zerojax.comm.buckets import buckets, from_rows, split, to_rows
from zerojax.compat import common_dtype
from zerojax.config import BUCKET_BYTES
from zerojax.config.data_mesh import axes_of, in_words
from zerojax.config.wire import Wire
from zerojax.dims import Follower, State
from zerojax.layout.leaf import Leaf, pad, replace_items, trim

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped

    from zerojax.jaxprs import Rule

# For each value, the state that says which dims hold the rows of the batch.
Rows = Sequence[State]
# Matches the name scope of a collective in an operation's name. The groups are the collective's kind and leaves.
LABEL = re.compile(r"zerojax_(gather|reduce_scatter|all_reduce)\[(.*?)\][/)]")
UPDATE = "zerojax_update"  # the name scope of the optimizer's update


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Gather and reduce leaves in device view, inside a `shard_map` that is manual over the data axes.

    An array is one device's part, and a shard has its leaf's local shape. In `GlobalCollectives`, a shard is the global
    array in storage shape.

    Attributes:
        axes: The data axes, which divide the rows of the batch. Gradients are summed over these axes. A leaf is sharded
            over some or all of them.
        bucket_bytes: The limit on the logical bytes of the sharded leaves in one bucket. If 0, each is alone.
        reduce: The floating type in which gradients are summed over the devices. None: the type of each gradient.
        wire: The formats of quantised leaves. None: no leaf is quantised.
        defers: Whether the caller of the backward pass, instead of the pass itself, calls `reduce_across`.
        shared_bytes: Consecutive blocks of stage 3 share a gather if they gather at most this many logical bytes
            together. If 0, each block has its own.

    Raises:
        ValueError: If `bucket_bytes` is negative.
    """

    axes: tuple[str, ...]
    # In the GPT benchmark on 8 x H200, compute hides 87% of the bytes with 32 MiB, and 96% with 128 MiB, a full layer.
    bucket_bytes: int = BUCKET_BYTES
    reduce: np.dtype | None = None
    wire: Wire | None = None
    defers: bool = False
    shared_bytes: int = 0

    def __post_init__(self):
        if self.bucket_bytes < 0:
            raise ValueError(f"bucket_bytes={self.bucket_bytes} must be at least 0; 0 gathers every leaf by itself.")

    @property
    def losses(self) -> int:
        """Return the number of losses that a program computes: one per worker. The step uses their mean."""
        return lax.axis_size(self.axes)

    @property
    def follower(self) -> Follower | None:
        """Return the analysis that finds the rows of the batch in each value. None in device view."""
        return None

    def reduce_dtype(self, dtype: np.dtype) -> np.dtype:
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return _at_least_bfloat16(dtype) if self.reduce is None else self.reduce

    def sum_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which one device sums a parameter's gradients from several uses: at least bfloat16."""
        wide = _at_least_bfloat16(dtype)
        return wide if self.reduce is None else common_dtype(wide, self.reduce)

    def check(self, shards: Sequence[Any], leaves: Sequence[Leaf]) -> None:
        """Raise a `ValueError` if a shard is not laid out as its leaf says."""
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

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        return leaf.local_shape

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape that a leaf's gradient has after the backward pass."""
        return leaf.local_shape if self.defers else leaf.part_shape

    def all_gather(
        self, shards: Sequence[Shaped[Array, "*local"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*logical"]]:
        """Gather shards into full arrays, in logical shape, with one collective per bucket.

        A replicated leaf is returned unchanged. `exposed` says whether these collectives cannot overlap with the
        compute of another block.
        """
        return self._by_bucket("gather", self._gather, shards, leaves, exposed=exposed)

    @jax.named_scope(names.SHARDS)
    def reduce_scatter(
        self, grads: Sequence[Shaped[Array, "*logical"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*local"]]:
        """Sum each gradient over the axes of its leaf, and return its shard, with zeros in the padding.

        Without hybrid sharding, a leaf's axes are all data axes. With hybrid sharding, `across` returns the other axes.
        The gradient of a replicated leaf is all-reduced over all workers. The result has the type of the reduction.

        Exposed buckets are reduced one after the other. The bucket of the last leaves comes first, because its
        gradients are computed first. Without this order XLA combines the buckets, and waits for the last gradient.
        """
        values = [grad.astype(self.reduce_dtype(grad.dtype)) for grad in grads]
        return self._by_bucket("reduce_scatter", self._reduce, values, leaves, exposed=exposed, from_last=exposed)

    def across(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the data axes over which a leaf is not sharded (hybrid sharding). `reduce_across` sums over them."""
        known = {*leaf.axes, *axes_of(leaf.others)}
        return () if leaf.kind == "replicated" else tuple(axis for axis in self.axes if axis not in known)

    def experts(self, leaves: Iterable[Leaf]) -> dict[int, tuple[str, ...]]:
        """Find the experts, which stay divided over a data axis (`expert_axis`).

        Return the other data axes, over which an expert's gradient is summed, by the index of the leaf.
        """
        named = ({*axes_of(leaf.others)} for leaf in leaves)
        rest = (tuple(axis for axis in self.axes if axis not in names) for names in named)
        return {i: axes for i, axes in enumerate(rest) if len(axes) < len(self.axes)}

    def reduce_across(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Sum the results of `reduce_scatter` over the axes that `across` returns. This completes the gradients.

        If gradients are sharded over more axes than parameters, each device keeps only its part of the shard.
        """
        sums = list(shards)
        for i, leaf in enumerate(leaves):
            if (axes := self.across(leaf)) and leaf.further == 1:
                with jax.named_scope(f"zerojax_all_reduce[{_label([leaf])}]"):
                    sums[i] = lax.psum(shards[i], axes)
        further = [i for i, leaf in enumerate(leaves) if leaf.further > 1]
        parts = [leaves[i].divided(self.axes) for i in further]
        reduced = self._by_bucket("reduce_scatter", self._reduce, [shards[i] for i in further], parts)
        return replace_items(sums, further, reduced)

    def own_part(self, shard: Array, leaf: Leaf) -> Array:
        """Return the part that a device keeps of `shard`, a gradient that is already summed; see `reduce_across`."""
        if leaf.dim is None or leaf.further == 1 or self.defers:
            return shard
        size = shard.shape[leaf.dim] // leaf.further
        return lax.dynamic_slice_in_dim(shard, lax.axis_index(self.across(leaf)) * size, size, leaf.dim)

    def over_workers(self, reduce: Callable[[PyTree, tuple[str, ...]], PyTree], tree: PyTree) -> PyTree:
        """Reduce the values that each worker computed. `reduce` is `lax.psum`, `lax.pmean` or `lax.pmax`."""
        return reduce(tree, self.axes)

    def per_shard(
        self, fn: Callable, values: Sequence, dims: Sequence[int | None], out_dims: Sequence[int | None], axes: tuple
    ) -> list[Array]:
        """Call a function once per device, on the device's part of each value, and return the results.

        The function may use collectives over `axes`. These axes divide the dim `dims[i]` of value i, and `out_dims[i]`
        of result i. None stands for an array that is equal on all devices.
        """
        return fn(*values)

    def divided(self, x: Array, dim: int, extent: int, axes: tuple[str, ...]) -> Array:
        """Divide an array that all devices have in full. Each device gets `extent` entries along `dim`."""
        padded = pad(x, dim, extent * lax.axis_size(axes))
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(axes) * extent, extent, dim)

    def backward(
        self,
        fn: Callable,
        values: Sequence,
        rows: Rows,
        grads: Sequence[int],
        rule: Rule | None = None,
        *,
        experts: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    ) -> list:
        """Run a backward pass `fn(values)`, where `values` are residuals and cotangents. Return the results' leaves.

        `grads` has the indices of the results that are gradients for `reduce_scatter`. In global view, they may have a
        leading dim with one partial sum per worker. Only global view reads `rows`, the dims of `values` that hold the
        rows of the batch, and `experts`, the axes over which gradients of experts are summed. `rule` is a rule for
        `jaxprs.evaluate`, or None.
        """
        if rule is None:
            return jax.tree.leaves(fn(values))
        closed = jax.make_jaxpr(fn)(values)
        return jaxprs.evaluate(*compat.opened(closed), values, rule)

    def each_worker(self, fn: Callable, cotangents: Sequence[Array], shapes: Sequence[tuple]) -> PyTree:
        """Call `fn(collectives, cotangents)`, a linear function of cotangents, with those of one worker.

        The cotangents have these `shapes`, or a leading dim with one partial sum per worker. Then so has the result.
        """
        return fn(self, cotangents)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return jnp.zeros(shape, dtype)

    def like(self, grad: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
        """Return a gradient in the form of `other`, which may have partial sums."""
        return grad

    def add(self, a: Array, b: Array) -> Array:
        """Add two unreduced gradients. If one has partial sums, so does the result."""
        return compat.add_cotangents(self.like(a, b), self.like(b, a))

    def on_own_rows(self, closed: Any, rows: Rows) -> Any:
        """Return a jaxpr whose kernels run on each device's rows. In device view they do so already.

        `rows` says which dim of each argument of the jaxpr holds the rows of the batch.
        """
        return closed

    def element(self, x: Array, rows: State) -> Array:
        """Return any one element of an array. If `rows` says which dim holds rows, this needs no communication."""
        return x.ravel()[0]

    def zero_after(self, anchor: Sequence[Array], rows: Rows) -> Array:
        """Return `barriers.zero_after(anchor)`. If `rows` says which dim holds rows, this needs no communication."""
        return zero_after(anchor)

    def _by_bucket(
        self,
        scope: str,
        collective: Callable[[list[Array], Sequence[Leaf]], list[Array]],
        arrays: Sequence[Array],
        leaves: Sequence[Leaf],
        *,
        exposed: bool = False,
        from_last: bool = False,
    ) -> list[Array]:
        """Run a collective on each bucket, in a name scope with the kind of collective and the leaves.

        Exposed collectives overlap only with the compute of their own block, which begins when its first leaves have
        arrived. So their buckets are smaller. If `from_last` is true, the buckets run one by one, from the last
        to the first. Buckets of at most `shared_bytes` have no order, because the order would only delay larger ones.
        """
        results, before = list(arrays), []
        found = buckets(arrays, leaves, self.bucket_bytes // 4 if exposed else self.bucket_bytes)
        for bucket in reversed(found) if from_last else found:
            waits = from_last and sum(arrays[i].nbytes for i in bucket) > self.shared_bytes
            given = [barrier([arrays[i]], before)[0][0] if waits else arrays[i] for i in bucket]
            members = [leaves[i] for i in bucket]
            with jax.named_scope(f"zerojax_{scope}[{_label(members)}]"):
                moved = collective(given, members)
            before = moved if waits else before
            for i, result in zip(bucket, moved, strict=True):
                results[i] = result
        return results

    def _gather(self, shards: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        leaf = leaves[0]
        if leaf.kind == "replicated":
            return shards
        if (codec := quantised.gather_codec(self.wire, leaf)) is not None:
            return quantised.all_gather(shards, leaves, codec, quantised.narrow_axes(self.wire, leaf))
        if leaf.dim is not None and len(leaves) == 1:
            gathered = lax.all_gather(shards[0], leaf.axes, axis=leaf.dim, tiled=True)
            return [trim(gathered, leaf.dim, leaf.shape[leaf.dim])]
        rows = lax.all_gather(jnp.concatenate([shard.ravel() for shard in shards]), leaf.axes)
        return [from_rows(x, leaf) for x, leaf in zip(split(rows, leaves), leaves, strict=True)]

    def _reduce(self, values: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        leaf = leaves[0]
        if (codec := quantised.reduce_codec(self.wire, leaf)) is not None:
            return quantised.reduce_scatter(values, leaves, codec, quantised.narrow_axes(self.wire, leaf))
        if leaf.kind == "replicated":
            return [lax.psum(values[0], self.axes) if leaf.size else values[0]]
        if leaf.dim is not None and len(leaves) == 1:
            padded = pad(values[0], leaf.dim, leaf.storage_shape[leaf.dim])
            return [lax.psum_scatter(padded, leaf.axes, scatter_dimension=leaf.dim, tiled=True)]
        rows = jnp.concatenate([to_rows(*pair) for pair in zip(values, leaves, strict=True)], axis=1)
        row = lax.psum_scatter(rows, leaf.axes, scatter_dimension=0)
        return [x.reshape(leaf.local_shape) for x, leaf in zip(split(row, leaves), leaves, strict=True)]


def _at_least_bfloat16(dtype: np.dtype) -> np.dtype:
    """Replace a floating type narrower than bfloat16 by bfloat16, because a sum in float8 loses most of its digits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 2
    return np.dtype(jnp.bfloat16) if narrow else dtype


def _label(leaves: Sequence[Leaf]) -> str:
    """Return a collective's name in the compiled program: the first leaf's path, and the number of other leaves.

    In programs that several layers share, leaves have no path.
    """
    return (leaves[0].path or "a parameter") + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")
