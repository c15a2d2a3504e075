"""Merge equations of a loss that compute the same value. The planner calls `merged` before it divides the loss.

A loss that calls its model twice on the same input has each equation twice. The calls may differ in their derivatives:
one may be inside of a `jax.grad`, or stop a gradient. XLA would merge equal equations, but it cannot do so after the
engine has put different barriers around the gathers of the two uses.
"""

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import compat, jaxprs, primitives, signatures
from zerojax.gather.parts import both_passes


def merged(jaxpr: Any, params: Collection) -> Any:
    """Merge the equations that compute the same activation.

    Equations on parameters alone are not merged, because segments repeat them anyway. Equations that depend on no
    parameter are not merged either, because computing a mask or a row of zeros twice is cheaper than storing it.
    If two products have the same result but different derivatives, because one stops the gradient of an operand, the
    second product takes the result of the first, and keeps its own derivative. `params` are the sharded parameters.
    """
    stops = any(eqn.primitive.name == "stop_gradient" for eqn in jaxprs.equations(jaxpr))
    alike, equal = _Numbers(), _Numbers(ignore_stops=True) if stops else None
    weights, activations = set(params), set()
    eqns: list = []
    taken: dict = {}  # a variable -> the variable to read instead
    first: dict = {}  # a number of `alike` -> the first activation with it
    products: dict = {}  # a number of `equal` -> the first product with it
    for eqn in jaxpr.eqns:
        reads = jaxprs.variables_in(eqn.invars)
        if _is_weight(eqn, weights):
            weights.update(eqn.outvars)
        elif not activations.isdisjoint(reads) or not weights.isdisjoint(reads):
            activations.update(eqn.outvars)
        alike.add(eqn)
        results = [v for v in eqn.outvars if v in activations and not compat.is_dropped(v)]
        same = {v: first[alike.of[v]] for v in results if alike.of[v] in first}
        taken |= same
        first |= {alike.of[v]: v for v in results if v not in same}
        if equal:
            equal.add(eqn)
            if results and jaxprs.facts(eqn).kind is primitives.Kind.PRODUCT:
                value = products.setdefault(equal.of[results[0]], results[0])
                if not same and value is not results[0]:
                    eqns += _with_value(eqn, value)
                    continue
        if not results or len(same) < len(results):
            eqns.append(eqn)
    if len(eqns) == len(jaxpr.eqns) and not taken:
        return jaxpr
    put = lambda atoms: [atom if compat.is_literal(atom) else taken.get(atom, atom) for atom in atoms]
    eqns = [eqn.replace(invars=put(eqn.invars)) for eqn in eqns]
    return compat.part_of(jaxpr, eqns, jaxpr.invars, put(jaxpr.outvars))


class _Numbers:
    """Gives each value a number, and equal values the same number. Values inside of calls get numbers, too.

    With `ignore_stops`, the result of `stop_gradient` has the number of its operand.

    Attributes:
        of: The number of each variable. A variable that no equation computes is its own number.
    """

    def __init__(self, ignore_stops: bool = False):
        self.of: dict = {}
        self._fresh, self._ignore_stops = itertools.count(), ignore_stops
        self._earlier: dict = {}  # equations and the numbers of their results, by keys that ignore functions

    def add(self, eqn: Any) -> None:
        self.of |= zip(eqn.outvars, self._results(eqn, self.of), strict=True)

    def _results(self, eqn: Any, of: dict) -> Sequence:
        if eqn.effects or jaxprs.facts(eqn).stays_apart or any(map(compat.is_ref, eqn.invars)):
            return [next(self._fresh) for _ in eqn.outvars]
        numbered = lambda atom: signatures.literal_key(atom) if compat.is_literal(atom) else of.get(atom, atom)
        if eqn.primitive.name == "stop_gradient" and self._ignore_stops:
            return [numbered(eqn.invars[0])]
        inner, consts = compat.opened(compat.called(eqn))
        if inner is not None and not consts and eqn.primitive.name != primitives.MAPPED:
            of = dict(zip(inner.invars, map(numbered, eqn.invars), strict=True))
            for one in inner.eqns:
                of |= zip(one.outvars, self._results(one, of), strict=True)
            return [signatures.literal_key(atom) if compat.is_literal(atom) else of[atom] for atom in inner.outvars]
        candidates = self._earlier.setdefault(signatures.equation_key(eqn, of, functions=False), [])
        for candidate, its, numbers in candidates:
            # Equal equations may have different functions as parameters: each call of `jax.nn.relu` makes a new
            # derivative rule. So the derivatives are traced and compared.
            if signatures.equation_key(eqn, of) == signatures.equation_key(candidate, its) or (
                (pulled := _pulled(eqn)) is not None and pulled == _pulled(candidate)
            ):
                return numbers
        numbers = [next(self._fresh) for _ in eqn.outvars]
        candidates.append((eqn, of, numbers))
        return numbers


@jax.custom_jvp
def _valued(value: jax.Array, computed: jax.Array) -> jax.Array:
    """Return `value`, which is equal to `computed`, with the derivative of `computed`."""
    return value


_valued.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _with_value(eqn: Any, value: Any) -> list:
    """Return equations that copy `value`, a variable equal to the result of `eqn`, with the derivative of `eqn`."""

    @jax.jit
    def product(value, *operands):
        return _valued(value, *compat.evaluate_one(eqn, operands))

    def both(value, *operands):
        return product(jax.lax.stop_gradient(value), *operands)

    traced, _ = compat.opened(jax.make_jaxpr(both)(*(atom.aval for atom in (value, *eqn.invars))))
    stop, call = traced.eqns  # without `stop_gradient`, `value` would get a cotangent of zeros
    source = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    stop = stop.replace(invars=[value], **source)
    return [stop, call.replace(invars=[*stop.outvars, *eqn.invars], outvars=eqn.outvars, **source)]


def _pulled(eqn: Any) -> Any:
    """Return a hashable form of the derivative of `eqn`, to compare derivatives, or None if there is no derivative."""
    is_float = lambda v: jnp.issubdtype(v.aval.dtype, jnp.inexact)
    moving = [i for i, v in enumerate(eqn.invars) if not compat.is_literal(v) and is_float(v)]
    active = {k: v for k, v in enumerate(eqn.outvars) if not compat.is_dropped(v) and is_float(v)}
    if not moving or not active:
        return None

    def run(values):
        body = compat.called(eqn)
        return jaxprs.inline_calls(*compat.opened(body), *values) if body else compat.evaluate_one(eqn, values)

    try:
        closed = both_passes(run, eqn.invars, moving, active, results="none")
    except Exception:  # The user's rule failed, or the equation has no derivative.
        return None
    jaxpr, consts = compat.opened(closed)
    # A derivative rule often calls its function again, for a result that nothing reads. This call is dropped.
    return signatures.signature(jaxpr.replace(eqns=jaxprs.alive(jaxpr))), tuple(map(id, consts))


def _is_weight(eqn: Any, weights: Collection) -> bool:
    """Return whether an equation reads weights alone, or changes a weight element by element (a mask)."""
    reads = jaxprs.variables_in(eqn.invars)
    if reads and all(v in weights for v in reads):
        return True
    shapes = [v.aval.shape for v in reads if v in weights]
    return jaxprs.facts(eqn).changes_weights and eqn.outvars[0].aval.shape in shapes
