"""Choose the matrix products of parameters that are computed once and held, instead of repeated in every segment.

Examples are Newton-Schulz iterations on a weight that several layers read. The planner first plans without held
values. It then calls `worth_holding`, and plans again if this function returns any values.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from zerojax import compat, jaxprs
from zerojax.gather.segments import Program

REPEATED = 0.05  # Repeated equations that cost more than this share of all FLOPs are worth holding.
MOST_HELD = 4  # All held values together take at most this many times the gathered bytes of the largest use.


def worth_holding(jaxpr, program: Program, params: Collection, repeated: Mapping) -> frozenset:
    """Return the variables to hold. Segments read them, and computing them needs a repeated matrix product.

    `program` is the program in which nothing is held. `params` and `repeated` are attributes of `Decisions`.
    """
    counts = Counter(id(eqn) for segment in program.segments for eqn in segment.jaxpr.eqns)
    again = {id(eqn): (counts[id(eqn)] - 1) * product_flops(eqn) for eqn in repeated.values()}
    if sum(again.values()) <= REPEATED * sum(map(product_flops, jaxpr.eqns)):
        return frozenset()
    costly: dict = {}  # for each value that depends on parameters alone, whether a repeated product is needed for it
    for var, eqn in repeated.items():
        reads = jaxprs.variables_in(eqn.invars)
        if all(v in params or v in costly for v in reads):
            costly[var] = again[id(eqn)] > 0 or any(costly.get(v) for v in reads)
    uses, _ = jaxprs.uses_of(jaxpr)
    held: dict = {}  # for each candidate, whether it is computed from another candidate
    for var, on in costly.items():
        of_held = any(held.get(v) is not None for v in jaxprs.variables_in(repeated[var].invars))
        is_read = any(eqn.outvars[0] not in costly for eqn, _ in uses.get(var, ()) if eqn.outvars)
        if of_held or (on and is_read):
            held[var] = of_held
    room, chosen = MOST_HELD * max(max(segment.gathered_bytes) for segment in program.segments), set()
    for var in (var for var, of_held in held.items() if not of_held):
        room -= jaxprs.nbytes(var)
        if room >= 0:
            chosen.add(var)
    return frozenset(chosen)


def product_flops(eqn) -> int:
    """Return the number of floating-point operations in an equation's matrix products."""
    if eqn.primitive.name == "dot_general":
        return jaxprs.dot_flops(eqn)
    loop = compat.loop_of(eqn)
    times = 1 if loop is None else loop.length
    return times * sum(product_flops(inner) for body in compat.inner_jaxprs(eqn) for inner in body.eqns)
