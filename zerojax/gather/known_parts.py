"""Divide each `shard_map` of a segment into what it computes from parameters alone, and the rest.

For the backward pass, JAX returns the operands of products inside a `shard_map` as results of the `shard_map`. Such an
operand may be a gathered parameter, or its transpose. The `shard_map` also reads activations, so its results would be
stored like activations: one full parameter per layer. After the division, an equation on parameters alone computes the
operand, so `vjp` computes the operand again instead of storing it.
"""

from collections.abc import Collection, Sequence, Set
from typing import Any

from zerojax import compat, jaxprs
from zerojax.primitives import Kind


def divided(jaxpr: Any, params: Collection) -> Any:
    """Return a jaxpr in which each `shard_map` that reads one of the parameters `params` is divided."""
    known, eqns = set(params), []
    for eqn in jaxpr.eqns:
        if not eqn.effects and known.issuperset(jaxprs.variables_in(eqn.invars)):
            known.update(eqn.outvars)
        eqns += _parts(eqn, known) if eqn.primitive.name == "shard_map" else [eqn]
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def _parts(eqn: Any, known: Set) -> list:
    body, consts = compat.opened(eqn.params["jaxpr"])
    if consts or compat.constvars_of(body) or known.isdisjoint(jaxprs.variables_in(eqn.invars)):
        return [eqn]
    pairs = zip(body.invars, eqn.invars, strict=True)
    unknown = [inner for inner, outer in pairs if not compat.is_literal(outer) and outer not in known]
    kept = lambda inner, reads: inner.outvars if reads or not _is_cheap(inner) else ()
    mixed = jaxprs.dependent_on(unknown, body.eqns, kept)
    first = [i for i, v in enumerate(body.outvars) if not compat.is_literal(v) and v not in mixed]
    rest = [i for i in range(len(body.outvars)) if i not in first]
    return [_part(eqn, body, first), _part(eqn, body, rest)] if first and rest else [eqn]


def _is_cheap(eqn: Any) -> bool:
    facts = jaxprs.facts(eqn)
    return not eqn.effects and (facts.elementwise or facts.is_view or facts.kind is Kind.LAYOUT)


def _part(eqn: Any, body: Any, results: Sequence[int]) -> Any:
    """Return `eqn` with only the results at the indices `results`, and only the operands that these results need."""
    wanted = [body.outvars[i] for i in results]
    eqns, reads = jaxprs.needed_for(body.eqns, wanted)
    operands = [i for i, v in enumerate(body.invars) if v in reads]
    pick = lambda items, indices: [items[i] for i in indices]
    part = compat.part_of(body, eqns, pick(body.invars, operands), wanted)
    specs = tuple(pick(eqn.params["in_specs"], operands)), tuple(pick(eqn.params["out_specs"], results))
    params = eqn.params | {"in_specs": specs[0], "out_specs": specs[1], "jaxpr": part}
    return eqn.replace(invars=pick(eqn.invars, operands), outvars=pick(eqn.outvars, results), params=params)
