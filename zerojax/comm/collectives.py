"""Gather shards into full arrays, and reduce gradients to shards. The engine communicates only through `Collectives`.

`Collectives` does so in global view: arrays are global, the compiler divides them, and the loss sees all rows. Gathers
and reductions are explicit nevertheless: each runs `ManualCollectives` in a small `shard_map`. `DeviceCollectives`, in
another file, has the same methods for device view, where the caller is inside a `shard_map` already.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from zerojax import compat, jaxprs, names
from zerojax.comm import partial_sums
from zerojax.comm.manual import ManualCollectives
from zerojax.comm.mesh import mapped, to_storage
from zerojax.config.data_mesh import axes_of, dim_spec, spec_entry
from zerojax.dims import Follower, RowDims
from zerojax.layout.leaf import Leaf, pad, replace_items

# Matches the name scope of a collective in an operation's name. The groups are the collective's kind and leaves.
LABEL = re.compile(r"zerojax_(gather|reduce_scatter|all_reduce)\[(.*?)\][/)]")
UPDATE = "zerojax_update"  # the name scope of the optimizer's update


@dataclasses.dataclass(frozen=True)
class Collectives(ManualCollectives):
    """Collectives outside of any `shard_map`. A shard is a global array in storage shape.

    The class inherits from the collectives of one device, because its methods run outside of a `shard_map`, and call
    the base class's methods inside of one. A gradient has one of these shapes:

    - `(*logical)`: the compiler has summed it;
    - `(workers, *logical)`: one partial sum per worker, divided on dim 0 (`partial_sums`);
    - `(groups, *storage)`: it is reduced within each group of devices that holds all shards;
    - `(*storage)`: it is reduced completely.

    Attributes:
        mesh: The mesh, with Auto axes. None if all values belong to one worker, as in device view.
    """

    mesh: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def _workers(self) -> int:
        return partial_sums.workers_of(self.mesh, self.axes)

    @property
    def losses(self) -> int:
        """Return the number of losses that a program computes: 1 here, and one per worker in device view."""
        return 1  # from all rows

    @functools.cached_property
    def follower(self) -> Any:
        """Return the `Follower` that finds the rows of the batch in each value. None without a mesh."""
        return None if self.mesh is None else Follower(self._workers, guesses=True, axes=self.axes)

    @jax.named_scope(names.SHARDS)
    def all_gather(
        self, shards: Sequence[Shaped[Array, "*storage"]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*logical"]]:
        inside = super()  # of one device, for the body of the `shard_map`

        def gather(*shards):
            return inside.all_gather(shards, self._along_others(leaves), exposed=exposed)

        return self._mapped(gather, [leaf.spec for leaf in leaves], [leaf.other_spec for leaf in leaves])(*shards)

    @jax.named_scope(names.SHARDS)
    def reduce_scatter(
        self, grads: Sequence[Shaped[Array, "..."]], leaves: Sequence[Leaf], *, exposed: bool = False
    ) -> list[Shaped[Array, "*storage"]]:
        """Reduce-scatter partial sums. A gradient that the compiler has summed is only constrained to its sharding."""
        grads, experts = self._without_summands(grads, leaves), self.experts(leaves)
        partial = [i for i, (grad, leaf) in enumerate(zip(grads, leaves, strict=True)) if grad.ndim > len(leaf.shape)]
        chosen = [leaves[i] for i in partial]

        inside = super()

        def reduce(*summands):
            shards = inside.reduce_scatter([x[0] for x in summands], self._along_others(chosen), exposed=exposed)
            return [x[None] if self.across(leaf) else x for x, leaf in zip(shards, chosen, strict=True)]

        over = (spec_entry(experts.get(i, self.axes)) for i in partial)
        specs = [PartitionSpec(axes, *leaf.other_spec) for axes, leaf in zip(over, chosen, strict=True)]
        shards = self._mapped(reduce, specs, [*map(self._reduced_spec, chosen)])(*(grads[i] for i in partial))
        reduced = dict(zip(partial, shards, strict=True))
        cast = lambda grad: grad.astype(self.reduced_dtype(grad.dtype))
        pairs = enumerate(zip(grads, leaves, strict=True))
        return [reduced[i] if i in reduced else to_storage(self.mesh, cast(x), leaf) for i, (x, leaf) in pairs]

    def is_across(self, leaf: Leaf) -> bool:
        """Return whether the backward pass must also reduce a gradient across groups of devices (hybrid sharding)."""
        return not self.defers and bool(self.across(leaf))

    def experts(self, leaves: Iterable[Leaf]) -> dict[int, tuple[str, ...]]:
        """Map the index of each expert's leaf to the data axes over which the leaf's gradient is summed."""
        named = ({*axes_of(leaf.others)} for leaf in leaves)
        rest = (tuple(axis for axis in self.axes if axis not in names) for names in named)
        return {i: axes for i, axes in enumerate(rest) if len(axes) < len(self.axes)}

    def _without_summands(self, grads: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Add up an expert's partial sums if its leaf has no sharded dim, or if there is not one sum per device."""
        grads = list(grads)
        for i, axes in self.experts(leaves).items():
            devices = math.prod(self.mesh.shape[axis] for axis in axes)
            is_partial = grads[i].ndim > len(leaves[i].shape)
            if is_partial and (leaves[i].dim is None or grads[i].shape[0] != devices):
                grads[i] = grads[i].astype(self.reduced_dtype(grads[i].dtype)).sum(0)
        return grads

    def grad_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """Return a gradient's shape after the backward pass. With `defers`, hybrid sharding adds a dim for groups."""
        groups = math.prod(self.mesh.shape[axis] for axis in self.across(leaf))
        return (groups, *leaf.storage_shape) if self.defers and groups > 1 else leaf.storage_shape

    def _reduced_spec(self, leaf: Leaf) -> PartitionSpec:
        axes = self.across(leaf)
        return PartitionSpec(spec_entry(axes), *leaf.spec) if axes else leaf.spec

    def _summed_spec(self, leaf: Leaf) -> PartitionSpec:
        if leaf.further == 1 or leaf.dim is None:
            return leaf.spec
        return dataclasses.replace(leaf, axes=(*leaf.axes, *self.across(leaf))).spec

    @jax.named_scope(names.SHARDS)
    def reduce_across(self, shards: Sequence[Array], leaves: Sequence[Leaf]) -> list[Array]:
        """Reduce shards across groups of devices. Shards that the compiler has summed are returned unchanged."""
        pairs = enumerate(zip(shards, leaves, strict=True))
        partial = [i for i, (x, leaf) in pairs if x.ndim > len(leaf.storage_shape)]
        chosen = [leaves[i] for i in partial]

        inside = super()

        def reduce(*summands):
            return inside.reduce_across([x[0] for x in summands], self._along_others(chosen))

        specs, out_specs = [[*map(of, chosen)] for of in (self._reduced_spec, self._summed_spec)]
        sums = self._mapped(reduce, specs, out_specs)(*(shards[i] for i in partial))
        return replace_items(shards, partial, sums)

    def per_shard(
        self, fn: Callable, values: Sequence, dims: Sequence[int | None], out_dims: Sequence[int | None], axes: tuple
    ) -> list[Array]:
        """Call `fn` once per device, on the device's part of each value. `fn` may use collectives over `axes`.

        `axes` divide dim `dims[i]` of value i, and dim `out_dims[i]` of result i. None means that no dim is divided.
        """
        spec = lambda dim: dim_spec(dim, axes)
        return list(self._mapped(fn, [*map(spec, dims)], [*map(spec, out_dims)])(*values))

    def own_part(self, shard: Array, leaf: Leaf) -> Array:
        """Return the part of a gradient's complete shard that this device keeps: in global view, all of it."""
        return shard

    def divided(self, x: Array, dim: int, extent: int, axes: tuple[str, ...]) -> Array:
        """Divide an array that all devices have in full. Each device gets `extent` entries along `dim`."""
        padded = pad(x, dim, extent * math.prod(self.mesh.shape[axis] for axis in axes))
        return lax.with_sharding_constraint(padded, NamedSharding(self.mesh, dim_spec(dim, axes)))

    def backward(
        self,
        closed: Any,
        values: Sequence,
        rows: Sequence[RowDims],
        grads: Sequence[int],
        zero: Array | None,
        experts: Mapping[int, tuple[str, ...]],
    ) -> list:
        """Run a backward pass, a closed jaxpr, on residuals and cotangents; see `evaluate_backward`.

        Arrays of zeros are made from `zero`, if given, so that XLA cannot allocate them before `zero` is computed.
        """
        options = partial_sums.BackwardOptions(self.mesh, self.axes, zero)
        closed = self.on_own_rows(closed, rows)
        return partial_sums.evaluate_backward(closed, values, options, grads=grads, rows=rows, experts=experts)

    def on_own_rows(self, closed: Any, rows: Sequence[RowDims]) -> Any:
        """Return a jaxpr whose kernels run on each device's rows where possible. `rows` has the arguments' row dims."""
        if self._workers == 1 or not jaxprs.has_kernel(compat.opened(closed)[0]):
            return closed
        from zerojax.comm import own_rows

        return own_rows.on_own_rows(closed, rows, self)

    def undivided_kernels(self) -> list[str]:
        """Warn about kernels that every device runs on all rows, and return the warnings."""
        if self.follower is None or not self.follower.undivided:
            return []
        from zerojax.comm import own_rows

        return own_rows.warn_of_kernels(self.follower.undivided.values())

    def by_worker(self, cotangents: Sequence[Array], shapes: Sequence[tuple]) -> list[Array] | None:
        """Return each cotangent as one partial sum per worker. If all have their logical `shapes`, return None."""
        pairs = list(zip(cotangents, shapes, strict=True))
        if all(x.ndim == len(shape) for x, shape in pairs):
            return None
        return [x if x.ndim > len(shape) else partial_sums.as_summands(x, self._workers) for x, shape in pairs]

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        if self._workers == 1:
            return jnp.zeros(shape, dtype)
        summands = jnp.zeros((self._workers, *shape), dtype)
        return lax.with_sharding_constraint(summands, NamedSharding(self.mesh, dim_spec(0, self.axes)))

    def like(self, grad: Array, other: Array | jax.ShapeDtypeStruct) -> Array:
        """Return `grad`, as partial sums if `other` has partial sums."""
        return partial_sums.as_summands(grad, other.shape[0]) if grad.ndim < other.ndim else grad

    def add(self, a: Array, b: Array) -> Array:
        """Add two unreduced gradients. If one has partial sums, so does the result."""
        return compat.add_cotangents(self.like(a, b), self.like(b, a))

    def add_use(self, total: Array | None, grad: Array) -> Array:
        """Add the gradient of one more use to `total`, in the type `sum_dtype`. If `total` is None, return `grad`."""
        if total is None:
            return grad
        wide = self.sum_dtype(grad.dtype)
        return self.add(total.astype(wide), grad.astype(wide))

    def element(self, x: Array, rows: RowDims) -> Array:
        """Return any one element of an array. If `rows` says which dim holds rows, this needs no communication."""
        known = () if rows is None or self._workers == 1 else sorted(rows.places)
        place = next((p for p in known if p.outer == 1), None)
        first = lambda x: x[(0,) * x.ndim]
        if place is None:  # let the compiler fetch the first element
            return first(x[(slice(1),) * x.ndim])
        return self._mapped(first, (dim_spec(place.dim, self.axes),), PartitionSpec())(x)

    @jax.named_scope(names.SHARDS)
    def zero_after(self, anchor: Sequence[Array], rows: Sequence[RowDims]) -> Array:
        """Return an int32 zero that XLA cannot compute before one `element` of `anchor`, so that its readers wait.

        A barrier alone is not enough: XLA:CPU removes barriers, and then schedules operations without operands first.
        """
        zero = lax.optimization_barrier(jnp.int32(0))
        place = next((i for i, x in enumerate(anchor) if jnp.issubdtype(x.dtype, jnp.floating) and x.size), None)
        if place is None:
            return zero
        some = self.element(anchor[place], rows[place]).astype(jnp.float32)
        return lax.bitcast_convert_type(some, jnp.int32) & zero

    def over_workers(self, reduce: Callable[[PyTree, tuple[str, ...]], PyTree], tree: PyTree) -> PyTree:
        """Reduce the values that each worker computed. `reduce` is `lax.psum`, `lax.pmean` or `lax.pmax`."""
        return tree  # A value of all rows is already a global sum, mean or maximum.

    def _along_others(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Return the layouts of `leaves` inside `_mapped`, where other mesh axes have divided the leaves already."""
        return [leaf.along_others(self.mesh.shape) for leaf in leaves]

    def _mapped(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        if not in_specs and not out_specs:  # A `shard_map` of nothing would take as long to trace as any other.
            return list
        axes = {*self.axes, *axes_of(*in_specs)}
        return mapped(fn, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs, axis_names=axes)
