"""Gather shards into full arrays, and reduce gradients to shards, inside a `shard_map` over the data axes.

Many small collectives cost more than a few large ones, so leaves are grouped into buckets, with one collective per
bucket. The leaves of a bucket are packed as one array of shape `(shards, elements)`, whose row i is sent to, or comes
from, shard i.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from zerojax import names
from zerojax.comm.mesh import in_storage_shape
from zerojax.compat import common_dtype
from zerojax.config import BUCKET_BYTES
from zerojax.config.data_mesh import axes_of
from zerojax.layout.leaf import Leaf, pad, replace_items, trim

if TYPE_CHECKING:
    from zerojax.comm.quantised import Codec
    from zerojax.config.wire import Wire


@dataclasses.dataclass(frozen=True)
class ManualCollectives:
    """The collectives of one device. An array is the device's part, and a shard has its leaf's local shape.

    Attributes:
        axes: The data axes, which divide the rows of the batch. Gradients are summed over these axes. A leaf is sharded
            over some or all of them.
        bucket_bytes: The size limit of a bucket of sharded leaves, in logical bytes. 0: each leaf has its own bucket.
        reduce_dtype: The floating type in which gradients are summed over the devices. None: the type of each gradient.
        wire: The formats in which leaves are sent quantised. None: no leaf is quantised.
        defers: Whether the caller of the backward pass, instead of the pass itself, calls `reduce_across`.
        shared_bytes: Consecutive blocks of stage 3 share a gather if they gather at most this many logical bytes
            together. If 0, each block has its own gather.
    """

    axes: tuple[str, ...]
    # In the GPT benchmark on 8 x H200, compute hides 87% of the bytes with 32 MiB, and 96% with 128 MiB, a full layer.
    bucket_bytes: int = BUCKET_BYTES
    reduce_dtype: np.dtype | None = None
    wire: "Wire | None" = None
    defers: bool = False
    shared_bytes: int = 0

    def reduced_dtype(self, dtype: np.dtype) -> np.dtype:
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return _at_least_bfloat16(dtype) if self.reduce_dtype is None else self.reduce_dtype

    def sum_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which one device sums a parameter's gradients from several uses: at least bfloat16."""
        wide = _at_least_bfloat16(dtype)
        return wide if self.reduce_dtype is None else common_dtype(wide, self.reduce_dtype)

    def all_gather(
        self, shards: Sequence[Shaped[Array, "*local"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*logical"]]:
        """Gather shards into full arrays, in logical shape. A replicated leaf is returned unchanged.

        With `exposed`, only the block that reads these leaves can hide their gathers. The block begins when its first
        leaves have arrived, so the buckets are smaller.
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

        The gradient of a replicated leaf is all-reduced over all workers. Results have the type `reduced_dtype`.
        """
        return self._reduced([grad.astype(self.reduced_dtype(grad.dtype)) for grad in grads], leaves, exposed=exposed)

    def _reduced(self, values: Sequence[Array], leaves: Sequence[Leaf], *, exposed: bool = False) -> list[Array]:
        # Exposed buckets are reduced one after the other. The bucket of the last leaves comes first, because its
        # gradients are computed first. Without this order XLA combines the buckets, and waits for the last gradient.
        # Buckets of at most `shared_bytes` have no order, because the order would only delay larger ones.
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

    def _buckets(self, arrays: Sequence[Array], leaves: Sequence[Leaf], exposed: bool) -> list[list[int]]:
        return buckets_of(arrays, leaves, self.bucket_bytes // 4 if exposed else self.bucket_bytes)

    def _codec(self, leaf: Leaf, *, gathers: bool) -> "Codec | None":
        if self.wire is None:
            return None
        from zerojax.comm.quantised import codec_of

        return codec_of(self.wire, leaf, gathers=gathers)

    def _gather(self, shards: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        leaf = leaves[0]
        if leaf.kind == "replicated":
            return shards
        if (codec := self._codec(leaf, gathers=True)) is not None:
            stacks = codec.all_gather(shards, leaf.axes)
        elif leaf.dim is not None and len(leaves) == 1:
            gathered = lax.all_gather(shards[0], leaf.axes, axis=leaf.dim, tiled=True)
            return [trim(gathered, leaf.dim, leaf.shape[leaf.dim])]
        else:
            stacks = split(lax.all_gather(jnp.concatenate([shard.ravel() for shard in shards]), leaf.axes), leaves)
        return [unstack_shards(x, leaf) for x, leaf in zip(stacks, leaves, strict=True)]

    def _reduce(self, values: list[Array], leaves: Sequence[Leaf]) -> list[Array]:
        leaf, codec, psum_scatter = leaves[0], self._codec(leaves[0], gathers=False), lax.psum_scatter
        if leaf.kind == "replicated":
            return [lax.psum(values[0], self.axes) if leaf.size else values[0]]
        if jax.distributed.is_initialized():
            from zerojax.comm.gloo import psum_scatter
        if leaf.dim is not None and len(leaves) == 1 and codec is None:
            padded = pad(values[0], leaf.dim, leaf.storage_shape[leaf.dim])
            return [psum_scatter(padded, leaf.axes, scatter_dimension=leaf.dim, tiled=True)]
        stacks = [stack_shards(*pair) for pair in zip(values, leaves, strict=True)]
        if codec is not None:
            parts = codec.reduce_scatter(stacks, leaf.axes)
        else:
            parts = split(psum_scatter(jnp.concatenate(stacks, axis=1), leaf.axes, scatter_dimension=0), leaves)
        return [x.reshape(leaf.local_shape) for x, leaf in zip(parts, leaves, strict=True)]


@jax.named_scope(names.SHARDS)
def barrier(anchor: Sequence[Array], *groups: Sequence[Array]) -> tuple[list[Array], list[list[Array]]]:
    """Return `anchor` and `groups` after one optimization barrier: no array can be read before all are computed.

    No other operations are ordered by the barrier. If `anchor` or all of `groups` are empty, there is no barrier.
    """
    if not anchor or not any(groups):
        return list(anchor), [list(group) for group in groups]
    values = iter(lax.optimization_barrier((*anchor, *[x for group in groups for x in group])))
    return [next(values) for _ in anchor], [[next(values) for _ in group] for group in groups]


def _at_least_bfloat16(dtype: np.dtype) -> np.dtype:
    """Replace a floating type narrower than bfloat16 by bfloat16, because a sum in float8 loses most of its digits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 2
    return np.dtype(jnp.bfloat16) if narrow else dtype


def _label(leaves: Sequence[Leaf]) -> str:
    # In programs that several layers share, leaves have no path.
    return (leaves[0].path or "a parameter") + (f" and {len(leaves) - 1} more" if len(leaves) > 1 else "")


def buckets_of(arrays: Sequence[Array], leaves: Sequence[Leaf], limit: int) -> list[list[int]]:
    """Group arrays into buckets of one type and one codec, and return the indices of each bucket's arrays.

    - Flat leaves share a bucket.
    - Consecutive sharded leaves share a bucket of up to `limit` logical bytes.
    - A replicated leaf is alone. So is a leaf that other mesh axes divide, because packing would gather the leaf.
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


def stack_shards(value: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, "shards elements"]:
    """Return the stack of an array's shards, each flat, with zeros in the padding."""
    stored, local, dim = in_storage_shape(value, leaf), leaf.local_shape, leaf.dim
    if dim is None:
        return stored.reshape(leaf.shards, -1)
    divided = stored.reshape(*local[:dim], leaf.shards, *local[dim:])
    return jnp.moveaxis(divided, dim, 0).reshape(leaf.shards, -1)


def unstack_shards(stack: Shaped[Array, "shards elements"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    """Undo `stack_shards`, and return the logical array without the padding."""
    if leaf.dim is None:
        return trim(stack.reshape(-1), 0, leaf.size).reshape(leaf.shape)
    divided = jnp.moveaxis(stack.reshape(leaf.shards, *leaf.local_shape), 0, leaf.dim)
    return trim(divided.reshape(leaf.storage_shape), leaf.dim, leaf.shape[leaf.dim])


def split(bucket: Shaped[Array, "*shards elements"], leaves: Sequence[Leaf]) -> list[Array]:
    """Split the last dim of a bucket into one array per leaf.

    The barrier hides from XLA where each leaf begins, so XLA compiles one kernel for all leaves of one shape, and not
    one per leaf, which took most of the compile time. The offsets are signed: with unsigned ones, XLA ran no product
    during one of the backward pass's gathers (in docs/fit.md's model). JAX need not ask whether they are negative.
    """
    if len(leaves) == 1:
        return [bucket]
    sizes = [math.prod(leaf.local_shape) for leaf in leaves]
    starts = lax.optimization_barrier([jnp.int32(start) for start in itertools.accumulate(sizes[:-1], initial=0)])
    cut = functools.partial(lax.dynamic_slice_in_dim, bucket, axis=bucket.ndim - 1, allow_negative_indices=False)
    return list(map(cut, starts, sizes))
