"""Find the parameters that a loop inside of one stage reads. They are gathered in full before the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerojax import compat, jaxprs
from zerojax.gather.segments import BlockSegment, Gathered, Segment
from zerojax.gather.sharded_param import ShardedParam


def gathered_before_loops(segment: Segment) -> list[ShardedParam]:
    """Return the parameters of a segment that are gathered in full before a loop which reads them.

    There are two cases. The loop may be a later segment that cannot gather one layer per iteration. Or the loop is
    inside of this segment, as a `while` loop or as a scan over a stack within a `jax.checkpoint`. If a scan over other
    values, such as time steps, reads the same layer in each iteration, the layer is not in the result.
    """
    if not isinstance(segment, BlockSegment):
        return []
    if any(isinstance(key, Gathered) for key in segment.results):
        return list(segment.params)
    origins = {v: frozenset((i,)) for i, v in enumerate(segment.jaxpr.invars[: len(segment.params)])}
    return [segment.params[i] for i in sorted(_read_by_loops(segment.jaxpr, origins))]


def _read_by_loops(jaxpr: Any, origins: Mapping[Any, frozenset[int]]) -> frozenset[int]:
    """Return the numbers of the parameters that loops read.

    Args:
        jaxpr: The equations.
        origins: The numbers of parameters, for each variable that is computed only from parameters.
    """
    origins, found = dict(origins), frozenset()
    for eqn in jaxpr.eqns:
        of = [frozenset() if compat.is_literal(atom) else origins.get(atom, frozenset()) for atom in eqn.invars]
        loop = compat.loop_of(eqn)
        if eqn.primitive.name == "while":
            found = found.union(*of)
        elif loop is not None:
            found = found.union(*of[loop.consts + loop.carry :])
        for inner in compat.inner_jaxprs(eqn):
            # The arguments of a branch are the last operands, after the number of the branch.
            pairs = zip(reversed(inner.invars), reversed(of), strict=False)
            found |= _read_by_loops(inner, {v: numbers for v, numbers in pairs if numbers})
        reads = jaxprs.variables_in(eqn.invars)
        if reads and all(v in origins for v in reads):
            origins |= dict.fromkeys(eqn.outvars, frozenset().union(*of))
    return found
