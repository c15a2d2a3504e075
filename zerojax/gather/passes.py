"""Run a program forward, and backward over what the forward pass kept.

The loss is differentiated here, segment by segment, and not by JAX as a whole: only so
can the backward pass gather each parameter again at a time of our choosing, and start
the gather for the next segment while this one computes.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence, Set

import jax

from zerojax import compat
from zerojax.gather import collectives, scan
from zerojax.gather import scan_backward as scan_back
from zerojax.gather.residuals import Kept, Static
from zerojax.gather.schedule import Gathers, GradScheduler, Options, add, pulled
from zerojax.gather.segments import Program, Segment, Whole
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import Passes, differentiable, passes


def run_forward(program: Program, args: Sequence, active: Sequence[bool] | None, options: Options):
    """Run a program.

    Args:
        program: What to run.
        args: One array for each of its arguments.
        active: For each argument, whether its cotangent is wanted; None if there is no backward pass.
        options: How to gather.

    Returns:
        `(results, kept)`; `kept` has one entry a segment, None where there is nothing to pull back.
    """
    env: dict = dict(zip(program.invars, args, strict=True))
    live = {v for v, on in zip(program.invars, active or (), strict=False) if on and differentiable(v.aval.dtype)}
    gathering = [s for s in program.segments if s.weights]
    order = [scan.first_weights(s) if s.kind == "scan" else s.weights for s in gathering]
    gathers = Gathers(order, [s.computes for s in gathering], options)
    kept = []
    for segment in program.segments:
        moving = live.intersection([*segment.others, *(w.root for w in segment.weights)])
        live.update(_live_results(segment, moving))
        if not segment.weights:
            results, keep = _plain_forward(segment, env, live) if moving else (_run(segment, env), None)
        else:
            last = segment is gathering[-1]
            forward = scan.forward if segment.kind == "scan" else _block_forward
            position = gathering.index(segment)
            anchors = [v for v in segment.others if v not in program.invars][-1:]
            results, keep = forward(segment, env, anchors, moving, gathers, position, last)
            results = gathers.finish(position, results)
        if kept and kept[-1] is not None:
            results, kept[-1] = _once_offloaded(results, kept[-1])
        env.update(zip(segment.results, results, strict=True))
        kept.append(keep)
    return [env[a] if isinstance(a, Whole) or not compat.is_literal(a) else a.val for a in program.outs], kept


def _once_offloaded(results: Sequence, keep: Kept) -> tuple[list, Kept]:
    """The results of a segment, once what the segment before it offloads to the host has left the device.

    A scheduler puts the transfer off else until it is due back, and nothing is saved.
    """
    leaves, tree = jax.tree.flatten(keep.arrays)
    hosted = [i for i, x in enumerate(leaves) if compat.in_host_memory(jax.typeof(x))]
    results, (sent,) = collectives.tie(results, [leaves[i] for i in hosted])
    for i, x in zip(hosted, sent, strict=True):
        leaves[i] = x
    return results, dataclasses.replace(keep, arrays=jax.tree.unflatten(tree, leaves))


def _run(segment: Segment, env: Mapping) -> list:
    return segment.run((), [env[v] for v in segment.others])


def _live_results(segment: Segment, moving: Set) -> list:
    """Results that may depend on something that wants a cotangent."""
    keys = [*(w.root for w in segment.weights), *segment.others]
    live = {v for v, key in zip(segment.jaxpr.invars, keys, strict=True) if key in moving}
    for eqn in segment.jaxpr.eqns:
        reads = any(not compat.is_literal(a) and a in live for a in eqn.invars)
        if reads and eqn.primitive.name != "stop_gradient":
            live.update(v for v in eqn.outvars if differentiable(v.aval.dtype))
    return [key for key, v in zip(segment.results, segment.jaxpr.outvars, strict=True) if v in live]


def _plain_forward(segment: Segment, env: Mapping, live: Set) -> tuple[list, Kept]:
    others = [env[v] for v in segment.others]
    moving = [i for i, v in enumerate(segment.others) if v in live]
    moved = [i for i, key in enumerate(segment.results) if key in live]

    def of_moving(values):
        inputs = list(others)
        for i, value in zip(moving, values, strict=True):
            inputs[i] = value
        results = segment.run((), inputs)
        return [results[i] for i in moved], results

    _, backward, results = jax.vjp(of_moving, [others[i] for i in moving], has_aux=True)
    return results, Kept(backward, [], [], Static((moved, moving)))


def _block_forward(
    segment: Segment,
    env: MutableMapping,
    anchors: Sequence,
    moving: Set,
    gathers: Gathers,
    position: int,
    last: bool,
) -> tuple[list, Kept | None]:
    """Run a block; `moving` are the variables it reads, and roots of its weights, that want cotangents."""
    whole, (tied,) = gathers.take(position, env, [env[v] for v in anchors])
    env.update(zip(anchors, tied, strict=True))
    others = [env[v] for v in segment.others]
    if not moving:
        return segment.run(whole, others), None
    trained = [w.root in moving for w in segment.weights]
    two = passes(segment.run, whole, others, trained=trained, active=[v in moving for v in segment.others])
    results, saved = two.run(whole, others)
    read = {i for pool, i in two.sources if pool == "other"}
    arrays = saved, [x if i in read else None for i, x in enumerate(others)]
    operands = [env[v] for w in segment.weights for v in w.operands]
    # Between the last use and its backward pass lies only the loss: dropping would save nothing.
    stays = last or not gathers.options.reshard_after_forward
    whole = [w if i in two.needed else None for i, w in enumerate(whole)] if stays else []
    return results, Kept(arrays, operands, whole, Static(two))


def run_backward(
    program: Program, args: Sequence, active: Sequence[bool], kept: Sequence, cotangents: Sequence, options: Options
) -> list:
    """Pull cotangents back through a program.

    Args:
        program: As in `run_forward`.
        args: As in `run_forward`.
        active: As in `run_forward`.
        kept: As `run_forward` gave it.
        cotangents: One for each result; None where it is zero.
        options: As in `run_forward`.

    Returns:
        One cotangent for each argument; None where it is zero.
    """
    env: dict = dict(zip(program.invars, args, strict=True))
    found: dict = {}
    for atom, cotangent in zip(program.outs, cotangents, strict=True):
        if cotangent is not None and (isinstance(atom, Whole) or not compat.is_literal(atom)):
            add(found, atom, cotangent)
    pairs = [(s, k) for s, k in zip(program.segments, kept, strict=True) if k is not None][::-1]
    for segment, keep in pairs:
        env.update(zip([v for w in segment.weights for v in w.operands], keep.operands, strict=True))
    gathering = [(s, k) for s, k in pairs if s.weights]
    gathers = Gathers([_regathered(s, k) for s, k in gathering], [s.computes for s, _ in gathering], options)
    returns = GradScheduler(env, found, options, frozenset(program.invars))
    position = 0
    for segment, keep in pairs:
        if not segment.weights:
            _plain_backward(segment, keep, found)
            continue
        if segment.kind == "scan":
            given, backward = scan_back.pulled(segment, keep, found), scan_back.backward
        else:
            given, backward = _block_pulled(segment, keep, found), _block_backward
        if given is not None:
            backward(segment, keep, given, gathers, position, returns)
        position += 1
    returns.finish()
    wanted = [v if on else None for v, on in zip(program.invars, active, strict=True)]
    return [found.get(v) if v is not None else None for v in wanted]


def _regathered(segment: Segment, keep: Kept) -> Sequence[ShardedParam]:
    """What the backward pass of a segment has to have gathered when it starts."""
    if segment.kind == "scan":
        return scan.last_weights(segment, keep)
    return [] if keep.whole else [w for i, w in enumerate(segment.weights) if i in keep.passes.value.needed]


def _plain_backward(segment: Segment, keep: Kept, found: MutableMapping) -> None:
    moved, moving = keep.passes.value
    variables = [segment.jaxpr.outvars[i] for i in moved]
    cotangents = pulled([segment.results[i] for i in moved], variables, found)
    if cotangents is None:
        return
    (to_inputs,) = keep.arrays(cotangents)
    for index, cotangent in zip(moving, to_inputs, strict=True):
        add(found, segment.others[index], cotangent)


def _block_pulled(segment: Segment, keep: Kept, found: Mapping) -> list | None:
    active = keep.passes.value.active_results
    return pulled([segment.results[i] for i in active], [segment.jaxpr.outvars[i] for i in active], found)


def _block_backward(
    segment: Segment, keep: Kept, cotangents: Sequence, gathers: Gathers, position: int, returns: GradScheduler
) -> None:
    two: Passes = keep.passes.value
    regathered, (cotangents, *due) = gathers.take(position, returns.env, cotangents, *returns.due)
    returns.settle(*due)
    whole: list = list(keep.whole) or [None] * len(segment.weights)
    if not keep.whole:
        for index, value in zip(sorted(two.needed), regathered, strict=True):
            whole[index] = value
    saved, others = keep.arrays
    zero = None if segment.computes else collectives.zero_after(cotangents)
    to_weights, to_others = two.pull(whole, others, saved, cotangents, zero)
    to_others = gathers.finish(position, to_others)
    returns.give_others([segment.others[i] for i in two.active_others], to_others)
    returns.give([segment.weights[i] for i in two.active_weights], to_weights, covered=gathers.covers_after(position))
