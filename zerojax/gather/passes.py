"""Run a program forward, and backward over the residuals of the forward pass."""

from collections.abc import Sequence

import jax

from zerojax import compat
from zerojax.comm.barriers import barrier
from zerojax.gather.program import Program
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Options
from zerojax.gather.segments import Gathered
from zerojax.gather.vjp import differentiable


def run_forward(program: Program, args: Sequence, active: Sequence[bool] | None, options: Options) -> tuple[list, list]:
    """Run a program.

    Args:
        program: What to run.
        args: One array for each of its arguments.
        active: For each argument, whether its cotangent is wanted; None if there is no backward pass.
        options: How to gather.

    Returns:
        `(results, residuals)`, one residual a segment, None where there is nothing to pull back.
    """
    env: dict = dict(zip(program.invars, args, strict=True))
    live = {v for v, on in zip(program.invars, active or (), strict=False) if on and differentiable(v.aval.dtype)}
    gathering = [segment for segment in program.segments if segment.params]
    order = [segment.first_gather for segment in gathering]
    gathers = GatherScheduler(env, program.invars, order, [segment.computes for segment in gathering], options)
    residuals: list = []
    for segment in program.segments:
        moving = live.intersection(segment.sources)
        live.update(segment.live_results(moving))
        results, new = segment.forward(gathers, moving)
        if segment.params:
            results = gathers.finish(results)
            gathers.position += 1
        if residuals and residuals[-1] is not None:
            results, residuals[-1] = _after_offload(results, residuals[-1])
        env.update(zip(segment.results, results, strict=True))
        residuals.append(new)
    return [env[a] if isinstance(a, Gathered) or not compat.is_literal(a) else a.val for a in program.outs], residuals


def _after_offload(results: Sequence, residuals) -> tuple:
    """The results of a segment, once the residuals of the one before that are offloaded have left the device.

    Otherwise XLA delays the copy, and no memory is freed.
    """
    leaves, tree = jax.tree.flatten(residuals)
    offloaded = [i for i, x in enumerate(leaves) if compat.in_host_memory(jax.typeof(x))]
    results, (copies,) = barrier(results, [leaves[i] for i in offloaded])
    for i, x in zip(offloaded, copies, strict=True):
        leaves[i] = x
    return results, jax.tree.unflatten(tree, leaves)


def run_backward(
    program: Program,
    args: Sequence,
    active: Sequence[bool],
    residuals: Sequence,
    cotangents: Sequence,
    options: Options,
) -> list:
    """Pull cotangents back through a program.

    Args:
        program: As in `run_forward`.
        args: As in `run_forward`.
        active: As in `run_forward`.
        residuals: As `run_forward` returned them.
        cotangents: One for each result; None where it is zero.
        options: As in `run_forward`.

    Returns:
        One cotangent for each argument; None where it is zero.
    """
    env: dict = dict(zip(program.invars, args, strict=True))
    grads = GradScheduler(env, program.invars, options)
    for atom, cotangent in zip(program.outs, cotangents, strict=True):
        if cotangent is not None and (isinstance(atom, Gathered) or not compat.is_literal(atom)):
            grads.add(atom, cotangent)
    pairs = [(s, r) for s, r in zip(program.segments, residuals, strict=True) if r is not None][::-1]
    gathering = [(s, r) for s, r in pairs if s.params]
    for segment, kept in gathering:
        env.update(zip(segment.operands, kept.operands, strict=True))
    order = [segment.last_gather(kept) for segment, kept in gathering]
    gathers = GatherScheduler(env, program.invars, order, [segment.computes for segment, _ in gathering], options)
    for segment, kept in pairs:
        segment.backward(kept, gathers, grads)
        gathers.position += bool(segment.params)
    grads.finish()
    return [grads.cotangents.get(v) if on else None for v, on in zip(program.invars, active, strict=True)]
