"""Call a loss function, on a mesh with Auto or Explicit axes, and check the values that it returns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.comm.mesh import Typed, explicit_part, is_typed, without_types
from zerojax.comm.typed import TypedFunction, typed_mesh
from zerojax.compat import common_dtype
from zerojax.config import Config, check_word
from zerojax.config.data_mesh import axes_of, entry_axes, spec_entry
from zerojax.layout.tree import Layout
from zerojax.train.arguments import call

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree


class Returned(NamedTuple):
    """The values that one call of a loss function returned.

    Attributes:
        total: The loss, or the total of a weighted loss. A scalar in float32 or wider.
        weight: The weight of a weighted loss; otherwise 1.
        aux: The auxiliary results; None without `has_aux`.
        mutable: The new mutable state; None without `mutable`.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    aux: PyTree
    mutable: PyTree


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function, and flags for its arguments and return values.

    Attributes:
        fn: `fn(params, batch, *args)`. In device view, `batch` has only the rows of the device.
        has_aux: Whether `fn` returns `(loss, aux)`.
        weighted: Whether the loss is `(total, weight)`. The mean loss is the sum of totals over the sum of weights.
        mutable: Whether `fn` is `fn(params, mutable, batch, *args)` and returns `(loss, mutable)`, or
            `(loss, mutable, aux)` with `has_aux`.
        reduction: Whether the losses of microbatches and, in device view, of devices are averaged ("mean", or None) or
            added up ("sum"). None also refuses to average losses that are sums over rows.
        undivided: The kernels that every device ran on all rows when the loss was last traced, in words.
    """

    fn: Callable
    has_aux: bool = False
    weighted: bool = False
    mutable: bool = False
    reduction: Literal["mean", "sum"] | None = None
    undivided: list[str] = dataclasses.field(default_factory=list, init=False, compare=False, repr=False)

    def returned(self, loss: Any, mutable: PyTree, aux: PyTree) -> Any:
        """Return a loss, a mutable state and aux in the form that `fn` returns, as one value or as a tuple."""
        parts = (loss, *((mutable,) if self.mutable else ()), *((aux,) if self.has_aux else ()))
        return parts if len(parts) > 1 else loss

    def __post_init__(self):
        check_word("reduction", self.reduction, (None, "mean", "sum"))
        if self.weighted and self.reduction is not None:
            raise ValueError(
                f"reduction={self.reduction!r} says how losses are combined, and with weighted=True they are the sum "
                f"of totals over the sum of weights. Give one of them."
            )

    @property
    def form(self) -> str:
        """Describe the values that `fn` must return, for an error message."""
        parts = self.returned("(total, weight)" if self.weighted else "loss", "mutable", "aux")
        return parts if isinstance(parts, str) else f"({', '.join(parts)})"

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Returned:
        """Call `fn` on logical parameters, and check the values that it returns. `args` may be `packed` or not."""
        given = (mutable,) if self.mutable else ()
        value = call(self.fn, (params, *given), batch, args)
        aux = new = None
        if self.has_aux or self.mutable:
            if not (isinstance(value, tuple) and len(value) == len(self.returned(None, None, None))):
                options = [name for name in ("mutable", "has_aux") if getattr(self, name)]
                raise TypeError(
                    f"With {' and '.join(f'{name}=True' for name in options)} the loss function returns {self.form}, "
                    f"not {type(value).__name__}{f' of {len(value)}' if isinstance(value, tuple) else ''}."
                )
            value, *rest = value
            aux = rest.pop() if self.has_aux else None
            new = rest.pop() if self.mutable else None
            check_mutable(new, mutable)
        if self.weighted:
            if not (isinstance(value, tuple) and len(value) == 2):
                raise TypeError(f"With weighted=True the loss function returns {self.form}, and its loss is {value!r}.")
            total, weight = scalar("total", value[0]), scalar("weight", value[1])
        else:
            total, weight = scalar("loss", value), jnp.ones((), jnp.float32)
        return Returned(at_least_float32(total), at_least_float32(weight), aux, new)


def scalar(name: str, value: Any) -> Array:
    """Convert a value that the loss function returned to an array. Raise an error if it is not a real scalar."""
    if isinstance(value, tuple | list | dict):
        raise TypeError(
            f"The loss function must return a scalar {name}, not a {type(value).__name__}. "
            f"For (loss, aux) pass has_aux=True; for (total, weight) pass weighted=True."
        )
    if value is None:
        raise TypeError(f"The loss function must return a scalar {name}, but it returns None: is its `return` missing?")
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The loss function must return a scalar {name}, but it has shape {list(value.shape)}. "
            f"Take jnp.mean(...) over the rows, or return (total, weight) with weighted=True."
        )
    if name != "weight" and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"The loss function must return a floating point {name}, but it is {value.dtype}, which has no gradient. "
            f"Compute it with floating point numbers."
        )
    return value


def at_least_float32(value: Array) -> Array:
    """Cast a value to float32, unless its type is wider, because sums over devices need this precision."""
    return value.astype(common_dtype(value.dtype, jnp.float32))


def check_mutable(new: PyTree, old: PyTree) -> None:
    """Raise a TypeError if the `new` mutable state differs from the `old` state in structure, shape or type."""
    found, structure = jax.tree_util.tree_flatten_with_path(new)
    if structure != jax.tree.structure(old):
        raise TypeError(
            f"The loss function returns a mutable state of the structure {structure}, but it was given a state of the "
            f"structure {jax.tree.structure(old)}. Return a state of the same structure."
        )
    for (path, x), before in zip(found, jax.tree.leaves(old), strict=True):
        if jnp.shape(x) != jnp.shape(before) or jnp.result_type(x) != jnp.result_type(before):
            raise TypeError(
                f"mutable{jax.tree_util.keystr(path)} comes back as {jnp.result_type(x)}{list(jnp.shape(x))}, and was "
                f"given as {jnp.result_type(before)}{list(jnp.shape(before))}. Return the same shape and type."
            )


@jax.named_scope(names.MEAN)
def mean_mutable(mutable: PyTree, comm: Collectives) -> Any:
    """Average the float leaves of the mutable state over the devices. Return other leaves unchanged."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return comm.over_workers(lax.pmean, at_least_float32(x)).astype(x.dtype)

    return jax.tree.map(mean, mutable)


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
        """Call the loss on arguments whose types have shardings; see `Loss.call`."""
        given, mesh = (params, mutable, batch, without_types(args)), typed_mesh(self.config.user_mesh)
        if not mesh.explicit_axes:  # the caller's mesh has no Explicit axes, or device view made them Manual
            return self.loss.call(*given)
        leaves, tree = jax.tree.flatten(given)
        is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in leaves]
        arrays = [x for x, on in zip(leaves, is_array, strict=True) if on]
        specs = jax.tree.leaves(self._types(params, mutable, batch, args), is_leaf=is_spec)
        specs = [spec for spec, on in zip(specs, is_array, strict=True) if on]

        def flat(*arrays):
            rest = iter(arrays)
            merged = [next(rest) if on else x for x, on in zip(leaves, is_array, strict=True)]
            return self.loss.call(*tree.unflatten(merged))

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
            found = jax.tree.unflatten(jax.tree.structure(shape), results)
            if not isinstance(found, Returned):
                return found
            aux = found.aux if self.config.view == "global" else without_types(found.aux)
            return without_types(found)._replace(aux=aux)

    def _types(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> tuple:
        """Return, for each leaf of the arguments, the spec in the type of the leaf on the caller's mesh."""
        config, mesh = self.config, typed_mesh(self.config.user_mesh)
        named = lambda spec: explicit_part(spec, mesh)
        full = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        of_params = self.layout.treedef.unflatten([named(leaf.other_spec) for leaf in self.layout.params])
        rows = PartitionSpec(spec_entry(config.data.batch))
        specs = jax.tree.map(lambda _: rows, batch) if config.batch_spec is None else config.batch_spec.over(batch)
        specs = jax.tree.map(named, specs, is_leaf=is_spec)
        divided = jax.tree.map(lambda spec, x: divides(config, spec, x), specs, batch, is_leaf=is_spec)
        if not all(jax.tree.leaves(divided)):
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


def divides(config: Config, spec: PartitionSpec, x: Any) -> bool:
    """Return whether the mesh axes of a spec divide the dims of an array evenly."""
    sizes = dict(config.data.sizes)
    parts = [math.prod(sizes[axis] for axis in entry_axes(entry)) for entry in spec]
    return len(parts) <= jnp.ndim(x) and all(n % k == 0 for n, k in zip(jnp.shape(x), parts, strict=False))
