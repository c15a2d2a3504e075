"""Compute both cotangents of a product of two activations next to each other.

In the backward pass of attention, one cotangent of `probabilities @ values` is as large as the probabilities, and is
read at once. The other needs the probabilities, and is read later. XLA's scheduler may delay the other product, so that
the probabilities stay in memory together with the first cotangent and the values computed from it. In a scan with
prefetch it does so. Here both cotangents pass one barrier, so each is computed before any of them is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from zerojax import compat, jaxprs, names


def with_pairs(backward: Any, weights: Sequence[bool]) -> Any:
    """Return a backward pass, a closed jaxpr, that computes both cotangents of a product of activations together.

    `weights` says for each argument whether it depends on parameters alone. Products with such values are left out: the
    cotangent of a parameter may be computed late, because its reduction hides behind products.
    """
    jaxpr, consts = compat.opened(backward)
    return jax.make_jaxpr(lambda *values: _evaluate(jaxpr, consts, values, weights))(*(v.aval for v in jaxpr.invars))


def depend_on_weights(jaxpr: Any, weights: Sequence[bool]) -> list[bool]:
    """Return whether each result of a jaxpr depends on parameters alone. `weights` says which of its arguments do.

    Arguments before those in `weights` are constants.
    """
    constants = [True] * (len(jaxpr.invars) - len(weights))
    of_weights = _weights(jaxpr, [*constants, *weights])
    return [_is_of(atom, of_weights) for atom in jaxpr.outvars]


def _evaluate(jaxpr: Any, consts: Sequence, args: Sequence, weights: Sequence[bool]) -> list:
    of_weights = _weights(jaxpr, weights)
    partners = _partners(jaxpr, of_weights)
    seconds = {id(second) for second in partners.values()}
    env = dict(zip(compat.constvars_of(jaxpr), jaxprs.as_jax_values(consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    values_of = lambda eqn: [atom.val if compat.is_literal(atom) else env[atom] for atom in eqn.invars]
    context_of = names.contexts()
    for eqn in jaxpr.eqns:
        if id(eqn) in seconds:
            continue
        with context_of(eqn):
            results = _results(eqn, values_of(eqn), [_is_of(atom, of_weights) for atom in eqn.invars])
        if (second := partners.get(id(eqn))) is not None:
            with context_of(second):
                other = compat.evaluate_one(second, values_of(second))
            results, other = ([x] for x in lax.optimization_barrier((results[0], other[0])))
            env.update(zip(second.outvars, other, strict=True))
        env.update(zip(eqn.outvars, results, strict=True))
    return [atom.val if compat.is_literal(atom) else env[atom] for atom in jaxpr.outvars]


def _results(eqn: Any, values: Sequence, weights: Sequence[bool]) -> list:
    """Evaluate one equation. Pairs inside of calls and of a `jax.checkpoint` are found, too."""
    body = compat.inlined_body(eqn)
    if body is None or not _has_pairs(body, weights):
        return compat.evaluate_one(eqn, values)
    inside = lambda jaxpr, consts, given: _evaluate(jaxpr, consts, given, weights)
    if compat.is_remat(eqn):
        return jaxprs.evaluate_remat(eqn, values, inside)
    with names.inside_call(eqn):
        return inside(*compat.opened(compat.called(eqn)), values)


def _has_pairs(jaxpr: Any, weights: Sequence[bool]) -> bool:
    of_weights = _weights(jaxpr, weights)
    inside = ((compat.inlined_body(eqn), [_is_of(atom, of_weights) for atom in eqn.invars]) for eqn in jaxpr.eqns)
    return bool(_partners(jaxpr, of_weights)) or any(body is not None and _has_pairs(body, on) for body, on in inside)


def _weights(jaxpr: Any, weights: Sequence[bool]) -> set:
    """Return the variables that depend on parameters alone. `weights` says which arguments do."""
    others = [var for var, on in zip(jaxpr.invars, weights, strict=True) if not on]
    moved = jaxprs.dependent_on(others, jaxpr.eqns)
    every = itertools.chain(jaxpr.invars, *(eqn.outvars for eqn in jaxpr.eqns))
    return {var for var in every if var not in moved}


def _is_of(atom: Any, variables: set) -> bool:
    return compat.is_literal(atom) or atom in variables


def _partners(jaxpr: Any, of_weights: set) -> dict[int, Any]:
    """Map the first equation of each pair, by its `id`, to the second.

    Both are batched products that read the same cotangent, one has a larger result than operands, and the operands of
    the second are known when the first is computed.
    """
    made = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    found, taken = dict[int, Any](), set[int]()
    products = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general"
        and eqn.params["dimension_numbers"][1][0]
        and not any(_is_of(atom, of_weights) for atom in eqn.invars)
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
