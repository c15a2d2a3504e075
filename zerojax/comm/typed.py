"""Functions written for Explicit axes (`out_sharding=`, `reshard`, `typeof`), evaluated on a mesh of Auto axes.

Such a function is traced once on the caller's mesh, where the type of every array says how it is sharded. Its jaxpr is
then evaluated where the axes are Auto. Equations lose the shardings among their parameters, and types become sharding
constraints: where an equation names its sharding, and where a type divides rows and no operand has that type. Values of
parameters alone are full over the data axes, so they get no constraint and stay what `gather` recognises. A function
that names no sharding gets no constraint: it is then the program that tracing on the Auto mesh gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax import compat, jaxprs
from zerojax.comm.explicit import to_auto
from zerojax.config import with_auto_axes
from zerojax.config.data_mesh import axes_of, entry_axes

if TYPE_CHECKING:
    from jaxtyping import Array

# What states how its result is sharded, and does nothing else.
_RESHARDS = frozenset({"reshard", "mesh_cast"})
_SHARDINGS = ("out_sharding", "sharding")


def typed_mesh(mesh: Mesh) -> AbstractMesh:
    """Return the caller's mesh as array types name it here. Axes that are Manual here stay Manual."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh.abstract_mesh.update(axis_types=tuple(AxisType.Manual if a in manual else kind for a, kind in kinds))


@dataclasses.dataclass(frozen=True)
class TypedFunction:
    """A function of arrays that was traced where axes are Explicit.

    Attributes:
        mesh: The mesh it was traced on.
        closed: Its jaxpr.
        axes: The mesh axes that the rows are divided over.
    """

    mesh: AbstractMesh
    closed: Any
    axes: frozenset[str]

    @classmethod
    def trace(
        cls, fn: Callable, mesh: AbstractMesh, values: Sequence[Array], specs: Sequence[PartitionSpec], axes: Sequence
    ) -> tuple[TypedFunction, Any]:
        """Trace a function on a mesh with Explicit axes.

        Args:
            fn: A function of arrays.
            mesh: The mesh; Manual axes are allowed.
            values: Arrays, of any mesh: their shapes are read.
            specs: How each of them is sharded.
            axes: The mesh axes that the rows are divided over.

        Returns:
            The traced function, and a tree of the shapes it returns.
        """
        avals = [_typed(jax.typeof(x), mesh, tuple(spec)) for x, spec in zip(values, specs, strict=True)]
        with jax.sharding.use_abstract_mesh(mesh):
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
        return cls(mesh, closed, frozenset(axes)), shape

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """Return how each result is sharded."""
        return [spec_of(atom.aval) for atom in compat.opened(self.closed)[0].outvars]

    def __call__(self, *values: Array) -> list[Array]:
        """Evaluate it on the mesh in force, whose axes are Auto, or Manual where they were."""
        jaxpr, consts = compat.opened(self.closed)
        constrains = any(_names_shardings(inner) for inner in _nested(jaxpr))
        evaluation = _Evaluation(self.mesh, self.axes, constrains, {})
        return evaluation.evaluate(jaxpr, to_auto(list(consts)), values)


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """One evaluation of a typed jaxpr.

    Attributes:
        mesh: What its types name.
        axes: The mesh axes that the rows are divided over.
        constrains: Whether types become constraints also where no equation names one.
        known: Inner jaxprs that were traced again, so that equal layers stay one program.
    """

    mesh: AbstractMesh
    axes: frozenset[str]
    constrains: bool
    known: dict

    def evaluate(self, jaxpr: Any, consts: Sequence, values: Sequence) -> list:
        """Evaluate a jaxpr with Explicit types."""
        return jaxprs.evaluate(jaxpr, consts, values, self._rule)

    def _rule(self, eqn: Any, values: Sequence) -> list:
        name = eqn.primitive.name
        if name in _RESHARDS:
            aval = eqn.outvars[0].aval
            # On the way to Auto axes, as into `auto_axes`, a type without axes says nothing.
            return [self._constrained(values[0], aval, replicates=bool(aval.sharding.mesh.explicit_axes))]
        if name == "sharding_constraint" and isinstance(eqn.params["sharding"], NamedSharding):
            return [self._constrained(values[0], eqn.outvars[0].aval, tuple(_divided(eqn.params["sharding"].spec)))]
        results = _RULES.get(name, _Evaluation._evaluate_one)(self, eqn, values)
        named = _names_sharding(eqn)
        given = {_type(atom.aval) for atom in jaxprs.variables_in(eqn.invars)}
        return [
            self._constrained(x, var.aval) if named or self._is_news(var.aval, given) else x
            for var, x in zip(eqn.outvars, results, strict=True)
        ]

    def _is_news(self, aval: Any, given: set) -> bool:
        """Return whether a type says how rows are divided, and no operand has said so."""
        return self.constrains and not self.axes.isdisjoint(axes_of(spec_of(aval))) and _type(aval) not in given

    def _constrained(self, x: Array, aval: Any, others: tuple | None = None, *, replicates: bool = False) -> Array:
        """Constrain a value to be sharded as its type says, as far as the mesh in force has its axes.

        Args:
            x: The value; None where it is dropped.
            aval: Its type.
            others: What a constraint says of the axes that are Auto on the caller's mesh too; None: nothing.
            replicates: Whether a type that names no axis is a constraint too.
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
        """Return what a type and a constraint say about one dim, together."""
        axes = tuple(axis for axis in dict.fromkeys((*entry_axes(typed), *entry_axes(other))) if axis in mesh.auto_axes)
        return axes or (other if other is PartitionSpec.UNCONSTRAINED else None)

    def _evaluate_one(self, eqn: Any, values: Sequence) -> list:
        return compat.evaluate_one(self.untyped(eqn), values)

    def untyped(self, eqn: Any) -> Any:
        """Return an equation without the shardings among its parameters."""
        params = {name: self._untyped_param(value) for name, value in eqn.params.items()}
        params |= {name: None for name in _SHARDINGS if isinstance(params.get(name), NamedSharding)}
        if "ctx_mesh" in params:
            params["ctx_mesh"] = compat.mesh_of_calls()
        return compat.in_force(eqn.replace(params=params))

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
        """Trace an inner jaxpr again where its values are."""
        jaxpr, consts = compat.opened(closed)
        mesh = jax.sharding.get_abstract_mesh()
        key = (id(closed), mesh)
        if key not in self.known:
            run = lambda *values: self.evaluate(jaxpr, to_auto(list(consts)), values)
            again = jax.make_jaxpr(run)(*(_typed(var.aval, mesh) for var in jaxpr.invars))
            self.known[key] = closed, compat.like(again, closed)  # `closed` lives as long as its id is a key
        return self.known[key][1]

    def _shard_map(self, eqn: Any, values: Sequence) -> Sequence:
        """Evaluate `jax.shard_map` over the mesh in force."""
        params, manual = eqn.params, eqn.params["newly_manual_axes"]
        jaxpr, consts = compat.opened(params["jaxpr"])
        inner = dataclasses.replace(self, mesh=_with_manual(self.mesh, manual), known={})
        return jax.shard_map(
            lambda *values: tuple(inner.evaluate(jaxpr, to_auto(list(consts)), values)),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(manual),
            check_vma=params["check_vma"],
        )(*values)

    def _custom_rule(self, eqn: Any, values: Sequence) -> Sequence:
        """Evaluate a function with its own derivatives. They are traced on the caller's mesh too, when they are needed.

        What the function closes over has no derivative, as in JAX.
        """
        count = eqn.params["num_consts"]
        consts, given = values[:count], values[count:]
        jaxpr, bound = compat.opened(eqn.params["call_jaxpr"])
        avals = [atom.aval for atom in eqn.invars]
        whole = lambda *xs: compat.evaluate_one(eqn, xs)
        rule = _Rule(self, whole, avals, [var.aval for var in eqn.outvars], consts)
        value = lambda *xs: self.evaluate(jaxpr, bound, (*consts, *xs))
        value.__name__ = jaxpr.debug_info.func_name
        if eqn.primitive.name == "custom_jvp_call":
            return rule.forward(value)(*given)
        return rule.backward(value)(*given)


_RULES = {
    "shard_map": _Evaluation._shard_map,
    "custom_jvp_call": _Evaluation._custom_rule,
    "custom_vjp_call": _Evaluation._custom_rule,
}


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The derivative of one equation, traced on the caller's mesh.

    Attributes:
        evaluation: The evaluation that it belongs to.
        fn: Evaluates the equation where the axes are Explicit.
        avals: Types of its operands, those first that the function closes over.
        outs: Types of its results.
        consts: Values of what the function closes over.
    """

    evaluation: _Evaluation
    fn: Callable
    avals: list
    outs: list
    consts: Sequence

    def forward(self, value: Callable) -> Callable:
        """Call a `jax.custom_jvp` of the values that the function does not close over."""
        closed_over = len(self.consts)
        inexact = [i for i, aval in enumerate(self.avals) if i >= closed_over and _has_tangent(aval)]
        tangents_out = [i for i, aval in enumerate(self.outs) if _has_tangent(aval)]

        def both(*values):
            primals, tangents = values[: len(self.avals)], dict(zip(inexact, values[len(self.avals) :], strict=True))
            moving = [primals[i] for i in inexact]
            fn = lambda *xs: self.fn(*_merged(primals, inexact, xs))
            out, tangent = jax.jvp(fn, moving, [tangents[i] for i in inexact])
            return [*out, *(tangent[i] for i in tangents_out)]

        def jvp(primals, tangents):
            moving = [tangents[i - closed_over] for i in inexact]
            types = [*self.avals, *(self.avals[i] for i in inexact)]
            found = self._on_auto(both, types, [*self.consts, *primals, *moving])
            out, rest = found[: len(self.outs)], dict(zip(tangents_out, found[len(self.outs) :], strict=True))
            zero = lambda aval: np.zeros(aval.shape, jax.dtypes.float0)
            return out, [rest[i] if i in rest else zero(aval) for i, aval in enumerate(self.outs)]

        made = jax.custom_jvp(value)
        made.defjvp(jvp)
        return made

    def backward(self, value: Callable) -> Callable:
        """Call a `jax.custom_vjp` of the values that the function does not close over."""
        closed_over = len(self.consts)
        inexact = [i for i, aval in enumerate(self.avals) if i >= closed_over and _has_tangent(aval)]
        kept: list = []  # the structure of what the forward pass keeps, and its types

        def forward(*values):
            fn = lambda *xs: self.fn(*_merged(values, inexact, xs))
            out, pull = jax.vjp(fn, *(values[i] for i in inexact))
            residuals, tree = jax.tree.flatten(pull)
            kept[:] = [tree]
            return [*out, *residuals]

        def fwd(*values):
            traced = self._traced(forward, self.avals)
            types = [atom.aval for atom in compat.opened(traced.closed)[0].outvars][len(self.outs) :]
            found = self._run(traced, [*self.consts, *values])
            kept[1:] = [types]
            return found[: len(self.outs)], found[len(self.outs) :]

        def bwd(residuals, cotangents):
            tree, types = kept
            places = [i for i, aval in enumerate(self.outs) if _has_tangent(aval)]

            def pull(*values):
                given = dict(zip(places, values[len(types) :], strict=True))
                zero = lambda aval: np.zeros(aval.shape, jax.dtypes.float0)
                full = [given[i] if i in given else zero(aval) for i, aval in enumerate(self.outs)]
                return list(jax.tree.unflatten(tree, values[: len(types)])(full))

            types_in = [*types, *(self.outs[i] for i in places)]
            found = self._on_auto(pull, types_in, [*residuals, *(cotangents[i] for i in places)])
            grads = dict(zip(inexact, found, strict=True))
            return tuple(grads.get(i) for i in range(closed_over, len(self.avals)))

        made = jax.custom_vjp(value)
        made.defvjp(fwd, bwd)
        return made

    def _traced(self, fn: Callable, types: Sequence) -> TypedFunction:
        with jax.sharding.use_abstract_mesh(self.evaluation.mesh):
            closed = jax.make_jaxpr(fn)(*types)
        return TypedFunction(self.evaluation.mesh, closed, self.evaluation.axes)

    def _run(self, traced: TypedFunction, values: Sequence) -> list:
        jaxpr, consts = compat.opened(traced.closed)
        return self.evaluation.evaluate(jaxpr, to_auto(list(consts)), values)

    def _on_auto(self, fn: Callable, types: Sequence, values: Sequence) -> list:
        """Evaluate a function, traced with these types on the caller's mesh, on values on Auto axes."""
        return self._run(self._traced(fn, types), values)


def spec_of(aval: Any) -> PartitionSpec:
    """Return how a type says that a value is sharded; replicated if it says nothing."""
    sharding = getattr(aval, "sharding", None)
    return _divided(sharding.spec) if isinstance(sharding, NamedSharding) else PartitionSpec()


def _divided(spec: PartitionSpec) -> PartitionSpec:
    """Return what a spec says about each dim, without axes over which a sum is still pending (`unreduced`)."""
    return PartitionSpec(*spec.partitions)


def _type(aval: Any) -> tuple:
    return getattr(aval, "shape", ()), spec_of(aval)


def _typed(aval: Any, mesh: AbstractMesh, spec: tuple = ()) -> Any:
    """Return a type on a mesh."""
    if not isinstance(aval, jax.core.ShapedArray):
        return aval
    entries = (*spec, *[None] * (aval.ndim - len(spec)))
    return aval.update(sharding=NamedSharding(mesh, PartitionSpec(*entries)))


def _with_manual(mesh: AbstractMesh, manual: Sequence[str]) -> AbstractMesh:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return mesh.update(axis_types=tuple(AxisType.Manual if axis in manual else kind for axis, kind in kinds))


def _has_tangent(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _merged(values: Sequence, places: Sequence[int], others: Sequence) -> list:
    """Return the values, with other values in some places."""
    merged = dict(enumerate(values)) | dict(zip(places, others, strict=True))
    return [merged[i] for i in range(len(values))]


def _names_sharding(eqn: Any) -> bool:
    """Return whether an equation names the sharding of its result."""
    if eqn.primitive.name in _RESHARDS:
        return True
    named = [eqn.params.get(name) for name in _SHARDINGS]
    return any(isinstance(sharding, NamedSharding) and bool(axes_of(_divided(sharding.spec))) for sharding in named)


def _names_shardings(jaxpr: Any) -> bool:
    return any(map(_names_sharding, jaxpr.eqns))


def _nested(jaxpr: Any) -> Iterator[Any]:
    """Return a jaxpr and the jaxprs inside it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in compat.inner_jaxprs(eqn):
            yield from _nested(inner)
