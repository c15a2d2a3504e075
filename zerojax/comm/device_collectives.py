"""Implement `Collectives` in device view, inside a `shard_map` that is manual over the data axes.

Every value is one device's part, and a gradient that is not reduced is this device's partial sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.comm import barriers
from zerojax.comm.collectives import Collectives, Rows
from zerojax.comm.manual import ManualCollectives
from zerojax.config.data_mesh import in_words
from zerojax.dims import State
from zerojax.layout.leaf import Leaf, pad

if TYPE_CHECKING:
    from jaxtyping import Array, PyTree


@dataclasses.dataclass(frozen=True)
class DeviceCollectives(Collectives):
    """The collectives of one device. `Collectives` describes the methods."""

    all_gather = ManualCollectives.all_gather
    reduce_scatter = ManualCollectives.reduce_scatter
    reduce_across = ManualCollectives.reduce_across

    @functools.cached_property
    def follower(self) -> None:
        return None

    @property
    def losses(self) -> int:
        return lax.axis_size(self.axes)  # one per worker

    def check(self, shards: Sequence[Any], leaves: Sequence[Leaf]) -> None:
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
        return leaf.local_shape if self.defers else leaf.part_shape

    def own_part(self, shard: Array, leaf: Leaf) -> Array:
        if leaf.dim is None or leaf.further == 1 or self.defers:
            return shard
        size = shard.shape[leaf.dim] // leaf.further
        return lax.dynamic_slice_in_dim(shard, lax.axis_index(self.across(leaf)) * size, size, leaf.dim)

    def over_workers(self, reduce: Callable[[PyTree, tuple[str, ...]], PyTree], tree: PyTree) -> PyTree:
        return reduce(tree, self.axes)

    def per_shard(
        self, fn: Callable, values: Sequence, dims: Sequence[int | None], out_dims: Sequence[int | None], axes: tuple
    ) -> list[Array]:
        return fn(*values)

    def divided(self, x: Array, dim: int, extent: int, axes: tuple[str, ...]) -> Array:
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
        return barriers.evaluate_after(zero, closed, values)

    def by_worker(self, cotangents: Sequence[Array], shapes: Sequence[tuple]) -> list[Array] | None:
        return None

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return jnp.zeros(shape, dtype)

    def like(self, grad: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
        return grad

    def on_own_rows(self, closed: Any, rows: Rows) -> Any:
        return closed

    def undivided_kernels(self) -> list[str]:
        return []

    def element(self, x: Array, rows: State) -> Array:
        return x.ravel()[0]

    def zero_after(self, anchor: Sequence[Array], rows: Rows) -> Array:
        return barriers.zero_after(anchor)


def of_one_worker(comm: Collectives) -> DeviceCollectives:
    """Return the collectives of `comm` for code that runs once per worker, under `jax.vmap` over partial sums."""
    return DeviceCollectives(comm.axes, comm.bucket_bytes, comm.reduce, comm.wire, comm.defers, comm.shared_bytes)
