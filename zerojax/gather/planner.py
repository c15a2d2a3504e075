"""Divide a loss function into segments: its jaxpr, equation by equation, where parameters are used."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, Follower, State
from zerojax.gather.assembly import Draft, assembled
from zerojax.gather.held import worth_holding
from zerojax.gather.layer_stacks import Derived, combined, evaluated, over_stacks
from zerojax.gather.merged import merged
from zerojax.gather.nested import MOST_ITERATIONS, iterations_are_independent
from zerojax.gather.rules import Decisions, is_repeatable
from zerojax.gather.segments import BlockSegment, Gathered, Program
from zerojax.gather.sharded_param import ShardedParam, root_param
from zerojax.layout.leaf import Leaf

# The name, in a jaxpr, of the jit that `zerojax.block` puts around a function.
BLOCK_NAME = "zerojax_block"


def planned(
    closed, leaves: Sequence[Leaf | None], given: Sequence[State], follower: Follower | None
) -> tuple[Program, list]:
    """Return the program of a traced function, and the constants that are its last arguments.

    `leaves` are the layouts of its first arguments, None for those that are not sharded. `given` says where each of
    its arguments holds the rows of the batch, which `follower`, if there is one, follows.
    """
    jaxpr, consts = compat.opened(closed)
    missing = [None] * (len(jaxpr.invars) - len(leaves))
    sharded = [leaf is not None for leaf in [*leaves, *missing]]

    def flat(args, consts):
        return inlined(jaxpr, consts, args, sharded)

    again = jax.make_jaxpr(flat)([var.aval for var in jaxpr.invars], list(consts))
    jaxpr, more = compat.opened(again)
    bare = compat.part_of(jaxpr, jaxprs.alive(jaxpr), [*jaxpr.invars, *compat.constvars_of(jaxpr)], jaxpr.outvars)
    bare = merged(bare, [var for var, leaf in zip(bare.invars, leaves, strict=False) if leaf is not None])
    missing = [None] * (len(bare.invars) - len(leaves))
    rest = [NOWHERE] * (len(bare.invars) - len(given))
    rows = {} if follower is None else follower.with_implied(bare, follower.states(bare, [*given, *rest]))
    return plan(bare, [*leaves, *missing], rows, follower), jaxprs.as_jax_values([*consts, *more])


def inlined(jaxpr, consts: Sequence, args: Sequence, sharded: Sequence[bool]) -> list:
    """Evaluate `jaxpr`, inlining the calls (such as `jax.jit`) that parameters are passed to.

    Stacks of layers become what a loop scans over, where it can (`layer_stacks`).

    Args:
        jaxpr: What to evaluate.
        consts: Its constants.
        args: Its arguments.
        sharded: For each argument, whether it is a sharded parameter.
    """
    known: dict = {}

    def rule(eqn, values):
        derived = [isinstance(value, Derived) and value.of_params for value in values]
        body = compat.called(eqn)
        if (value := evaluated(eqn, known)) is not None:
            known[eqn.outvars[0]] = value
        if any(derived) and (scanned := over_stacks(eqn, values, known)) is not None:
            return scanned
        if any(derived) and body is not None and eqn.params.get("name") != BLOCK_NAME:
            return jaxprs.evaluate(*compat.opened(body), values, rule)
        results = compat.evaluate_one(eqn, [_bare(value) for value in values])
        if any(derived) and is_repeatable(eqn, derived):
            return [Derived(x, eqn, tuple(values)) for x in results]
        return combined(eqn, values, results) or results

    marked = [Derived(arg) if on else arg for arg, on in zip(args, sharded, strict=True)]
    return [_bare(value) for value in jaxprs.evaluate(jaxpr, consts, marked, rule)]


def _bare(value):
    return value.value if isinstance(value, Derived) else value


def plan(
    jaxpr, leaves: Sequence[Leaf | None], rows: Mapping[Any, State] = MappingProxyType({}), follower: Any = None
) -> Program:
    """Divide an inlined jaxpr into segments.

    Args:
        jaxpr: Without constants.
        leaves: For each argument, its layout if it is a sharded parameter, else None.
        rows: Where each variable holds the rows of the batch.
        follower: What found that, or None.
    """
    nest = functools.partial(_nested, rows=rows, follower=follower)
    params = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    decisions, program = _plan(jaxpr, Decisions(jaxpr, params, frozenset(), nest), frozenset())
    if held := worth_holding(jaxpr, program, decisions.params, decisions.repeated):
        _, program = _plan(jaxpr, Decisions(jaxpr, params, held, nest), held)
    return dataclasses.replace(program, rows=rows)


def _plan(jaxpr, decisions: Decisions, held: frozenset) -> tuple[Decisions, Program]:
    """Return what is decided about each equation, and the program that follows from it."""
    decisions.decide()
    drafts, params, repeated = decisions.drafts, decisions.params, decisions.repeated
    returned = tuple(dict.fromkeys(v for v in jaxprs.variables_in(jaxpr.outvars) if v in params or v in repeated))
    if returned:
        drafts.append(Draft(BlockSegment, [], returned))
    outs = tuple(Gathered(v, len(drafts) - 1) if v in returned else v for v in jaxpr.outvars)
    segments = assembled(jaxpr, drafts, params, repeated)
    rules = tuple(decisions.rules)
    return decisions, Program(tuple(jaxpr.invars), segments, outs, decisions.joined, held, {}, rules)


def _nested(
    eqn,
    loop: compat.LoopEqn,
    touched: Collection,
    params: Mapping[Any, ShardedParam],
    *,
    rows: Mapping[Any, State],
    follower: Follower | None,
) -> tuple[Program, list] | None:
    """Return the program of a loop's body and its constants, if parameters should stay sharded until it uses them."""
    constants = set(jaxprs.variables_in(eqn.invars[: loop.consts]))
    is_constant = constants.issuperset(touched) and params.keys() >= set(touched)
    if loop.length > MOST_ITERATIONS or not is_constant or not iterations_are_independent(loop):
        return None
    found = [None if compat.is_literal(a) else params.get(a) for a in eqn.invars]
    if any(param and param.leaf.further > 1 for param in found):  # its gradients are no shards of the body's arguments
        return None
    leaves = [param and dataclasses.replace(param.leaf, dtype=param.wide) for param in found]
    states = [NOWHERE if compat.is_literal(a) else rows.get(a, NOWHERE) for a in eqn.invars]
    inside = [] if follower is None else follower.into_loop(loop, states)
    program, consts = planned(loop.body, leaves, inside, follower)
    largest = max((size for segment in program.segments for size in segment.gathered_bytes), default=0)
    return (program, consts) if 2 * largest < sum(leaf.bytes for leaf in leaves if leaf) else None
