"""Run the segments of a program forward, and then backward over the residuals of the forward pass.

`engine` calls `as_function`. The forward pass runs the segments in order, and the backward pass in reverse.
A `GatherScheduler` starts the gathers of the segments that come next. A `GradScheduler` takes the gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zerojax import compat, jaxprs, names
from zerojax.comm.barriers import barrier
from zerojax.gather.options import Options
from zerojax.gather.residuals import Static
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Uses
from zerojax.gather.segments import BlockSegment, Gathered, PlainSegment, Program, Segment


def as_function(program: Program, options: Options, zeros: Mapping[int, jax.ShapeDtypeStruct]) -> Callable:
    """Return the program as a function `run(*arguments, *zeros)` with a backward pass.

    `zeros` has the shapes of the zeros of `StandIn`s, by the index of the argument.
    """
    count = len(program.invars)

    @jax.custom_vjp
    def run(*args):
        with names.outside_transforms():
            return run_forward(program, args[:count], None, options)[0]

    def forward(*args):
        active = [arg.perturbed for arg in args[:count]]
        for place, stand_in in zip(zeros, args[count:], strict=True):
            active[place] = stand_in.perturbed
        values = [arg.value for arg in args[:count]]
        with names.outside_transforms():  # The passes of the segments have these names.
            results, kept = run_forward(program, values, active, options)
        return results, (values, kept, Static(active))

    def backward(residuals, cotangents):
        args, kept, active = residuals
        given = [None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents]
        with names.outside_transforms():
            grads = run_backward(program, args, active.value, kept, given, options)
        # The gradient of an argument that is no sharded parameter may still have partial sums, on one dim in front.
        summed = lambda x, var: x if x is None or x.ndim == var.aval.ndim else x.sum(0)
        pairs = enumerate(zip(grads, program.invars, strict=True))
        for_args = [None if i in zeros else summed(x, var) for i, (x, var) in pairs]
        for_zeros = [None if grads[i] is None else options.comm.like(grads[i], x) for i, x in zeros.items()]
        return (*for_args, *for_zeros)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def run_forward(program: Program, args: Sequence, active: Sequence[bool] | None, options: Options) -> tuple[list, list]:
    """Run the forward pass, and return `(results, residuals of each segment)`.

    `active` says for each argument whether its cotangent is wanted. It is None if there is no backward pass. The
    residuals of a segment are None if none of its inputs needs a cotangent.
    """
    env = _env(program, args, options)
    live = program.live(active or (), program.outs)
    gathering = [segment for segment in program.segments if segment.params]
    uses = _uses(program, options, gathering, [segment.first_gather for segment in gathering])
    gathers = GatherScheduler(env, uses, options)
    residuals: list = []
    last_read = {v: i for i, segment in enumerate(program.segments) for v in segment.others}
    last_read |= dict.fromkeys(jaxprs.variables_in(program.outs), len(program.segments))
    ends = _ends(program)
    is_offloaded = lambda x: compat.in_host_memory(jax.typeof(x))
    for index, segment in enumerate(program.segments):
        moving = set() if live.isdisjoint(segment.results) else live.intersection(segment.sources)
        with segment.entered(*["jvp"] * bool(moving)):
            results, new = segment.forward(gathers, moving)
        if segment.params:
            results = gathers.finish(results) if segment.waits_for_next else results
            gathers.position += 1
            # If a loss is a sum, its backward pass does not read the terms of the sum. Without this barrier XLA
            # computes the terms after the backward pass, and keeps gathered parameters for them until then.
            results, new = _tied(results, [segment.results.index(v) for v in ends[index]], new, lambda _: True)
        if residuals and residuals[-1] is not None:
            # Without this barrier XLA copies offloaded residuals to the host late, and their memory is not freed.
            results, residuals[-1] = _tied(results, range(len(results)), residuals[-1], is_offloaded)
        env.update(zip(segment.results, results, strict=True))
        reached = segment.results if segment.params else [*gathers.frontier, *segment.after(gathers.frontier)]
        gathers.frontier = [v for v in reached if last_read.get(v, 0) > index]
        residuals.append(new)
    return [env[a] if isinstance(a, Gathered) or not compat.is_literal(a) else a.val for a in program.outs], residuals


def groups_of(segments: Sequence[Segment], limit: int) -> list[int]:
    """Return the number of each segment's group, if the segments gather in this order.

    Consecutive blocks are one group, and share one gather, if together they gather at most `limit` bytes, or no more
    than the largest of them does, as blocks that read the same parameters. Loops and values that are gathered for
    several segments are alone in their group.
    """
    groups: list[int] = []
    held: dict | None = None  # the bytes of what the last group gathers; None if the group takes no more blocks
    largest = 0  # the bytes of the largest block of the last group
    for segment in segments:
        is_block = type(segment) is BlockSegment and not any(isinstance(key, Gathered) for key in segment.results)
        new = {param.key: param.leaf.bytes for param in segment.params}
        largest, alone = max(largest, sum(new.values())), sum(new.values())
        joins = is_block and held is not None and sum((held | new).values()) <= max(limit, largest)
        largest = largest if joins else alone
        groups.append((groups[-1] if groups else -1) + (not joins))
        held = (held or {}) | new if joins else new if is_block else None
    return groups


def _uses(program: Program, options: Options, gathering: Sequence[Segment], params: list) -> Uses:
    computes = [segment.computes for segment in gathering]
    groups = groups_of(gathering, options.comm.shared_bytes)
    return Uses(params, computes, frozenset(program.given), program.rows, groups)


def _env(program: Program, args: Sequence, options: Options) -> dict:
    """Return the values with which a pass begins: the arguments, quantised weights, and stacks of shards."""
    env = dict(zip(program.invars, args, strict=True))
    for computation in program.shardwise:
        env.update(zip(computation.eqn.outvars, computation.compute(options.comm, env), strict=True))
    return env


def _ends(program: Program) -> list[list]:
    """Return, for each segment, the results that are not needed by any later segment that gathers parameters."""
    needed: set = set()  # An example of a result that is not needed: the weight penalty of one layer.
    ends = []
    for segment in reversed(program.segments):
        ends.append([v for v in segment.results if v not in needed])
        needed.update(segment.others if segment.params else segment.behind(needed))
    return ends[::-1]


def _tied(
    results: Sequence, indices: Sequence[int], residuals: Any, chosen: Callable[[jax.Array], bool]
) -> tuple[list, Any]:
    """Return `(results, residuals)` after a barrier for the results at `indices` and the `chosen` residuals."""
    results, (leaves, tree) = list(results), jax.tree.flatten(residuals)
    places = [i for i, x in enumerate(leaves) if chosen(x)]
    waited, (arrays,) = barrier([results[i] for i in indices], [leaves[i] for i in places])
    for values, where, new in ((results, indices, waited), (leaves, places, arrays)):
        for i, x in zip(where, new, strict=True):
            values[i] = x
    return results, jax.tree.unflatten(tree, leaves)


def weights_of(program: Program) -> set:
    """Return what segments compute from parameters alone, such as slices. Cotangents of it may stay partial sums."""
    has_none = lambda v: isinstance(v, Gathered) or ((rows := program.rows.get(v)) is not None and not rows.places)
    found: set = set()
    for segment in program.segments if program.rows else ():
        reads = segment.params or not found.isdisjoint(segment.others)
        if type(segment) in (BlockSegment, PlainSegment) and reads and not segment.has_rule:
            found.update(segment.results if all(map(has_none, [*segment.others, *segment.results])) else ())
    return found


def run_backward(
    program: Program,
    args: Sequence,
    active: Sequence[bool],
    residuals: Sequence,
    cotangents: Sequence,
    options: Options,
) -> list:
    """Run the backward pass, and return the cotangents of the arguments, given the `cotangents` of the results.

    Pass the same `program`, `args`, `active` and `options` as to `run_forward`, which returned the `residuals`. A zero
    cotangent may be given as None, and is returned as None.
    """
    env = _env(program, args, options)
    grads = GradScheduler(env, program.invars, options, program.experts, weights_of(program))
    for atom, cotangent in zip(program.outs, cotangents, strict=True):
        if cotangent is not None and (isinstance(atom, Gathered) or not compat.is_literal(atom)):
            grads.add(atom, cotangent)
    pairs = [(s, r) for s, r in zip(program.segments, residuals, strict=True) if r is not None][::-1]
    gathering = [(s, r) for s, r in pairs if s.params]
    for segment, kept in gathering:
        if segment.operands:
            env.update(zip(segment.operands, kept.operands, strict=True))
    last = [segment.last_gather(kept) for segment, kept in gathering]
    uses = _uses(program, options, [segment for segment, _ in gathering], last)
    gathers = GatherScheduler(env, uses, options)
    for segment, kept in pairs:
        with segment.entered("transpose", "jvp"):
            segment.backward(kept, gathers, grads)
        if segment.params:
            grads.group_continues = not gathers.ends_group
            gathers.position += 1
        reached = segment.others if segment.params else [*gathers.frontier, *segment.behind(gathers.frontier)]
        gathers.frontier = [v for v in reached if v not in segment.results]
    grads.finish()
    for computation in program.shardwise:
        if (cotangent := grads.cotangents.get(computation.param.root)) is not None:
            for var, found in computation.pull(options.comm, env, cotangent).items():
                grads.add(var, found)
    return [grads.cotangents.get(v) if on else None for v, on in zip(program.invars, active, strict=True)]
