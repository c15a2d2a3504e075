"""Take the reductions of parameters out of a loss on full parameters. `train.apart` uses this at stages 1 and 2.

At these stages every device has all parameters, so every device would compute a penalty such as `jnp.sum(w**2)`, and
its gradient, in full. The rule "reduction" finds such reductions. They become a separate program, which each device
runs on its shards, as at stage 3. The rest of the loss takes the results of the reductions as further arguments.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.gather.planner import closed_over, inlined, plan
from zerojax.gather.reduced import ReducedSegment, without_ravels
from zerojax.gather.rules import Decisions
from zerojax.gather.segments import Program
from zerojax.gather.sharded_param import root_param
from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Apart:
    """A traced loss, divided into its reductions of parameters and the rest."""

    program: Program  # computes the reductions from the arguments with the indices `reads`
    reads: tuple[int, ...]  # indices into the loss's arguments, followed by its constants
    constants: Sequence  # the values of the loss's constants
    rest: Any  # a jaxpr from the loss's arguments, the constants and the reductions' results

    def run_rest(self, args: Sequence, results: Sequence) -> list:
        return jaxprs.run(self.rest, (), *args, *self.constants, *results)


def taken_apart(closed: Any, leaves: Sequence[Leaf | None], alike: Sequence[bool]) -> Apart | None:
    """Divide a traced loss. Return None if it has no reductions that can be computed on shards.

    `leaves` has, for each argument, the layout of the shards that devices take of it, or None. `alike` says which
    arguments are alike on all devices.
    """
    jaxpr, constants = inlined(closed, leaves)
    jaxpr, new = closed_over(*without_ravels(jaxpr, leaves))
    constants = [*constants, *new]
    if any(map(compat.is_ref, (v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)))):
        return None
    layouts = [*leaves, *[None] * len(constants)]
    params = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, layouts, strict=True) if leaf is not None}
    every = zip(jaxpr.invars, [*alike, *[True] * len(constants)], strict=True)
    same = {var for var, on in every if on or var in params}
    decisions = Decisions(jaxpr, params, same)
    decisions.decide()
    ends = [eqn for draft in decisions.drafts if draft.make == ReducedSegment.of for eqn in draft.eqns]
    found = dict.fromkeys(var for eqn in ends for var in eqn.outvars)
    others = [eqn for eqn in jaxpr.eqns if found.keys().isdisjoint(eqn.outvars)]
    rest = compat.part_of(jaxpr, others, [*jaxpr.invars, *found], jaxpr.outvars)
    others = jaxprs.alive(rest)
    read = {*jaxprs.variables_in(jaxpr.outvars), *(v for eqn in others for v in jaxprs.variables_in(eqn.invars))}
    results = [var for var in found if var in read]
    if not results:
        return None
    needed, of = jaxprs.needed_for(jaxpr.eqns, results)
    reads = tuple(i for i, var in enumerate(jaxpr.invars) if var in of)
    part = compat.part_of(jaxpr, needed, [jaxpr.invars[i] for i in reads], results)
    program = plan(part, [layouts[i] for i in reads], alike=same)
    if any(segment.params for segment in program.segments):
        return None
    rest = compat.part_of(jaxpr, others, [*jaxpr.invars, *results], jaxpr.outvars)
    return Apart(program, reads, jaxprs.as_jax_values(constants), rest)
