"""Call losses that are written for Explicit axes (`out_sharding=`, `reshard`, `typeof`) on Auto axes.

A loss is traced once on the caller's mesh, where the type of every array says how the array is sharded. Shardings are
removed from the jaxpr of this trace, which is then evaluated on the same devices with Auto axes. Two kinds of results
get a sharding constraint: those whose equation names their sharding, and those whose type divides rows, if no operand
has this type. A loss that names no sharding gets no constraint, so its program is that of a trace on Auto axes. A value
that depends on parameters alone gets no constraint either: with one, `zerojax.gather` would not recognise the value.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from zerojax import compat, jaxprs
from zerojax.comm import rebinding
from zerojax.comm.mesh import Typed, explicit_part, is_typed, to_auto, without_types
from zerojax.config import Config, with_auto_axes
from zerojax.config.data_mesh import axes_of, entry_axes, is_spec, spec_entry
from zerojax.jaxprs import ARRAYS, split_arrays
from zerojax.layout.tree import Layout

# Operations that change how a value is sharded, and nothing else.
_SHARDINGS = ("out_sharding", "sharding")


@dataclasses.dataclass(frozen=True)
class TypedLoss:
    """A loss that may be written for Explicit axes. `loss` is a `Loss`, or an object with the same `call` method.

    The type of the batch has the sharding of `batch_spec`. The type of a parameter has the parameter's sharding over
    axes that are not data axes. If the trace fails, for example at a lookup that does not say how its result is
    sharded, the loss is called on Auto axes.
    """

    config: Config
    layout: Layout
    loss: Any

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Any:
        """Call the loss on arguments whose types name shardings. Wrap in `Typed` each result whose type names one."""
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
                traced = TypedFunction(flat, mesh, arrays, specs, self.config.data.batch)
            except Exception as error:  # the caller's function can raise any error
                try:
                    return self.loss.call(*given)
                except Exception as on_auto:  # Python prints both errors.
                    raise error from on_auto
            pairs = zip(traced(*arrays), traced.out_specs, strict=True)
            results = [Typed(x, spec) if axes_of(spec) else x for x, spec in pairs]
            return jax.tree.unflatten(jax.tree.structure(traced.shape), results)

    def _types(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> tuple:
        """Return, for each leaf of the arguments, the spec in the type of the leaf on the caller's mesh."""
        config, mesh = self.config, typed_mesh(self.config.user_mesh)
        named = lambda spec: explicit_part(spec, mesh)
        replicated = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        of_params = self.layout.treedef.unflatten([named(leaf.other_spec) for leaf in self.layout.params])
        rows = PartitionSpec(spec_entry(config.data.batch))
        specs = jax.tree.map(lambda _: rows, batch) if config.batch_spec is None else config.batch_spec.over(batch)
        specs = jax.tree.map(named, specs, is_leaf=is_spec)
        divided = jax.tree.map(lambda spec, x: is_divided(config, spec, x), specs, batch, is_leaf=is_spec)
        if not all(jax.tree.leaves(divided)):
            specs = replicated(batch)
        of_args = jax.tree.map(lambda x: named(x.spec) if is_typed(x) else PartitionSpec(), args, is_leaf=is_typed)
        return of_params, replicated(mutable), specs, of_args


def on_one_device(config: Config) -> Config:
    """Return a copy of `config` for a trace on one device. A mesh with Explicit axes keeps its axes, with size 1."""
    mesh = config.user_mesh
    if not mesh.explicit_axes:
        return config
    one = mesh.devices.ravel()[:1].reshape((1,) * mesh.devices.ndim)
    return dataclasses.replace(config, user_mesh=Mesh(one, mesh.axis_names, axis_types=mesh.axis_types))


def is_divided(config: Config, spec: PartitionSpec, x: Any) -> bool:
    """Return whether the mesh axes of a spec divide the dims of `x` evenly. In device view, `x` is a device's part."""
    parts = [config.data.size(entry_axes(entry)) for entry in spec]
    return len(parts) <= np.ndim(x) and all(n % k == 0 for n, k in zip(np.shape(x), parts, strict=False))


def typed_mesh(mesh: Mesh) -> AbstractMesh:
    """Return the caller's mesh, for use in the types of arrays. Axes that are Manual in the context stay Manual."""
    return _with_manual(mesh.abstract_mesh, jax.sharding.get_abstract_mesh().manual_axes)


class TypedFunction:
    """A function of arrays that was traced on a mesh with Explicit axes. It is evaluated on the context's mesh.

    Of `values`, only shapes and types are read. `specs` are the shardings of `values` in the trace, and `axes` are the
    mesh axes that divide the rows of the batch. The attribute `shape` is the tree of the shapes of the results.
    """

    def __init__(self, fn: Callable, mesh: AbstractMesh, values: Sequence, specs: Sequence, axes: Sequence[str]):
        avals = [_typed(jax.typeof(x), mesh, tuple(spec)) for x, spec in zip(values, specs, strict=True)]
        with jax.sharding.use_abstract_mesh(mesh):
            closed, self.shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
        self._jaxpr, self._consts = compat.opened(closed)
        self.out_specs = [spec_of(atom.aval) for atom in self._jaxpr.outvars]
        constrains = any(map(_names_sharding, jaxprs.equations(self._jaxpr)))
        self._evaluation = _TypedEvaluation(mesh, frozenset(axes), constrains, {})

    def __call__(self, *values: Array) -> list[Array]:
        # Axes that were Manual in the trace are Manual, others Auto.
        return self._evaluation.evaluate(self._jaxpr, to_auto(list(self._consts)), values)


@dataclasses.dataclass(frozen=True)
class _TypedEvaluation:
    """One evaluation of a jaxpr with Explicit types."""

    mesh: AbstractMesh  # the mesh that the types name
    axes: frozenset[str]  # the mesh axes that divide the rows of the batch
    constrains: bool  # whether a type that divides rows becomes a constraint; false if no equation names a sharding
    known: dict  # a cache of inner jaxprs that were traced again, so that equal layers stay one program

    def evaluate(self, jaxpr: Any, consts: Sequence, values: Sequence) -> list:
        return jaxprs.evaluate(jaxpr, consts, values, self._rule)

    def _rule(self, eqn: Any, values: Sequence) -> list:
        name = compat.name_of(eqn)
        if name == "reshard":
            aval = eqn.outvars[0].aval
            # If the result has Auto axes, as on entry to `auto_axes`, a type that names no axes requires nothing.
            return [self._constrained(values[0], aval, replicates=bool(aval.sharding.mesh.explicit_axes))]
        if name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding):
            return [self._constrained(values[0], eqn.outvars[0].aval, tuple(_divided(eqn.params["sharding"].spec)))]
        rule = _RULES.get(name)
        results = rule(self, eqn, values) if rule else compat.evaluate_one(self.untyped(eqn), values)
        named = _names_sharding(eqn)
        given = {_type(atom.aval) for atom in jaxprs.variables_in(eqn.invars)}
        has_rows = lambda aval: self.constrains and not self.axes.isdisjoint(axes_of(spec_of(aval)))
        return [
            self._constrained(x, var.aval) if named or (has_rows(var.aval) and _type(var.aval) not in given) else x
            for var, x in zip(eqn.outvars, results, strict=True)
        ]

    def _constrained(self, x: Array, aval: Any, others: tuple | None = None, *, replicates: bool = False) -> Array:
        """Constrain a value to be sharded as its type says, over the axes that are Auto on the mesh of the context.

        `others` are the entries of a sharding constraint, which may name axes that are Auto on the caller's mesh. With
        `replicates`, a type without axes becomes a constraint, too. `x` is None if the value is dropped.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if x is None or not mesh.auto_axes or mesh.size == 1:
            return x
        free = PartitionSpec.UNCONSTRAINED if set(mesh.auto_axes) - set(self.mesh.explicit_axes) else None
        others = (free,) * x.ndim if others is None else (*others, *[None] * (x.ndim - len(others)))
        spec = [self._entry(*entries, mesh) for entries in zip(spec_of(aval), others, strict=True)]
        says = [entry is not PartitionSpec.UNCONSTRAINED and (replicates or entry is not None) for entry in spec]
        if not any(says):
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def _entry(self, typed: Any, other: Any, mesh: AbstractMesh) -> Any:
        axes = tuple(axis for axis in dict.fromkeys((*entry_axes(typed), *entry_axes(other))) if axis in mesh.auto_axes)
        return axes or (other if other is PartitionSpec.UNCONSTRAINED else None)

    def untyped(self, eqn: Any) -> Any:
        params = {name: self._untyped_param(value) for name, value in eqn.params.items()}
        params |= {name: None for name in _SHARDINGS if isinstance(params.get(name), NamedSharding)}
        if "ctx_mesh" in params:
            params["ctx_mesh"] = rebinding.mesh_of_calls()
        return rebinding.in_force(eqn.replace(params=params))

    def _untyped_param(self, value: Any) -> Any:
        if compat.is_jaxpr(value):
            return self._untyped_jaxpr(value)
        if isinstance(value, NamedSharding):
            return NamedSharding(with_auto_axes(value.mesh), _divided(value.spec), memory_kind=value.memory_kind)
        if isinstance(value, Mesh | AbstractMesh):
            return with_auto_axes(value)
        if isinstance(value, jax.core.ShapedArray):
            return _typed(value, jax.sharding.get_abstract_mesh())
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._untyped_param, value))
        if type(value) in (tuple, list):
            return type(value)(map(self._untyped_param, value))
        return value

    def _untyped_jaxpr(self, closed: Any) -> Any:
        jaxpr, consts = compat.opened(closed)
        mesh = jax.sharding.get_abstract_mesh()
        key = (id(closed), mesh)
        if key not in self.known:
            run = lambda *values: self.evaluate(jaxpr, to_auto(list(consts)), values)
            again = jax.make_jaxpr(run)(*(_typed(var.aval, mesh) for var in jaxpr.invars))
            self.known[key] = closed, rebinding.like(again, closed)  # keeps `closed` alive, so that its id stays unique
        return self.known[key][1]

    def _shard_map(self, eqn: Any, values: Sequence) -> Sequence:
        jaxpr, consts = compat.opened(eqn.params["jaxpr"])
        inner = dataclasses.replace(self, mesh=_with_manual(self.mesh, eqn.params["newly_manual_axes"]), known={})
        run = lambda *values: tuple(inner.evaluate(jaxpr, to_auto(list(consts)), values))
        return rebinding.shard_map_of(eqn, run, mesh=jax.sharding.get_abstract_mesh())(*values)

    def _custom_rule(self, eqn: Any, values: Sequence) -> Sequence:
        """Evaluate a call of a `jax.custom_jvp` or `jax.custom_vjp`. Its derivative is traced when it is needed."""
        params = compat.params_of(eqn)
        count = params["num_consts"]
        consts, args = values[:count], values[count:]
        jaxpr, bound = compat.opened(params["call_jaxpr"])
        value = lambda *xs: self.evaluate(jaxpr, bound, (*consts, *xs))
        value.__name__ = jaxpr.debug_info.func_name
        rule = _DerivativeRule(self, eqn, consts)
        with_rule = rule.jvp_of if compat.name_of(eqn) == "custom_jvp_call" else rule.vjp_of
        return with_rule(value)(*args)


_RULES = {
    "shard_map": _TypedEvaluation._shard_map,
    # The parameter of `jax_remat3` is an object whose jaxpr cannot be replaced.
    "checkpoint": lambda self, eqn, values: jaxprs.evaluate_remat(eqn, values, self.evaluate),
    "name": lambda self, eqn, values: [checkpoint_name(values[0], compat.params_of(eqn)["name"])],
    "custom_jvp_call": _TypedEvaluation._custom_rule,
    "custom_vjp_call": _TypedEvaluation._custom_rule,
}


class _DerivativeRule:
    """The derivative of an equation that calls a `jax.custom_jvp` or `jax.custom_vjp`, traced on the caller's mesh.

    `consts`, the equation's first operands, are values that the function closes over. They have no derivative.
    """

    def __init__(self, evaluation: _TypedEvaluation, eqn: Any, consts: Sequence):
        self.evaluation, self.eqn, self.consts = evaluation, eqn, consts
        self.types, self.outs = [atom.aval for atom in eqn.invars], [var.aval for var in eqn.outvars]
        self.args = self.types[len(consts) :]

    def jvp_of(self, value: Callable) -> Callable:
        def both(operands, tangents):
            fn, args = self._opened(operands)
            out, found = jax.jvp(fn, args, _with_zeros(self.args, tangents))
            return out, _differentiable(found)

        def jvp(primals, tangents):
            types = self.types, _differentiable(self.args)
            values = [*self.consts, *primals], _differentiable(tangents)
            (out, found), _ = self._run(both, types, values)
            return out, _with_zeros(self.outs, found)

        made = jax.custom_jvp(value)
        made.defjvp(jvp)
        return made

    def vjp_of(self, value: Callable) -> Callable:
        kept: dict[str, Any] = {}  # the types of the residuals in the pullback, set while the forward pass is traced

        def forward(operands):
            fn, args = self._opened(operands)
            return jax.vjp(fn, *args)

        def backward(pull, cotangents):
            return _differentiable(pull(_with_zeros(self.outs, cotangents)))

        def fwd(*values):
            (out, pull), (_, kept["pull"]) = self._run(forward, (self.types,), [*self.consts, *values])
            return out, pull

        def bwd(pull, cotangents):
            types = kept["pull"], _differentiable(self.outs)
            found, _ = self._run(backward, types, (pull, _differentiable(cotangents)))
            return tuple(_with_zeros(self.args, found))

        made = jax.custom_vjp(value)
        made.defvjp(fwd, bwd)
        return made

    def _opened(self, operands: Sequence) -> tuple[Callable, Sequence]:
        consts, args = operands[: len(self.consts)], operands[len(self.consts) :]
        return lambda *xs: compat.evaluate_one(self.eqn, (*consts, *xs)), args

    def _run(self, fn: Callable, types: tuple, values: PyTree) -> tuple[Any, Any]:
        """Trace a function on the caller's mesh, evaluate it, and return its results and their types."""
        with jax.sharding.use_abstract_mesh(self.evaluation.mesh):
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*types)
        (jaxpr, consts), tree = compat.opened(closed), jax.tree.structure(shape)
        results = self.evaluation.evaluate(jaxpr, to_auto(list(consts)), jax.tree.leaves(values))
        return tree.unflatten(results), tree.unflatten([atom.aval for atom in jaxpr.outvars])


def spec_of(aval: Any) -> PartitionSpec:
    """Return the sharding that the type `aval` names. A type without a sharding is replicated."""
    sharding = getattr(aval, "sharding", None)
    return _divided(sharding.spec) if isinstance(sharding, NamedSharding) else PartitionSpec()


def _divided(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec.partitions)


def _type(aval: Any) -> tuple:
    return getattr(aval, "shape", ()), spec_of(aval)


def _typed(aval: Any, mesh: AbstractMesh, spec: tuple = ()) -> Any:
    if not isinstance(aval, jax.core.ShapedArray):
        return aval
    entries = (*spec, *[None] * (aval.ndim - len(spec)))
    return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*entries)))


def _with_manual(mesh: AbstractMesh, manual: Sequence[str]) -> AbstractMesh:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh.update(axis_types=tuple(AxisType.Manual if axis in manual else kind for axis, kind in kinds))


def _differentiable(values: Sequence) -> list:
    """Replace types without tangents by None (no leaf of a tree). Also accepts tangents or cotangents of the types."""
    return [x if jnp.issubdtype(x.dtype, jnp.inexact) else None for x in values]


def _with_zeros(avals: Sequence, tangents: Sequence) -> list:
    """Undo `_differentiable` for tangents or cotangents: insert zeros for the types without tangents."""
    pairs = zip(avals, tangents, strict=True)
    return [np.zeros(aval.shape, jax.dtypes.float0) if x is None else x for aval, x in pairs]


def _names_sharding(eqn: Any) -> bool:
    if eqn.primitive.name == "reshard":
        return True
    named = [eqn.params.get(name) for name in _SHARDINGS]
    return any(isinstance(sharding, NamedSharding) and bool(axes_of(_divided(sharding.spec))) for sharding in named)
