"""The planner turns the jaxpr of a loss into a `Program`. `engine` calls `planned`.

1. Inline the calls that parameters are passed to, and drop dead equations.
2. Move the computation of quantised weights to the start (`narrow`), and changes and values of whole layers into the
   loops over these layers (`per_layer`). Merge equations that compute the same value (`merged`).
3. Apply to each equation the first rule that matches (`rules`). The rules draft the segments.
4. Complete the drafts: add the equations that a segment repeats, and find its inputs and results (`assembly`).
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, names
from zerojax.dims import NOWHERE, Follower, State
from zerojax.gather.assembly import Draft, assembled
from zerojax.gather.clusters import reads_together, weights_late
from zerojax.gather.equal import with_shared_passes
from zerojax.gather.merged import merged
from zerojax.gather.narrow import hoisted
from zerojax.gather.on_shards import without_ravels
from zerojax.gather.per_layer import moved_into_loops
from zerojax.gather.rules import Decisions, is_repeatable
from zerojax.gather.segments import BlockSegment, Gathered, Program
from zerojax.gather.sharded_param import root_param
from zerojax.layout.leaf import Leaf


def planned(
    closed,
    leaves: Sequence[Leaf | None],
    given: Sequence[State],
    follower: Follower | None,
    alike: Sequence[bool] | None = None,
    by_row: Collection[int] = (),
) -> tuple[Program, list]:
    """Return the program of a traced function, and the constants that are the program's last arguments.

    `leaves` has the layouts of the first arguments, with None for an argument that is not sharded. `given` says which
    dims of the first arguments hold the rows of the batch. In device view, `follower` is None. `alike` says which of
    the first arguments are alike on all devices. If it is None, parameters are neither reduced nor quantised on shards.
    Scans over the arguments `by_row` are unrolled.
    """
    bare, more = inlined(closed, leaves)
    constant = [not isinstance(x, jax.core.Tracer) for x in more]
    layouts = [*leaves, *[None] * (len(bare.invars) - len(leaves))]
    if alike is not None:
        bare, new = _closed_over(*hoisted(bare, layouts, [*alike, *constant], len(constant)))
        more, layouts, constant = [*more, *new], [*layouts, *[None] * len(new)], [*constant, *[True] * len(new)]
    known = [False] * len(closed.in_avals) if alike is None else alike
    bare, new = _closed_over(*moved_into_loops(bare, layouts, [*known, *constant]))
    more = [*more, *new]
    params = [var for var, leaf in zip(bare.invars, leaves, strict=False) if leaf is not None]
    bare = reads_together(weights_late(merged(bare, params), params), params)
    if by_row:
        bare, new = _closed_over(*unrolled(bare, params, [bare.invars[i] for i in by_row]))
        more = [*more, *new]
    missing = [None] * (len(bare.invars) - len(leaves))
    states = [*given, *[NOWHERE] * (len(bare.invars) - len(given))]
    rows = {} if follower is None else follower.with_implied(bare, follower.states(bare, states))
    same = None
    if alike is not None:
        same = {var for var, on in zip(bare.invars, alike, strict=False) if on} | {*bare.invars[len(closed.in_avals) :]}
    return plan(bare, [*leaves, *missing], rows, same), jaxprs.as_jax_values(more)


def _closed_over(jaxpr: Any, consts: Sequence) -> tuple[Any, Sequence]:
    """Return a jaxpr without dead equations, which takes its constants as its last arguments, and these constants."""
    invars = [*jaxpr.invars, *compat.constvars_of(jaxpr)]
    return compat.part_of(jaxpr, jaxprs.alive(jaxpr), invars, jaxpr.outvars), consts


def inlined(closed: Any, leaves: Sequence[Leaf | None]) -> tuple[Any, list]:
    """Return a traced function without dead equations and without calls of parameters, or of values of them alone.

    `leaves` has the layouts of the first arguments. The constants become the last arguments. Also return their values.
    """
    jaxpr, consts = compat.opened(closed)

    def run(args, consts):
        # Values by `id`, which stays theirs as long as this dict holds them. It must not outlive the trace.
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
    bare, new = _closed_over(*without_ravels(_closed_over(again, ())[0], leaves))
    return bare, [*consts, *more, *new]


def plan(
    jaxpr,
    leaves: Sequence[Leaf | None],
    rows: Mapping[Any, State] = MappingProxyType({}),
    alike: Collection | None = (),
) -> Program:
    """Divide an inlined jaxpr without constants into segments. `leaves` has a layout or None for each argument.

    `alike` has the arguments that are alike on all devices. If it is None, parameters are not reduced on their shards.
    """
    params = {var: root_param(var, leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=True) if leaf is not None}
    decisions = Decisions(jaxpr, params, alike)
    decisions.decide()
    drafts, params, repeated = decisions.drafts, decisions.params, decisions.repeated
    returned = tuple(dict.fromkeys(v for v in jaxprs.variables_in(jaxpr.outvars) if v in params or v in repeated))
    if returned:  # The loss returns parameters. They are gathered at the end.
        drafts.append(Draft(BlockSegment, [], returned))
    outs = tuple(Gathered(v, len(drafts) - 1) if v in returned else v for v in jaxpr.outvars)
    segments = assembled(jaxpr, drafts, params, repeated)
    return Program(tuple(jaxpr.invars), with_shared_passes(segments), outs, tuple(decisions.shardwise), rows)


def unrolled(jaxpr: Any, params: Collection, stacks: Collection) -> tuple[Any, list]:
    """Return a jaxpr whose scans over `stacks` call their body once per iteration, and the constants of the jaxpr.

    This is for parameters on disk, which Python reads layer by layer. Each call is a block, which reads one row of each
    stack. Rows of other operands are sliced before the first call, so that they are results of one segment. A scan that
    also reads one of the other `params` layer by layer stays.
    """

    def rule(eqn, values):
        loop = compat.loop_of(eqn)
        if loop is None or not loop.length:
            return None
        inner = loop.consts + loop.carry
        scanned = [not compat.is_literal(atom) and atom in params for atom in eqn.invars[inner:]]
        if not any(scanned) or not all(v in stacks for v, on in zip(eqn.invars[inner:], scanned, strict=True) if on):
            return None

        def layer(*operands):
            return jaxprs.run(*compat.opened(loop.body), *operands)

        layer.__name__ = names.BLOCK
        layer = jax.jit(layer)
        pairs = zip(values, eqn.invars, strict=True)
        values = [jnp.asarray(x, atom.aval.dtype) if compat.is_literal(atom) else x for x, atom in pairs]
        consts, carry, stacked = values[: loop.consts], values[loop.consts : inner], values[inner:]
        row = lambda x, i: lax.index_in_dim(x, i, keepdims=False)
        others = [[] if on else [row(x, i) for i in range(loop.length)] for x, on in zip(stacked, scanned, strict=True)]
        rows = dict[int, list]()
        for i in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            own = [each[i] if each else row(x, i) for x, each in zip(stacked, others, strict=True)]
            results = layer(*consts, *carry, *own)
            carry, rows[i] = results[: loop.carry], results[loop.carry :]
        return [*carry, *(jnp.stack(column) for column in zip(*(rows[i] for i in sorted(rows)), strict=True))]

    again = jax.make_jaxpr(lambda *args: jaxprs.evaluate(jaxpr, (), args, rule))
    jaxpr, consts = compat.opened(again(*(var.aval for var in jaxpr.invars)))
    return jaxpr, list(consts)
