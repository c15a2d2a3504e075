"""Say whether equations or jaxprs compute the same, and whether they have effects."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerojax import compat


def signature(jaxpr: Any, *, functions: bool = True) -> Any:
    """Return a hashable form of a jaxpr, or None if it has effects. Jaxprs with equal signatures compute the same.

    Constants and functions (derivative rules, callbacks) are compared by identity. If `functions` is False, functions
    are ignored.
    """
    number = {var: i for i, var in enumerate([*compat.constvars_of(jaxpr), *jaxpr.invars])}
    avals, eqns = [var.aval for var in number], []
    for eqn in jaxpr.eqns:
        if eqn.effects and not _of_refs(jaxpr):
            return None
        eqns.append(_of_equation(eqn, [_of_operand(atom, number) for atom in eqn.invars], functions))
        for var in eqn.outvars:
            number[var] = len(avals)
            avals.append(var.aval)
    outs = tuple(_of_operand(atom, number) for atom in jaxpr.outvars)
    return len(jaxpr.invars), tuple(avals), tuple(eqns), outs


def equation_key(eqn: Any, same: Mapping, *, functions: bool = True) -> Any:
    """Return a hashable form of an equation. Equations of one jaxpr with equal keys compute the same.

    `same` maps variables to other variables with the same value. `functions` is as in `signature`.
    """
    operands = [literal_key(v) if compat.is_literal(v) else same.get(v, v) for v in eqn.invars]
    return _of_equation(eqn, operands, functions), tuple(v.aval for v in eqn.outvars)


def literal_key(atom: Any) -> Any:
    return atom.aval, np.asarray(atom.val).tobytes()


def _of_equation(eqn: Any, operands: Sequence, functions: bool) -> tuple:
    params = tuple((name, _of_param(value, functions)) for name, value in sorted(compat.params_of(eqn).items()))
    return eqn.primitive, compat.name_of(eqn), eqn.ctx, params, *operands


def _of_operand(atom: Any, number: dict) -> Any:
    return literal_key(atom) if compat.is_literal(atom) else number[atom]


def _of_param(value: Any, functions: bool) -> Any:
    if compat.is_jaxpr(value):
        jaxpr, consts = compat.opened(value)
        inner = signature(jaxpr, functions=functions)
        return id(value) if inner is None else inner, tuple(map(id, consts))
    if isinstance(value, list | tuple):
        return type(value), tuple(_of_param(x, functions) for x in value)
    if isinstance(value, dict):
        return tuple((key, _of_param(x, functions)) for key, x in value.items())
    if isinstance(value, float):
        return value.hex()  # 0.0 is not -0.0
    if not functions and (callable(value) or hasattr(value, "call_wrapped")):
        return "function"
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def has_effects(jaxpr: Any) -> bool:
    """Return whether an equation in a jaxpr, or in a jaxpr inside it, has an effect or uses a ref.

    A kernel (a Pallas call) does not count: its body writes to refs, but the call takes arrays and returns arrays.
    """
    uses_ref = lambda eqn: any(map(compat.is_ref, [*eqn.invars, *eqn.outvars]))
    return any(
        eqn.effects
        or uses_ref(eqn)
        or any(has_effects(inner) for inner in compat.inner_jaxprs(eqn) if not _of_refs(inner))
        for eqn in jaxpr.eqns
    )


def _of_refs(jaxpr: Any) -> bool:
    """Return whether a jaxpr takes refs. If its equation takes no refs, such a jaxpr is a kernel's body."""
    return any(map(compat.is_ref, jaxpr.invars))
