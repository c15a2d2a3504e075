"""Gather shards into full arrays, and reduce gradients to shards, with explicit collectives.

`Collectives` does so inside a `shard_map`. `GlobalCollectives`, in another file, does so outside of any `shard_map`.

Many small collectives cost more than a few large ones, so leaves are grouped into buckets, with one collective per
bucket. The leaves of a bucket are packed as one array of shape `(shards, elements)`, whose row i is sent to, or comes
from, shard i.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.comm.barriers import barrier, zero_after, zeros_from
from zerojax.comm.mesh import in_storage_shape
from zerojax.compat import common_dtype
from zerojax.config import BUCKET_BYTES
from zerojax.config.data_mesh import axes_of, in_words
from zerojax.config.wire import Wire
from zerojax.dims import Follower, State
from zerojax.layout.leaf import Leaf, pad, replace_items, trim

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree, Shaped

    from zerojax.comm.quantised import Codec

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

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return the shape that a leaf's gradient has after the backward pass."""
        return leaf.local_shape if self.defers else leaf.part_shape

    def all_gather(
        self, shards: Sequence[Shaped[Array, "*local"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*logical"]]:
        """Gather shards into full arrays, in logical shape, with one collective per bucket.

        A replicated leaf is returned unchanged. `exposed` says whether these collectives cannot overlap with the
        compute of another block. They overlap only with their own block, which begins when its first leaves have
        arrived, so their buckets are smaller.
        """
        results = list(shards)
        for bucket in self._buckets(shards, leaves, exposed):
            members = [leaves[i] for i in bucket]
            with jax.named_scope(f"zerojax_gather[{_label(members)}]"):
                results = replace_items(results, bucket, self._gather([shards[i] for i in bucket], members))
        return results

    @jax.named_scope(names.SHARDS)
    def reduce_scatter(
        self, grads: Sequence[Shaped[Array, "*logical"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*local"]]:
        """Sum each gradient over the axes of its leaf, and return its shard, with zeros in the padding.

        Without hybrid sharding, a leaf's axes are all data axes. With hybrid sharding, `across` returns the other axes.
        The gradient of a replicated leaf is all-reduced over all workers. The result has the type of the reduction.

        Exposed buckets are reduced one after the other. The bucket of the last leaves comes first, because its
        gradients are computed first. Without this order XLA combines the buckets, and waits for the last gradient.
        Buckets of at most `shared_bytes` have no order, because the order would only delay larger ones.
        """
        return self._reduced([grad.astype(self.reduce_dtype(grad.dtype)) for grad in grads], leaves, exposed=exposed)

    def _reduced(self, values: Sequence[Array], leaves: Sequence[Leaf], *, exposed: bool = False) -> list[Array]:
        results, before = list(values), []
        buckets = self._buckets(values, leaves, exposed)
        for bucket in buckets[::-1] if exposed else buckets:
            given, members = [values[i] for i in bucket], [leaves[i] for i in bucket]
            waits = exposed and sum(x.nbytes for x in given) > self.shared_bytes
            given = [barrier([x], before)[0][0] for x in given] if waits else given
            with jax.named_scope(f"zerojax_reduce_scatter[{_label(members)}]"):
                shards = self._reduce(given, members)
            before = shards if waits else before
            results = replace_items(results, bucket, shards)
        return results

    def across(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the data axes over which a leaf is not sharded (hybrid sharding). `reduce_across` sums over them."""
        known = {*leaf.axes, *axes_of(leaf.others)}
        return () if leaf.kind == "replicated" else tuple(axis for axis in self.axes if axis not in known)

    def is_across(self, leaf: Leaf) -> bool:
        """Return whether a result of `reduce_scatter` must be reduced across groups during the backward pass, too."""
        return not self.defers and bool(self.across(leaf))

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
        return replace_items(sums, further, self._reduced([shards[i] for i in further], parts))

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
        closed: Any,
        values: Sequence,
        rows: Rows,
        grads: Sequence[int],
        zero: Array | None = None,
        *,
        experts: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    ) -> list:
        """Run a backward pass, a closed jaxpr, where `values` are residuals and cotangents, and return its results.

        `grads` has the indices of the results that are gradients for `reduce_scatter`. In global view, they may have a
        leading dim with one partial sum per worker. Only global view reads `rows`, the dims of `values` that hold the
        rows of the batch, and `experts`, the axes over which gradients of experts are summed. If `zero` is given, it is
        a zero from which arrays of zeros are made, so that XLA cannot make them before it.
        """
        return jaxprs.evaluate(*compat.opened(closed), values, lambda eqn, values: zeros_from(zero, eqn, values))

    @property
    def manual(self) -> Collectives:
        """Return the collectives of one worker, in device view."""
        return self

    def by_worker(self, cotangents: Sequence[Array], shapes: Sequence[tuple]) -> list[Array] | None:
        """Return cotangents with one partial sum per worker, or None if each has its shape, without partial sums."""
        return None

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return jnp.zeros(shape, dtype)

    def like(self, grad: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
        """Return a gradient in the form of `other`, which may have partial sums."""
        return grad

    def add(self, a: Array, b: Array) -> Array:
        """Add two unreduced gradients. If one has partial sums, so does the result."""
        return compat.add_cotangents(self.like(a, b), self.like(b, a))

    def add_use(self, total: Array | None, grad: Array) -> Array:
        """Add the gradient of one more use to a total, in a wide type. The first gradient keeps its type."""
        if total is None:
            return grad
        wide = self.sum_dtype(grad.dtype)
        return self.add(total.astype(wide), grad.astype(wide))

    def on_own_rows(self, closed: Any, rows: Rows) -> Any:
        """Return a jaxpr whose kernels run on each device's rows. In device view they do so already.

        `rows` says which dim of each argument of the jaxpr holds the rows of the batch.
        """
        return closed

    def undivided_kernels(self) -> list[str]:
        """Warn about kernels that every device runs on all rows, and return the warnings. Device view has none."""
        return []

    def element(self, x: Array, rows: State) -> Array:
        """Return any one element of an array. If `rows` says which dim holds rows, this needs no communication."""
        return x.ravel()[0]

    def zero_after(self, anchor: Sequence[Array], rows: Rows) -> Array:
        """Return `barriers.zero_after(anchor)`. If `rows` says which dim holds rows, this needs no communication."""
        return zero_after(anchor)

    def _buckets(self, arrays: Sequence[Array], leaves: Sequence[Leaf], exposed: bool) -> list[list[int]]:
        return buckets_of(arrays, leaves, self.bucket_bytes // 4 if exposed else self.bucket_bytes)

    def _codec(self, leaf: Leaf, *, gathers: bool) -> Codec | None:
        """Return the codec of a leaf that is sent quantised, or None."""
        if self.wire is None:
            return None
        from zerojax.comm import quantised

        return (quantised.gather_codec if gathers else quantised.reduce_codec)(self.wire, leaf)

    def _gather(self, shards: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        leaf = leaves[0]
        if leaf.kind == "replicated":
            return shards
        if (codec := self._codec(leaf, gathers=True)) is not None:
            rows = codec.all_gather(shards, leaf.axes)
        elif leaf.dim is not None and len(leaves) == 1:
            gathered = lax.all_gather(shards[0], leaf.axes, axis=leaf.dim, tiled=True)
            return [trim(gathered, leaf.dim, leaf.shape[leaf.dim])]
        else:
            rows = split(lax.all_gather(jnp.concatenate([shard.ravel() for shard in shards]), leaf.axes), leaves)
        return [from_rows(x, leaf) for x, leaf in zip(rows, leaves, strict=True)]

    def _reduce(self, values: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        leaf, codec = leaves[0], self._codec(leaves[0], gathers=False)
        if leaf.kind == "replicated":
            return [lax.psum(values[0], self.axes) if leaf.size else values[0]]
        if leaf.dim is not None and len(leaves) == 1 and codec is None:
            padded = pad(values[0], leaf.dim, leaf.storage_shape[leaf.dim])
            return [lax.psum_scatter(padded, leaf.axes, scatter_dimension=leaf.dim, tiled=True)]
        rows = [to_rows(*pair) for pair in zip(values, leaves, strict=True)]
        if codec is not None:
            parts = codec.reduce_scatter(rows, leaf.axes)
        else:
            parts = split(lax.psum_scatter(jnp.concatenate(rows, axis=1), leaf.axes, scatter_dimension=0), leaves)
        return [x.reshape(leaf.local_shape) for x, leaf in zip(parts, leaves, strict=True)]


def _at_least_bfloat16(dtype: np.dtype) -> np.dtype:
    """Replace a floating type narrower than bfloat16 by bfloat16, because a sum in float8 loses most of its digits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 2
    return np.dtype(jnp.bfloat16) if narrow else dtype


def _label(leaves: Sequence[Leaf]) -> str:
    """Return a collective's name in the compiled program: the first leaf's path, and the number of other leaves.

    In programs that several layers share, leaves have no path.
    """
    return (leaves[0].path or "a parameter") + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")


def buckets_of(arrays: Sequence[Array], leaves: Sequence[Leaf], limit: int) -> list[list[int]]:
    """Group arrays into buckets, and return the indices of each bucket's arrays.

    - Flat leaves of one type share a bucket.
    - Consecutive sharded leaves of one type share a bucket of up to `limit` logical bytes.
    - A leaf that is also sharded over other mesh axes is alone in its bucket. Packing would gather the leaf over them.
    - A replicated leaf is alone in its bucket.

    Quantised and unquantised leaves never share a bucket.
    """
    found: list[list[int]] = []
    filled: dict = {}
    for i, (array, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        flat = leaf.kind == "flat"
        size = 0 if flat else jnp.dtype(array.dtype).itemsize * leaf.size
        others = any(entry is not None for entry in leaf.others)
        if leaf.kind == "replicated" or (not flat and (others or size >= limit)):
            found.append([i])
            continue
        key = leaf.kind, leaf.axes, array.dtype, leaf.is_quantised
        bucket, total = filled.get(key, ([], 0))
        if not bucket or (total + size > limit and not flat):
            bucket, total = [], 0
            found.append(bucket)
        bucket.append(i)
        filled[key] = bucket, total + size
    return found


def to_rows(value: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, "shards elements"]:
    """Return a logical array as one row per shard, with zeros in the padding."""
    stored, local, dim = in_storage_shape(value, leaf), leaf.local_shape, leaf.dim
    if dim is None:
        return stored.reshape(leaf.shards, -1)
    divided = stored.reshape(*local[:dim], leaf.shards, *local[dim:])
    return jnp.moveaxis(divided, dim, 0).reshape(leaf.shards, -1)


def from_rows(rows: Shaped[Array, "shards elements"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    """Undo `to_rows`, and return the logical array without the padding."""
    if leaf.dim is None:
        return trim(rows.reshape(-1), 0, leaf.size).reshape(leaf.shape)
    divided = jnp.moveaxis(rows.reshape(leaf.shards, *leaf.local_shape), 0, leaf.dim)
    return trim(divided.reshape(leaf.storage_shape), leaf.dim, leaf.shape[leaf.dim])


def split(rows: Shaped[Array, "*shards elements"], leaves: Sequence[Leaf]) -> list[Array]:
    """Split the last dim of a bucket's rows into one array per leaf.

    XLA cannot see through the barrier where each leaf begins, so it compiles one kernel for all leaves of one shape.
    Without the barrier, it compiled one kernel per leaf, which took most of the compile time. An unsigned offset would
    save a few equations, but then XLA schedules a gather of the backward pass next to no product (docs/fit.md's model).
    """
    if len(leaves) == 1:
        return [rows]
    sizes = [math.prod(leaf.local_shape) for leaf in leaves]
    starts = lax.optimization_barrier([jnp.int32(start) for start in itertools.accumulate(sizes[:-1], initial=0)])
    slices = zip(starts, sizes, strict=True)
    return [lax.dynamic_slice_in_dim(rows, start, size, axis=rows.ndim - 1) for start, size in slices]
