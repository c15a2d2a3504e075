"""The entry of the engine. `trace_loss` turns a loss of full parameters into a program that takes shards.

`trace_loss` traces the loss, and lets `planner` divide it into segments. `run_forward` runs the segments in order.
`run_backward` runs them in reverse, on the residuals that the forward pass stored. A `GatherScheduler` starts the
gathers of later segments, and a `GradScheduler` takes the gradients.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.comm.collectives import Collectives
from zerojax.comm.manual import barrier
from zerojax.dims import NOWHERE
from zerojax.dims.follow import row_dims_of_args, row_dims_of_params
from zerojax.gather.planner import planned
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Options
from zerojax.gather.segments import BlockSegment, Program, Segment
from zerojax.jaxprs import alike_args, split_arrays
from zerojax.layout.leaf import Leaf


def trace_loss(
    fn: Callable,
    leaves: Sequence[Leaf],
    full: Sequence,
    args: Sequence,
    of_rows: Collection[int] = (),
    comm: Collectives | None = None,
    differing: Collection[int] | None = None,
    *,
    by_row: Collection[int] = (),
) -> tuple[Program, list, list, Any]:
    """Trace `fn(params, *args)`, which takes a list of parameters, and divide it into segments.

    `leaves` has the layouts of the parameters, and `full` their arrays or shapes. `of_rows` has the indices of `args`
    whose dim 0 holds the rows of the batch. In global view, `comm.follower` finds which dims of other values hold rows.
    A gradient is a sum over these dims, and `Collectives` divides the sum into one partial sum per worker. Partial sums
    over other dims have the same total, so a wrong dim costs time and not correctness. `differing` has the indices of
    `args` that may differ between devices, as the batch does in device view. If `differing` is None, parameters are
    neither reduced nor quantised on shards. Scans over the parameters with indices `by_row` are unrolled.

    Returns:
        The program, the arrays among `args`, the arrays that the loss closes over, and the structure of the loss's
        results. The arguments of the program are the parameters, followed by both lists of arrays.
    """
    arrays, put_back = split_arrays(args)
    follower, experts = None, []
    if comm is not None:
        follower = comm.follower
        experts = [i for i in comm.experts(leaves) if leaves[i].kind != "sharded"]
    given = row_dims_of_params(full, experts) + row_dims_of_args(args, of_rows, follower)
    on_arrays = lambda full, arrays: fn(full, *put_back(arrays))
    closed, shape = jax.make_jaxpr(on_arrays, return_shape=True)(list(full), arrays)
    check_types(compat.opened(closed)[0])
    of_params = [i not in experts for i in range(len(full))]
    alike = None if differing is None else of_params + alike_args(args, differing)
    sharded = [leaf if leaf.kind == "sharded" else None for leaf in leaves]
    program, consts = planned(closed, sharded, given, follower, alike, by_row)
    if experts:
        program = dataclasses.replace(program, experts=frozenset(program.invars[i] for i in experts))
    return program, arrays, consts, jax.tree.structure(shape)


def check_types(jaxpr: Any) -> None:
    """Raise a TypeError if the loss computes a value whose type is defined with `jax.experimental.hijax`."""
    for eqn in jaxprs.equations(jaxpr):
        for var in eqn.outvars:
            if not hasattr(var.aval, "dtype") and not compat.is_ref(var) and compat.is_high(var):
                raise TypeError(
                    f"The loss makes a value of type {var.aval} at {compat.line_of(eqn)}. Stage 3 divides a loss by "
                    "the sizes of its arrays, and a value of a type of jax.experimental.hijax has no size. "
                    "Compute with arrays there, or use stage 2."
                )


def run_forward(program: Program, args: Sequence, active: Sequence[bool] | None, options: Options) -> tuple[list, list]:
    """Run the forward pass, and return `(results, residuals of each segment)`.

    `active` says for each argument whether its cotangent is wanted. Without a backward pass, `active` is None. The
    residuals of a segment are None if none of its inputs needs a cotangent.
    """
    env = _env(program, args, options)
    live = program.live(active or (), program.outs)
    gathering = [segment for segment in program.segments if segment.params]
    gathers = _gather_scheduler(program, env, options, gathering, [segment.first_gather for segment in gathering])
    residuals: list = []
    last_read = {v: i for i, segment in enumerate(program.segments) for v in segment.others}
    last_read |= dict.fromkeys(jaxprs.variables_in(program.outs), len(program.segments))
    ends = _ends(program)
    is_offloaded = lambda x: compat.in_host_memory(jax.typeof(x))
    for index, segment in enumerate(program.segments):
        moving = set() if live.isdisjoint(segment.results) else live.intersection(segment.sources)
        with segment.entered("jvp") if moving else segment.entered():
            results, new = segment.forward(gathers, moving)
        if segment.params:
            results = gathers.finish(results) if segment.waits_for_next else results
            gathers.position += 1
            # If a loss is a sum, its backward pass does not read the terms of the sum. Without this barrier XLA
            # computes the terms after the backward pass, and keeps the parameters gathered until then.
            results, new = _tied(results, [segment.results.index(v) for v in ends[index]], new, lambda _: True)
        if residuals and residuals[-1] is not None:
            # Without this barrier XLA copies offloaded residuals to the host late, and frees their device memory late.
            results, residuals[-1] = _tied(results, range(len(results)), residuals[-1], is_offloaded)
        env.update(zip(segment.results, results, strict=True))
        reached = segment.results if segment.params else [*gathers.frontier, *segment.after(gathers.frontier)]
        gathers.frontier = [v for v in reached if last_read.get(v, 0) > index]
        residuals.append(new)
    return [a.val if compat.is_literal(a) else env[a] for a in program.outs], residuals


def gather_groups(segments: Sequence[Segment], limit: int) -> list[int]:
    """Divide segments into groups that share a gather. Return the number of each segment's group.

    `segments` are in the order in which they gather. Consecutive blocks are one group if together they gather at most
    `limit` bytes. Blocks that read the same parameters are also one group if together they gather no more bytes than
    the largest of them. A loop is a group by itself, and so is a segment that gathers for several later segments.
    """
    groups: list[int] = []
    held: dict | None = None  # the bytes of what the last group gathers; None if the group takes no more blocks
    largest = 0  # the bytes of the largest block of the last group
    for segment in segments:
        is_block = isinstance(segment, BlockSegment) and not segment.lasting
        new = {param.key: param.leaf.bytes for param in segment.params}
        alone = sum(new.values())
        if is_block and held is not None and sum((held | new).values()) <= max(limit, largest, alone):
            groups.append(groups[-1])
            held, largest = held | new, max(largest, alone)
        else:
            groups.append(groups[-1] + 1 if groups else 0)
            held, largest = (new if is_block else None), alone
    return groups


def _gather_scheduler(
    program: Program, env: dict, options: Options, gathering: Sequence[Segment], params: Sequence
) -> GatherScheduler:
    computes, groups = [s.computes for s in gathering], gather_groups(gathering, options.comm.shared_bytes)
    given = {*program.invars, *(v for computation in program.shardwise for v in computation.scales)}
    return GatherScheduler(env, options, params, computes, groups, given, program.rows)


def _env(program: Program, args: Sequence, options: Options) -> dict:
    """Return the values with which a pass begins: the arguments, and quantised weights with their scales."""
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
    """Return all results and residuals. Results at `indices`, and residuals that `chosen` selects, pass one barrier."""
    results, (leaves, tree) = list(results), jax.tree.flatten(residuals)
    places = [i for i, x in enumerate(leaves) if chosen(x) and not isinstance(x, jax.Ref)]
    waited, (arrays,) = barrier([results[i] for i in indices], [leaves[i] for i in places])
    for values, where, new in ((results, indices, waited), (leaves, places, arrays)):
        for i, x in zip(where, new, strict=True):
            values[i] = x
    return results, jax.tree.unflatten(tree, leaves)


def weights_of(program: Program) -> set:
    """Return the segments' results that depend on parameters and on no rows. Their cotangents may stay partial sums."""
    has_none = lambda v: (rows := program.rows.get(v, NOWHERE)) is not None and not rows.places
    found: set = set()
    for segment in program.segments if program.rows else ():
        reads = segment.params or not found.isdisjoint(segment.others)
        if isinstance(segment, BlockSegment) and reads and not segment.has_rule:
            found.update(segment.results if all(map(has_none, [*segment.others, *segment.results])) else ())
    return found


def run_backward(
    program: Program,
    args: Sequence,
    residuals: Sequence,
    cotangents: Sequence,
    options: Options,
) -> list:
    """Run the backward pass, and return the cotangents of the arguments, given the `cotangents` of the results.

    Pass the same `program`, `args` and `options` as to `run_forward`, which returned the `residuals`. In `cotangents`
    and in the returned list, None stands for zeros.
    """
    env = _env(program, args, options)
    summed_later = {*program.invars} - program.experts | weights_of(program)
    grads = GradScheduler(env, options, frozenset(program.invars), summed_later)
    for atom, cotangent in zip(program.outs, cotangents, strict=True):
        if cotangent is not None and not compat.is_literal(atom):
            grads.add(atom, cotangent)
    pairs = [(s, r) for s, r in zip(program.segments, residuals, strict=True) if r is not None][::-1]
    gathering = [(s, r) for s, r in pairs if s.params]
    for segment, kept in gathering:
        if segment.operands:
            env.update(zip(segment.operands, kept.operands, strict=True))
    last = [segment.last_gather(kept) for segment, kept in gathering]
    gathers = _gather_scheduler(program, env, options, [segment for segment, _ in gathering], last)
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
    return [grads.cotangents.get(v) for v in program.invars]
