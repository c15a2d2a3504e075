"""Call a loss that is written for a mesh with Explicit axes, although zerojax computes on a mesh with Auto axes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, PartitionSpec

from zerojax.comm.mesh import Typed, explicit_part, is_typed, without_types
from zerojax.comm.typed import TypedFunction, typed_mesh
from zerojax.config import Config
from zerojax.config.batch_dims import is_divisible
from zerojax.config.data_mesh import axes_of, spec_entry
from zerojax.jaxprs import ARRAYS, split_arrays
from zerojax.layout.tree import Layout

if TYPE_CHECKING:
    from jaxtyping import PyTree


@dataclasses.dataclass(frozen=True)
class TypedLoss:
    """A loss that may be written for Explicit axes, although zerojax computes on a mesh with Auto axes.

    If the caller's mesh has Explicit axes, the loss is traced with them. The type of the batch has the sharding of
    `batch_spec`. The type of a parameter has its sharding over axes that are not data axes. If the trace fails, for
    example at a lookup that does not say how its result is sharded, the loss is called on Auto axes. `loss` is a
    `Loss`, or another object with the same `call` method.
    """

    config: Config
    layout: Layout
    loss: Any

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Any:
        """Call the loss on arguments whose types have shardings; see `Loss.call`. So may the results: see `Typed`."""
        given, mesh = (params, mutable, batch, without_types(args)), typed_mesh(self.config.user_mesh)
        if not mesh.explicit_axes:  # the caller's mesh has no Explicit axes, or device view made them Manual
            return self.loss.call(*given)
        arrays, put_back = split_arrays(given)
        specs = jax.tree.leaves(self._types(params, mutable, batch, args), is_leaf=is_spec)
        pairs = zip(jax.tree.leaves(given), specs, strict=True)
        specs = [spec for x, spec in pairs if isinstance(x, ARRAYS)]
        flat = lambda *arrays: self.loss.call(*put_back(arrays))
        here, auto = jax.sharding.get_abstract_mesh(), self.config.mesh.abstract_mesh
        outside = here.empty or here.explicit_axes
        with jax.sharding.use_abstract_mesh(auto) if outside else contextlib.nullcontext():
            try:
                traced, shape = TypedFunction.trace(flat, mesh, arrays, specs, self.config.data.batch)
            except Exception as error:  # the caller's function can raise any error
                try:
                    return self.loss.call(*given)
                except Exception as on_auto:  # Python prints both errors.
                    raise error from on_auto
            pairs = zip(traced(*arrays), traced.out_specs, strict=True)
            results = [Typed(x, spec) if axes_of(spec) else x for x, spec in pairs]
            return jax.tree.unflatten(jax.tree.structure(shape), results)

    def _types(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> tuple:
        """Return, for each leaf of the arguments, the spec in the type of the leaf on the caller's mesh."""
        config, mesh = self.config, typed_mesh(self.config.user_mesh)
        named = lambda spec: explicit_part(spec, mesh)
        full = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        of_params = self.layout.treedef.unflatten([named(leaf.other_spec) for leaf in self.layout.params])
        rows = PartitionSpec(spec_entry(config.data.batch))
        specs = jax.tree.map(lambda _: rows, batch) if config.batch_spec is None else config.batch_spec.over(batch)
        specs = jax.tree.map(named, specs, is_leaf=is_spec)
        if not is_divisible(batch, config.data, config.batch_spec):
            specs = full(batch)
        of_args = jax.tree.map(lambda x: named(x.spec) if is_typed(x) else PartitionSpec(), args, is_leaf=is_typed)
        return of_params, full(mutable), specs, of_args


def on_one_device(config: Config) -> Config:
    """Return a configuration in which a mesh with Explicit axes is replaced by one device with the same axes."""
    mesh = config.user_mesh
    if not mesh.explicit_axes:
        return config
    one = mesh.devices.ravel()[:1].reshape((1,) * mesh.devices.ndim)
    return dataclasses.replace(config, user_mesh=Mesh(one, mesh.axis_names, axis_types=mesh.axis_types))


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
