"""Complete the drafts of segments: add the equations that a segment repeats, and find its inputs and results.

`rules` makes `Draft`s, and `planner` calls `assembled` with them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.gather import evaluate
from zerojax.gather.segments import Gathered, PlainSegment, Segment
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass
class Draft:
    """A segment before its inputs and outputs are known."""

    make: Callable[..., Segment]
    eqns: list
    gathers: tuple = ()  # variables to gather for later segments; a draft with such variables has no `eqns`
    # for each variable that an earlier segment gathers, the `Gathered` value to read instead
    reads: Mapping = dataclasses.field(default_factory=dict)
    # Equations of another segment that this segment computes again, as keys, because their results are cheap or not
    # computed yet. They are not among this segment's results.
    again: dict = dataclasses.field(default_factory=dict)


def assembled(
    jaxpr, drafts: Sequence[Draft], params: Mapping[Any, ShardedParam], repeated: Mapping
) -> tuple[Segment, ...]:
    """Return the segments of the drafts, in order. `params` and `repeated` are attributes of `Decisions`."""
    order = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    closed = [_with_repeated(draft, params, repeated, order) for draft in drafts]
    readers: dict = {}
    for index, (_, used, others) in enumerate(closed):
        for var in [*others, *(v for name in used for v in params[name].operands)]:
            readers.setdefault(var, set()).add(index)
    final = set(jaxprs.variables_in(jaxpr.outvars))
    segments = []
    for index, (draft, (eqns, used, others)) in enumerate(zip(drafts, closed, strict=True)):
        hidden = {v for eqn in draft.again for v in eqn.outvars} | repeated.keys()
        computed = [v for eqn in eqns for v in eqn.outvars if not compat.is_dropped(v) and v not in hidden]
        results = list(draft.gathers) or [v for v in computed if v in final or readers.get(v, set()) - {index}]
        part = compat.part_of(jaxpr, eqns, [*used, *others], results)
        line = compat.line_of(draft.eqns[0]) if draft.eqns else ""
        demands = zip(used, evaluate.demanded(part, used), evaluate.orders(part, used), strict=True)
        uses = tuple(params[v].used(line, dtype, order) for v, dtype, order in demands)
        # Later segments read `results[i]` of the jaxpr by its key, `keys[i]`.
        keys = tuple(Gathered(v, index) for v in draft.gathers) or tuple(results)
        if part.eqns or draft.gathers:
            # A draft may use no parameter, such as a loop for which an earlier segment gathers everything.
            make = draft.make if uses else PlainSegment
            segments.append(make(part, uses, tuple(draft.reads.get(v, v) for v in others), keys))
    return tuple(segments)


def _with_repeated(draft: Draft, params: Mapping, repeated: Mapping, order: Mapping) -> tuple[list, list, list]:
    """Return a draft's `(equations, parameters, other inputs)`.

    Repeated equations come first, unless one of them reads a result of the draft's own equations.
    """
    given = [v for eqn in draft.eqns for v in jaxprs.variables_in(eqn.invars)] + list(draft.gathers)
    behind = lambda var: jaxprs.variables_in(repeated[var].invars) if var in repeated else ()
    found = jaxprs.reached([v for v in given if v not in draft.reads], behind)
    needed = {id(eqn): eqn for eqn in [*draft.again, *(repeated[v] for v in found if v in repeated)]}
    own = {v for eqn in draft.eqns for v in eqn.outvars}
    in_order = lambda eqns: sorted(eqns, key=lambda eqn: order[id(eqn)])
    eqns = in_order(needed.values()) + draft.eqns
    if not own.isdisjoint(v for eqn in needed.values() for v in jaxprs.variables_in(eqn.invars)):
        eqns = in_order(eqns)
    computed = {var for eqn in eqns for var in eqn.outvars}
    reads = dict.fromkeys([*(v for eqn in eqns for v in jaxprs.variables_in(eqn.invars)), *draft.gathers])
    used = [var for var in reads if var in params and var not in draft.reads]
    return eqns, used, [var for var in reads if var not in used and var not in computed]
