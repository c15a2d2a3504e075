"""The planner turns the jaxpr of a loss into a `Program`. `engine` calls `planned`.

1. Inline the calls that parameters are passed to, and drop dead equations (`inlined`).
2. Run the optional passes (`PASSES`), which rewrite losses that have something for them to do.
3. Apply to each equation the first rule that matches (`rules`). The rules draft the segments.
4. Complete the drafts: add the equations that a segment repeats, and find its inputs and results (`complete_drafts`).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.core

from zerojax import compat, jaxprs, names
from zerojax.dims import NOWHERE, Follower, RowDims
from zerojax.gather import evaluate
from zerojax.gather.rules import Decisions, Draft, gathering, is_repeatable
from zerojax.gather.segments import BlockSegment, Program, Segment
from zerojax.gather.sharded_param import quantises, root_param
from zerojax.layout.leaf import Leaf


def planned(
    closed,
    leaves: Sequence[Leaf | None],
    given: Sequence[RowDims],
    follower: Follower | None,
    alike: Sequence[bool] | None = None,
    by_row: Collection[int] = (),
) -> tuple[Program, list]:
    """Return the program of a traced function, and the constants that are the program's last arguments.

    `leaves` has the layouts of the first arguments, with None for an argument that is not sharded. `given` says which
    dims of the first arguments hold the rows of the batch. In device view, `follower` is None. `alike` says which of
    the first arguments are alike on all devices. If `alike` is None, parameters are neither reduced nor quantised on
    shards. Scans over the arguments with indices `by_row` are unrolled.
    """
    loss = Inlined(*inlined(closed, leaves), leaves, alike, by_row)
    for optional in PASSES:
        if (found := optional(loss)) is not None:
            loss = loss.rewritten(*found)
    jaxpr, alike_vars = loss.jaxpr, None
    row_dims = [*given, *[NOWHERE] * (len(jaxpr.invars) - len(given))]
    rows = {} if follower is None else follower.with_implied(jaxpr, follower.row_dims(jaxpr, row_dims))
    if alike is not None:
        alike_vars = {v for v, on in zip(jaxpr.invars, alike, strict=False) if on} | {*jaxpr.invars[len(alike) :]}
    pairs = zip(jaxpr.invars, leaves, strict=False)
    decisions = Decisions(jaxpr, {var: root_param(var, leaf) for var, leaf in pairs if leaf is not None}, alike_vars)
    decisions.decide()
    of_params = decisions.params.keys() | decisions.repeated.keys()
    returned = gathering(v for v in jaxprs.variables_in(jaxpr.outvars) if v in of_params)
    if returned.gathers:  # The loss returns parameters. They are gathered at the end.
        decisions.drafts.append(returned)
    outs = tuple(v if compat.is_literal(v) else returned.gathers.get(v, v) for v in jaxpr.outvars)
    segments = complete_drafts(jaxpr, decisions)
    if _may_share_passes(segments):
        from zerojax.gather.equal import with_shared_passes

        segments = with_shared_passes(segments)
    program = Program(tuple(jaxpr.invars), segments, outs, tuple(decisions.shardwise), rows)
    return program, jaxprs.as_jax_values(loss.consts)


def closed_over(jaxpr: Any, consts: Sequence) -> tuple[Any, Sequence]:
    """Drop dead equations, and append the constants to the arguments. Return `(jaxpr, values of the constants)`."""
    invars = [*jaxpr.invars, *compat.constvars_of(jaxpr)]
    return compat.part_of(jaxpr, jaxprs.alive(jaxpr), invars, jaxpr.outvars), consts


def inlined(closed: Any, leaves: Sequence[Leaf | None]) -> tuple[Any, Sequence]:
    """Return a function without dead equations, with its constants as last arguments, and the constants' values.

    Calls of parameters, or of values of parameters alone, are inlined. `leaves` has the layouts of the first arguments.
    """
    jaxpr, consts = compat.opened(closed)

    def run(args, consts):
        # Values by `id`. The dict keeps the values alive, so that ids stay unique. It must not outlive the trace.
        of_params = {id(arg): arg for arg, leaf in zip(args, leaves, strict=False) if leaf is not None}

        def rule(eqn, values):
            derived = [id(value) in of_params for value in values]
            if any(derived) and compat.called(eqn) is not None and not names.is_block(eqn):
                return jaxprs.evaluate_call(eqn, values, rule)
            results = compat.evaluate_one(eqn, values)
            if any(derived) and (is_repeatable(eqn, derived) or jaxprs.facts(eqn).changes_weights):
                of_params.update((id(x), x) for x in results)
            return results

        return jaxprs.evaluate(jaxpr, consts, args, rule)

    again, more = compat.opened(jax.make_jaxpr(run)([var.aval for var in jaxpr.invars], list(consts)))
    return closed_over(again, [*consts, *more])


# A jaxpr, and the values of its new constants; None for an unchanged loss.
Rewritten = tuple[Any, Sequence] | None


@dataclasses.dataclass(frozen=True)
class Inlined:
    """A loss between two optional passes. `leaves`, `alike` and `by_row` are those of `planned`."""

    jaxpr: Any  # without constants
    consts: Sequence  # the values of the jaxpr's last arguments, which were constants
    leaves: Sequence[Leaf | None]
    alike: Sequence[bool] | None
    by_row: Collection[int]

    def rewritten(self, jaxpr: Any, consts: Sequence) -> "Inlined":
        jaxpr, new = closed_over(jaxpr, consts)
        return dataclasses.replace(self, jaxpr=jaxpr, consts=[*self.consts, *new])

    @property
    def layouts(self) -> list[Leaf | None]:
        return [*self.leaves, *[None] * (len(self.jaxpr.invars) - len(self.leaves))]

    @property
    def all_alike(self) -> list[bool]:
        """Return, for each argument of the jaxpr, whether it is known to be alike on all devices."""
        first = self.alike or [False] * (len(self.jaxpr.invars) - len(self.consts))
        return [*first, *(not isinstance(x, jax.core.Tracer) for x in self.consts)]

    @property
    def params(self) -> list:
        return [v for v, leaf in zip(self.jaxpr.invars, self.leaves, strict=False) if leaf is not None]


def quantised_weights(loss: Inlined) -> Rewritten:
    """Move the quantisation in `x @ jnp.round(w / scale)` to the start of the loss."""
    if loss.alike is None or not any(map(quantises, jaxprs.equations(loss.jaxpr))):
        return None
    from zerojax.gather.narrow import hoisted

    return hoisted(loss.jaxpr, loss.layouts, loss.all_alike, len(loss.consts))


def values_of_layers(loss: Inlined) -> Rewritten:
    """Move the norms in `lax.scan(layer, x, w / norms(w))` into the loop."""
    if all(compat.loop_of(eqn) is None for eqn in loss.jaxpr.eqns):
        return None
    from zerojax.gather.per_layer import moved_into_loops

    return moved_into_loops(loss.jaxpr, loss.layouts, loss.all_alike)


def equal_equations(loss: Inlined) -> Rewritten:
    """Compute `net(w, x)` once in `net(w, x).mean() + net(w, x).std()`."""
    readers: dict = {}  # for each variable, the primitives that read it
    for eqn in loss.jaxpr.eqns:
        hides = eqn.primitive.name == "stop_gradient" or compat.called(eqn) is not None  # which primitives read `var`
        for var in {*jaxprs.variables_in(eqn.invars)}:
            readers.setdefault(var, []).append(None if hides else eqn.primitive)
    returns_several = any(compat.called(eqn) is not None and len(eqn.outvars) > 1 for eqn in loss.jaxpr.eqns)
    differs = all(len(of) == 1 or (len({*of}) == len(of) and None not in of) for of in readers.values())
    if differs and not returns_several:  # a call may return one value twice
        return None
    from zerojax.gather.merged import merged

    return merged(loss.jaxpr, loss.params), ()


def late_functionals(loss: Inlined) -> Rewritten:
    """Move `jnp.tanh(u @ w @ v)` to a place after the model's first use of `w`."""
    weights = jaxprs.roots_of(loss.params, loss.jaxpr)
    are_weights = lambda eqn: [not compat.is_literal(atom) and atom in weights for atom in eqn.invars]
    eqns = [eqn for eqn in loss.jaxpr.eqns if not weights.keys().isdisjoint(eqn.outvars)]
    if all(is_repeatable(eqn, are_weights(eqn)) for eqn in eqns):
        return None
    from zerojax.gather.clusters import weights_late

    return weights_late(loss.jaxpr, loss.params), ()


def shared_reads(loss: Inlined) -> Rewritten:
    """Move the layers in `net(w, x) - net(w, y)` side by side."""
    weights = jaxprs.roots_of(loss.params, loss.jaxpr)
    counts = Counter(v for eqn in loss.jaxpr.eqns for v in {*jaxprs.variables_in(eqn.invars)})
    splits = any(sum(v in weights and not compat.is_dropped(v) for v in eqn.outvars) > 1 for eqn in loss.jaxpr.eqns)
    if not splits and not any(count > 1 and v in weights for v, count in counts.items()):
        return None
    from zerojax.gather.clusters import reads_together

    return reads_together(loss.jaxpr, loss.params), ()


def unrolled_loops(loss: Inlined) -> Rewritten:
    """Make a block of each iteration of a loop over the parameters `Inlined.by_row`."""
    if not loss.by_row:
        return None
    from zerojax.gather.unrolled import unrolled

    return unrolled(loss.jaxpr, loss.params, [loss.jaxpr.invars[i] for i in loss.by_row])


# The optional passes, in order. Each begins with a cheap test, imports its module only if it has something to do, and
# returns the arguments of `Inlined.rewritten`, or None. The planner also works without any of them.
PASSES: Sequence[Callable[[Inlined], Rewritten]] = (
    quantised_weights,
    values_of_layers,
    equal_equations,
    late_functionals,
    shared_reads,
    unrolled_loops,
)


def _may_share_passes(segments: Sequence[Segment]) -> bool:
    """Return whether two segments apply the same primitives to inputs of the same types."""
    parts = [segment.jaxpr for segment in segments if isinstance(segment, BlockSegment)]
    keys = [(*(v.aval for v in part.invars), *(eqn.primitive for eqn in part.eqns)) for part in parts]
    return len(set(keys)) < len(keys)


def complete_drafts(jaxpr, decisions: Decisions) -> tuple[Segment, ...]:
    drafts, params, repeated = decisions.drafts, decisions.params, decisions.repeated
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
        if part.eqns or draft.gathers:
            # A draft may use no parameter, such as a loop for which an earlier segment gathers everything.
            make = draft.make if uses else BlockSegment
            # Later segments read `results[i]` of the jaxpr by its key, `keys[i]`.
            keys = tuple(draft.gathers.values()) or tuple(results)
            segments.append(make(part, uses, tuple(draft.reads.get(v, v) for v in others), keys))
    return tuple(segments)


def _with_repeated(draft: Draft, params: Mapping, repeated: Mapping, order: Mapping) -> tuple[list, list, list]:
    """Return a draft's `(equations, parameters, other inputs)`. The equations include the repeated ones."""
    given = [v for eqn in draft.eqns for v in jaxprs.variables_in(eqn.invars)] + list(draft.gathers)
    behind = lambda var: jaxprs.variables_in(repeated[var].invars) if var in repeated else ()
    found = jaxprs.reached([v for v in given if v not in draft.reads], behind)
    every = [*draft.eqns, *draft.again, *(repeated[v] for v in found if v in repeated)]
    eqns = sorted({id(eqn): eqn for eqn in every}.values(), key=lambda eqn: order[id(eqn)])
    computed = {var for eqn in eqns for var in eqn.outvars}
    reads = dict.fromkeys([*(v for eqn in eqns for v in jaxprs.variables_in(eqn.invars)), *draft.gathers])
    used = [var for var in reads if var in params and var not in draft.reads]
    return eqns, used, [var for var in reads if var not in used and var not in computed]
