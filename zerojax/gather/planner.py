"""The planner turns the jaxpr of a loss into a `Program`. `engine` and `_nested` call `planned`.

1. Inline the calls that parameters are passed to, and move changes of a stack into the scan over it (`layer_stacks`).
2. Drop dead equations, move the computation of quantised weights to the start (`narrow`) and values of whole layers
   into the loops over these layers (`per_layer`), and merge equations that compute the same value (`merged`).
3. Apply to each equation the first rule that matches (`rules`). The rules draft the segments.
4. Complete the drafts: add the equations that a segment repeats, and find its inputs and results (`assembly`).
5. If repeated matrix products cost too much, choose products to compute once (`held`), and do steps 3 and 4 again.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, Follower, State
from zerojax.gather.assembly import Draft, assembled
from zerojax.gather.clusters import reads_together, weights_late
from zerojax.gather.equal import with_shared_passes
from zerojax.gather.held import worth_holding
from zerojax.gather.layer_stacks import Derived, combined, over_stacks
from zerojax.gather.merged import merged
from zerojax.gather.narrow import hoisted
from zerojax.gather.nested import MOST_ITERATIONS, iterations_are_independent
from zerojax.gather.per_layer import moved_into_loops
from zerojax.gather.rules import Decisions, is_repeatable
from zerojax.gather.segments import BlockSegment, Gathered, Program
from zerojax.gather.sharded_param import ShardedParam, root_param
from zerojax.layout.leaf import Leaf

# `zerojax.block` wraps a function in `jax.jit`. This is the name of that call in a jaxpr.
BLOCK_NAME = "zerojax_block"


def planned(
    closed,
    leaves: Sequence[Leaf | None],
    given: Sequence[State],
    follower: Follower | None,
    alike: Sequence[bool] | None = None,
) -> tuple[Program, list]:
    """Return the program of a traced function, and the constants that are the program's last arguments.

    `leaves` has the layouts of the first arguments, with None for an argument that is not sharded. `given` says which
    dims of the first arguments hold the rows of the batch. In device view, `follower` is None. `alike` says which of
    the first arguments are alike on all devices. If it is None, parameters are neither reduced nor quantised on shards.
    """
    jaxpr, consts = compat.opened(closed)
    again = jax.make_jaxpr(lambda args, consts: _inlined(jaxpr, consts, args, leaves))
    jaxpr, more = compat.opened(again([var.aval for var in jaxpr.invars], list(consts)))
    bare = compat.part_of(jaxpr, jaxprs.alive(jaxpr), [*jaxpr.invars, *compat.constvars_of(jaxpr)], jaxpr.outvars)
    if alike is not None:
        constant = [not isinstance(x, jax.core.Tracer) for x in [*consts, *more]]
        layouts = [*leaves, *[None] * (len(bare.invars) - len(leaves))]
        bare, new = _closed_over(*hoisted(bare, layouts, [*alike, *constant], BLOCK_NAME, len(constant)))
        layouts, constant = [*layouts, *[None] * len(new)], [*constant, *[True] * len(new)]
        bare, newer = _closed_over(*moved_into_loops(bare, layouts, [*alike, *constant]))
        more = [*more, *new, *newer]
    params = [var for var, leaf in zip(bare.invars, leaves, strict=False) if leaf is not None]
    bare = reads_together(weights_late(merged(bare, params), params), params)
    missing = [None] * (len(bare.invars) - len(leaves))
    states = [*given, *[NOWHERE] * (len(bare.invars) - len(given))]
    rows = {} if follower is None else follower.with_implied(bare, follower.states(bare, states))
    same = None
    if alike is not None:
        same = {var for var, on in zip(bare.invars, alike, strict=False) if on} | {*bare.invars[len(closed.in_avals) :]}
    return plan(bare, [*leaves, *missing], rows, follower, same), jaxprs.as_jax_values([*consts, *more])


def _closed_over(jaxpr: Any, consts: Sequence) -> tuple[Any, Sequence]:
    """Return a jaxpr without dead equations, which takes its constants as its last arguments, and these constants."""
    invars = [*jaxpr.invars, *compat.constvars_of(jaxpr)]
    return compat.part_of(jaxpr, jaxprs.alive(jaxpr), invars, jaxpr.outvars), consts


def _inlined(jaxpr, consts: Sequence, args: Sequence, leaves: Sequence[Leaf | None]) -> list:
    """Evaluate a jaxpr, inlining the calls that parameters are passed to, and scanning over stacks of layers.

    A value that is computed from parameters is wrapped as `Derived`, which remembers its equation. `over_stacks` uses
    that to move the equation into a loop over layers. For a loss without such loops, this function only inlines calls.
    """

    def rule(eqn, values):
        derived = [isinstance(value, Derived) and value.of_params for value in values]
        body = compat.called(eqn)
        if any(derived) and (scanned := over_stacks(eqn, values)) is not None:
            return scanned
        if any(derived) and body is not None and eqn.params.get("name") != BLOCK_NAME:
            return jaxprs.evaluate_call(eqn, values, rule)
        results = compat.evaluate_one(eqn, [_bare(value) for value in values])
        if any(derived) and is_repeatable(eqn, derived):
            return [Derived(x, eqn, tuple(values)) for x in results]
        return combined(eqn, values, results) or results

    pairs = itertools.zip_longest(args, leaves)
    marked = [arg if leaf is None else Derived(arg) for arg, leaf in pairs]
    return [_bare(value) for value in jaxprs.evaluate(jaxpr, consts, marked, rule)]


def _bare(value):
    return value.value if isinstance(value, Derived) else value


def plan(
    jaxpr,
    leaves: Sequence[Leaf | None],
    rows: Mapping[Any, State] = MappingProxyType({}),
    follower: Any = None,
    alike: Collection | None = (),
) -> Program:
    """Divide an inlined jaxpr without constants into segments. `leaves` has a layout or None for each argument.

    `alike` has the arguments that are alike on all devices. If it is None, parameters are not reduced on their shards.
    """
    nest = functools.partial(_nested, rows=rows, follower=follower)
    params = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    decisions = Decisions(jaxpr, params, frozenset(), nest, alike)
    program = _program(jaxpr, decisions, rows)
    if held := worth_holding(jaxpr, program, decisions.params, decisions.repeated):
        program = _program(jaxpr, Decisions(jaxpr, params, held, nest, alike), rows)
    # Not before: `worth_holding` counts the segments with an equation, and equal segments share their equations.
    return dataclasses.replace(program, segments=with_shared_passes(program.segments))


def _program(jaxpr, decisions: Decisions, rows: Mapping[Any, State]) -> Program:
    """Apply the rules to each equation, and return the program that they make."""
    decisions.decide()
    drafts, params, repeated = decisions.drafts, decisions.params, decisions.repeated
    returned = tuple(dict.fromkeys(v for v in jaxprs.variables_in(jaxpr.outvars) if v in params or v in repeated))
    if returned:  # The loss returns parameters. They are gathered at the end.
        drafts.append(Draft(BlockSegment, [], returned))
    outs = tuple(Gathered(v, len(drafts) - 1) if v in returned else v for v in jaxpr.outvars)
    segments = assembled(jaxpr, drafts, params, repeated)
    rules = tuple(decisions.rules)
    shardwise, joined = tuple(decisions.shardwise), decisions.joined
    return Program(tuple(jaxpr.invars), segments, outs, joined, shardwise, decisions.held, rows, rules)


def _nested(
    eqn,
    loop: compat.LoopEqn,
    touched: Collection,
    params: Mapping[Any, ShardedParam],
    *,
    rows: Mapping[Any, State],
    follower: Follower | None,
) -> tuple[Program, list] | None:
    """Return a `Program` for a loop's body, and its constants; None if parameters are gathered before the loop."""
    constants = set(jaxprs.variables_in(eqn.invars[: loop.consts]))
    is_constant = constants.issuperset(touched) and params.keys() >= set(touched)
    if loop.length > MOST_ITERATIONS or not is_constant or not iterations_are_independent(loop):
        return None
    operands = [None if compat.is_literal(a) else params.get(a) for a in eqn.invars]
    # A gradient that is sharded over more axes than its parameter would not have the shape of the body's argument.
    # The cotangent of a quantised weight has another type than the weight, which a nested program does not know.
    if any(param and (param.leaf.further > 1 or param.computed) for param in operands):
        return None
    leaves = [param and dataclasses.replace(param.leaf, dtype=param.wide) for param in operands]
    states = [NOWHERE if compat.is_literal(a) else rows.get(a, NOWHERE) for a in eqn.invars]
    inside = [] if follower is None else follower.into_loop(loop, states)
    program, consts = planned(loop.body, leaves, inside, follower)
    # A nested program must gather, at a time, less than half of the bytes that a gather before the loop would.
    largest = max((size for segment in program.segments for size in segment.gathered_bytes), default=0)
    return (program, consts) if 2 * largest < sum(leaf.bytes for leaf in leaves if leaf) else None
