"""Compute both cotangents of a product of two activations next to each other.

The backward pass of attention computes two cotangents for `probabilities @ values`. The cotangent of the probabilities
is as large as the probabilities, and is read at once. The cotangent of the values is a product with the probabilities,
and is read later. XLA may delay this product, as it does in a scan with prefetch. The probabilities then stay in memory
together with their cotangent. Here both cotangents pass one barrier, so both are computed before either is read.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zerojax import compat, jaxprs
from zerojax.comm import rebinding


def with_pairs(jaxpr: Any, weights: Sequence[bool]) -> Any:
    """Return a backward pass that computes both cotangents of a product of activations together.

    `weights` says for each argument whether it is a parameter or a changed parameter. Products with such values are
    left out: the cotangent of a parameter may be computed late, because products hide its reduction. Pairs inside of
    calls and of a `jax.checkpoint` are found, too.
    """
    others = [var for var, on in zip(jaxpr.invars, weights, strict=True) if not on]
    activations = jaxprs.dependent_on([*compat.constvars_of(jaxpr), *others], jaxpr.eqns)
    is_weight = lambda atom: compat.is_literal(atom) or atom not in activations
    partners = _partners(jaxpr, is_weight)
    seconds, eqns = {*map(id, partners.values())}, []
    for eqn in jaxpr.eqns:
        if (second := partners.get(id(eqn))) is not None:
            eqns += _together(eqn, second)
        elif id(eqn) not in seconds:
            body = compat.inlined_body(eqn)
            inner = {} if body is None else {id(body): with_pairs(body, [*map(is_weight, eqn.invars)])}
            eqns.append(rebinding.with_inner_jaxprs(eqn, inner) or eqn if inner else eqn)
    return jaxpr.replace(eqns=eqns)


def _together(first: Any, second: Any) -> list:
    """Return two products, and a barrier that both results pass."""
    wait = lambda *values: lax.optimization_barrier(values)
    traced, _ = compat.opened(jax.make_jaxpr(wait)(first.outvars[0].aval, second.outvars[0].aval))
    (barrier,), (one, other) = traced.eqns, traced.invars
    barrier = barrier.replace(outvars=[*first.outvars, *second.outvars], source_info=second.source_info, ctx=second.ctx)
    return [first.replace(outvars=[one]), second.replace(outvars=[other]), barrier]


def _partners(jaxpr: Any, is_weight: Callable[[Any], bool]) -> dict[int, Any]:
    """Map the first equation of each pair, by its `id`, to the second.

    Both equations are batched products, which read the same cotangent. One of them has a result that is larger than
    each of its operands. The operands of the second are known when the first is computed.
    """
    made = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    found, taken = dict[int, Any](), set[int]()
    products = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general"
        and eqn.params["dimension_numbers"][1][0]
        and not any(map(is_weight, eqn.invars))
    ]
    for first, second in itertools.combinations(products, 2):
        is_known = all(made.get(atom, -1) < made[first.outvars[0]] for atom in second.invars)
        is_pair = is_known and set(first.invars) & set(second.invars) and (_grows(first) or _grows(second))
        if is_pair and not {id(first), id(second)} & taken:
            found[id(first)] = second
            taken |= {id(first), id(second)}
    return found


def _grows(eqn: Any) -> bool:
    return eqn.outvars[0].aval.size > max(atom.aval.size for atom in eqn.invars)
