"""Merge equations of a loss that compute the same value. The planner calls `merged` before it divides the loss.

A loss that calls its model twice on the same input has each equation twice. XLA would merge the two, but it cannot do
so after the engine has put different barriers around the gathers of the two uses.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import WEIGHT_ARITHMETIC
from zerojax.layout.leaf import replace_items

_APART = frozenset({"optimization_barrier", "rng_uniform"})


def merged(jaxpr: Any, params: Collection) -> Any:
    """Merge the equations that compute activations from the same operands.

    Equations on parameters alone are not merged, because segments repeat them anyway. Equations that depend on no
    parameter are not merged either, because computing a mask or a row of zeros twice is cheaper than keeping it.
    `params` are the arguments that are sharded parameters.
    """
    same: dict = {}  # a variable -> the first variable with the same value
    earlier: dict = {}  # an equation's key, without the functions in it -> the earlier equations that have this key
    weights, activations = set(params), set()
    eqns: list = []
    taken: dict = {}  # a result of an equation that is left out -> the variable to read instead
    for eqn in jaxpr.eqns:
        reads = jaxprs.variables_in(eqn.invars)
        if _is_weight(eqn, weights):
            weights.update(eqn.outvars)
        elif not activations.isdisjoint(reads) or not weights.isdisjoint(reads):
            activations.update(eqn.outvars)
        alike = None if _is_apart(eqn) else _first(eqn, same, earlier)
        if alike is not None:
            pairs = list(zip(eqn.outvars, alike.outvars, strict=True))
            same.update(pairs)
            if activations.issuperset(eqn.outvars):
                taken.update(pairs)
                continue
        eqns.append(eqn)
    if not taken:
        return jaxpr
    put = lambda atoms: [atom if compat.is_literal(atom) else taken.get(atom, atom) for atom in atoms]
    eqns = [eqn.replace(invars=put(eqn.invars)) for eqn in eqns]
    return compat.part_of(jaxpr, eqns, jaxpr.invars, put(jaxpr.outvars))


def _first(eqn: Any, same: Mapping, earlier: dict) -> Any:
    """Return the earlier equation with the same results as `eqn`, or add `eqn` to `earlier` and return None."""
    candidates = earlier.setdefault(jaxprs.equation_key(eqn, same, functions=False), [])
    for candidate in candidates:
        pairs = zip(eqn.outvars, candidate.outvars, strict=True)
        if any(compat.is_dropped(there) and not compat.is_dropped(here) for here, there in pairs):
            continue
        if jaxprs.equation_key(eqn, same) == jaxprs.equation_key(candidate, same):
            return candidate
        # The equations differ only in functions, such as derivative rules. Each call of `jax.nn.relu` makes a new rule.
        # So the derivatives are traced and compared.
        if (pulled := _pulled(eqn)) is not None and pulled == _pulled(candidate):
            return candidate
    candidates.append(eqn)
    return None


def _pulled(eqn: Any) -> Any:
    """Return a hashable form of the derivative of `eqn`, or None if `eqn` has no derivative."""
    is_float = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    reads = [v for v in eqn.invars if not compat.is_literal(v)]
    moving = [i for i, v in enumerate(reads) if is_float(v)]

    def run(values, cotangents):
        def results(floats):
            every = iter(replace_items(values, moving, floats))
            operands = [v.val if compat.is_literal(v) else next(every) for v in eqn.invars]
            body = compat.called(eqn)
            done = jaxprs.inline_calls(*compat.opened(body), *operands) if body else compat.evaluate_one(eqn, operands)
            return [x for v, x in zip(eqn.outvars, done, strict=True) if not compat.is_dropped(v) and is_float(v)]

        return jax.vjp(results, [values[i] for i in moving])[1](cotangents)

    wanted = [v.aval for v in eqn.outvars if not compat.is_dropped(v) and is_float(v)]
    if not moving or not wanted:
        return None
    try:
        closed = jax.make_jaxpr(run)([v.aval for v in reads], wanted)
    except Exception:  # The user's rule failed, or the equation has no derivative.
        return None
    jaxpr, consts = compat.opened(closed)
    # A rule often calls its function once more, for a result that the derivative does not read.
    alive = jaxpr.replace(eqns=jaxprs.alive(jaxpr))
    return jaxprs.signature(alive), tuple(map(id, consts))


def _is_apart(eqn: Any) -> bool:
    """Return whether an equation must not be merged, for example because its result differs from call to call."""
    return bool(eqn.effects) or eqn.primitive.name in _APART or any(map(compat.is_ref, eqn.invars))


def _is_weight(eqn: Any, weights: Collection) -> bool:
    """Return whether an equation reads weights alone, or changes a weight element by element (a mask)."""
    reads = jaxprs.variables_in(eqn.invars)
    if reads and all(v in weights for v in reads):
        return True
    shapes = [v.aval.shape for v in reads if v in weights]
    return eqn.primitive.name in WEIGHT_ARITHMETIC and eqn.outvars[0].aval.shape in shapes
