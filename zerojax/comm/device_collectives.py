"""Implement `Collectives` in device view, inside a `shard_map` that is manual over the data axes.

Every value is one device's part, and a gradient that is not reduced is this device's partial sum.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax import lax
from jaxtyping import Array, PyTree

from zerojax.comm.collectives import Collectives
from zerojax.comm.manual import ManualCollectives
from zerojax.layout.leaf import Leaf, pad


@dataclasses.dataclass(frozen=True)
class DeviceCollectives(Collectives):
    """The collectives of one device; see `Collectives`. Inherited methods treat all values as those of one worker."""

    all_gather = ManualCollectives.all_gather
    reduce_scatter = ManualCollectives.reduce_scatter
    reduce_across = ManualCollectives.reduce_across

    @property
    def losses(self) -> int:
        return lax.axis_size(self.axes)  # one per worker

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
