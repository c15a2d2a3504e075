"""Send sharded matrices to owners, which compute with whole matrices, and send the results back.

Matrices of one shape form a stack. In storage, device r has slice r of every matrix. One all-to-all sends the slices
to the owners, so that each owner has some whole matrices. Another all-to-all sends the results back.

If there are fewer matrices than devices, each owner consists of several devices. These are neighbours in the mesh,
so they are in one host. Each has a slice of the owner's matrix, and the compiler divides the products among them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from zerojax.comm.mesh import in_storage_shape, mapped
from zerojax.config.data_mesh import dim_spec, spec_entry
from zerojax.layout.leaf import Leaf, trim

OWNER, WITHIN = "zerojax_owner", "zerojax_within"
EXCHANGE = "zerojax_all_to_all["  # in the name of each operation that sends matrices to their owners, or back


@dataclasses.dataclass(frozen=True)
class Owners:
    """The owners that the devices of some mesh axes form.

    There is one owner per index along `axes`. Its devices lie along the mesh axes `within`, which come after `axes`.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    within: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...], within: int) -> "Owners":
        """Return owners of `within` devices each. If `within` is more than 1, `axes` must be a single axis."""
        if within == 1:
            return cls(mesh, axes)
        (axis,) = axes
        at, shape = mesh.axis_names.index(axis), mesh.devices.shape
        split = (*shape[:at], shape[at] // within, within, *shape[at + 1 :])
        names = (*mesh.axis_names[:at], OWNER, WITHIN, *mesh.axis_names[at + 1 :])
        return cls(Mesh(mesh.devices.reshape(split), names), (OWNER,), (WITHIN,))

    @property
    def count(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def each(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.within)

    def compute(
        self,
        fn: Callable,
        arrays: Sequence[Sequence[Shaped[Array, "*storage"]]],
        leaves: Sequence[Leaf],
        small: Sequence[Array],
        shared: Sequence[Array],
        outs: Sequence[Leaf],
    ) -> tuple[list[Array], list[Array]]:
        """Apply a function to each item of a stack. Each owner computes its own items.

        `fn(*arrays, *small, *shared)` computes one item, in logical shapes, and returns `[*outs, *small_outs]`. In the
        argument `arrays`, an entry is a list of stacks in storage shape, which are joined to one stack. Arrays in
        `small` have one entry per item, and arrays in `shared` are the same for all items. `leaves` and `outs` have the
        layouts of one item. Return `(outs, small_outs)` as stacks. `outs` are sharded, and `small_outs` replicated.
        """
        items = sum(x.shape[0] for x in arrays[0])
        slots = -(-items // self.count)
        brought = self._bring(arrays, leaves, slots * self.count)
        small = [_repeated(x, slots * self.count) for x in small]

        def whole(*values):
            taken = [trim(x, dim_of(leaf), leaf.shape[dim_of(leaf)]) for x, leaf in zip(values, leaves, strict=False)]
            results = fn(*taken, *values[len(leaves) :])
            padded = [in_storage_shape(x, leaf) for x, leaf in zip(results, outs, strict=False)]
            return [*padded, *results[len(outs) :]]

        def local(stacked, shared):
            if slots == 1:
                return [x[None] for x in whole(*(x[0] for x in stacked), *shared)]
            return lax.map(lambda one: whole(*one, *shared), stacked)

        mine = PartitionSpec(spec_entry(self.axes))
        results = mapped(
            local,
            mesh=self.mesh,
            in_specs=(mine, PartitionSpec()),
            out_specs=mine,
            axis_names={*self.axes},
        )([*brought, *small], list(shared))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        small_outs = [lax.with_sharding_constraint(x, everywhere)[:items] for x in results[len(outs) :]]
        return self._take_back(results[: len(outs)], outs, items), small_outs

    def _bring(self, arrays: Sequence[Sequence[Array]], leaves: Sequence[Leaf], slots: int) -> list[Array]:
        def local(arrays):
            rows = [_repeated(jnp.concatenate(stacks), slots) for stacks in arrays]
            return [_merged(x, dim_of(leaf)) for x, leaf in zip(self._exchange(rows, back=False), leaves, strict=True)]

        specs = [self._stored(leaf) for leaf in leaves]
        return self._everywhere(
            local, ([[spec] * len(stacks) for spec, stacks in zip(specs, arrays, strict=True)],), self._owned(leaves)
        )([list(stacks) for stacks in arrays])

    def _take_back(self, results: Sequence[Array], leaves: Sequence[Leaf], items: int) -> list[Array]:
        def local(results):
            split = [_split(x, dim_of(leaf), self.count) for x, leaf in zip(results, leaves, strict=True)]
            return [x.reshape(-1, *x.shape[2:])[:items] for x in self._exchange(split, back=True)]

        return self._everywhere(local, (self._owned(leaves),), [self._stored(leaf) for leaf in leaves])(list(results))

    def _exchange(self, rows: list[Array], *, back: bool) -> list[Array]:
        """Send entry i of each array `(owners, slots, ...)` to owner i, with one all-to-all per element type.

        If an owner has several devices (`each`), a device must get neighbouring slices of a matrix. But an all-to-all
        over `axes` takes slices from devices that are `each` positions apart. So all devices first permute the slices.
        `back` undoes the exchange and the permutation.
        """
        shapes = [x.shape if back else (self.count, -1, *x.shape[1:]) for x in rows]
        flat = [x.reshape(self.count, -1) for x in rows]
        out: dict[int, Array] = {}
        for dtype in dict.fromkeys(x.dtype for x in flat):
            of_type = [n for n, x in enumerate(flat) if x.dtype == dtype]
            joined = jnp.concatenate([flat[n] for n in of_type], axis=1)
            with jax.named_scope(f"{EXCHANGE}{'back' if back else 'to owners'}]"):
                sent = joined if back else self._permuted(joined, back=False)
                moved = lax.all_to_all(sent, self.axes, 0, 0, tiled=True)
                moved = self._permuted(moved, back=True) if back else moved
            ends = np.cumsum([flat[n].shape[1] for n in of_type])[:-1]
            for n, x in zip(of_type, jnp.split(moved, ends, axis=1), strict=True):
                out[n] = x.reshape(shapes[n])
        return [out[n] for n in range(len(rows))]

    def _permuted(self, x: Array, *, back: bool) -> Array:
        if self.each == 1:
            return x
        devices = range(self.count * self.each)
        pairs = [(s, s % self.count * self.each + s // self.count) for s in devices]
        return lax.ppermute(x, (*self.axes, *self.within), [(b, a) for a, b in pairs] if back else pairs)

    def _stored(self, leaf: Leaf) -> PartitionSpec:
        return dim_spec(dim_of(leaf) + 1, (*self.axes, *self.within))

    def _owned(self, leaves: Sequence[Leaf]) -> list[PartitionSpec]:
        within = spec_entry(self.within) if self.within else None
        return [PartitionSpec(spec_entry(self.axes), *[None] * dim_of(leaf), within) for leaf in leaves]

    def _everywhere(self, local: Callable, in_specs: tuple, out_specs: list) -> Callable:
        axes = {*self.axes, *self.within}
        return mapped(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def dim_of(leaf: Leaf) -> int:
    assert leaf.dim is not None
    return leaf.dim


def _repeated(stack: Array, slots: int) -> Array:
    """Repeat the items of `stack` until there are `slots` items, so that no owner computes with zeros."""
    return jnp.resize(stack, (slots, *stack.shape[1:]))


def _merged(x: Array, dim: int) -> Array:
    """Join the slices from all sources along `dim`. This converts `(sources, slots, *slice)` to `(slots, *item)`."""
    x = jnp.moveaxis(x, 0, dim + 1)
    return x.reshape(*x.shape[: dim + 1], -1, *x.shape[dim + 3 :])


def _split(x: Array, dim: int, parts: int) -> Array:
    x = x.reshape(*x.shape[: dim + 1], parts, -1, *x.shape[dim + 2 :])
    return jnp.moveaxis(x, dim + 1, 0)
