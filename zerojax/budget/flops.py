"""Count an equation's FLOPs like XLA's cost analysis, as two per multiply-add and otherwise one per element."""

from __future__ import annotations

from typing import Any

from zerojax import compat, jaxprs
from zerojax.primitives import Kind

# FLOPs of the Threefry rounds per 32-bit word of random bits.
_RANDOM_BITS = 100


def flops_of(eqn: Any) -> int:
    """Return the FLOPs of one equation. A loop, a conditional or a call has the FLOPs of the equations inside it."""
    name, facts = compat.name_of(eqn), jaxprs.facts(eqn)
    if name == "dot_general":
        return jaxprs.dot_flops(eqn)
    if name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval
        return 2 * _elements(eqn.outvars[0]) * kernel.size // max(kernel.shape[features], 1)
    if name == "cond":
        return max(_flops_inside(compat.opened(branch)[0]) for branch in eqn.params["branches"])
    if (loop := compat.loop_of(eqn)) is not None:
        return loop.length * _flops_inside(compat.opened(loop.body)[0])
    if inner := compat.inner_jaxprs(eqn):
        return sum(map(_flops_inside, inner))
    if facts.is_free:
        return 0
    if facts.draws:
        return _RANDOM_BITS * sum(map(_elements, eqn.outvars))
    if facts.kind in (Kind.REDUCTION, Kind.ALONG, Kind.WINDOW):
        return sum(_elements(atom) for atom in eqn.invars)
    return sum(map(_elements, eqn.outvars))


def bytes_written(eqn: Any) -> int:
    return sum(jaxprs.nbytes(var) for var in eqn.outvars if is_array(var))


def is_array(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and hasattr(dtype, "itemsize") and hasattr(atom.aval, "size") and not compat.is_ref(atom)


def _flops_inside(jaxpr: Any) -> int:
    return sum(map(flops_of, jaxpr.eqns))


def _elements(atom: Any) -> int:
    return getattr(atom.aval, "size", 0)
