"""Run a program forward, and backward over the residuals of the forward pass."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.comm.barriers import barrier
from zerojax.gather.program import Program
from zerojax.gather.residuals import Fixed, Static
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Options, Uses
from zerojax.gather.segments import Gathered
from zerojax.gather.vjp import differentiable
from zerojax.offload.host import to_device


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
    env = _env(program, args)
    live = {v for v, on in zip(program.invars, active or (), strict=False) if on and differentiable(v.aval.dtype)}
    live.update(var for var, params in program.joined.items() if not live.isdisjoint(p.root for p in params))
    gathering = [segment for segment in program.segments if segment.params]
    computes = [segment.computes for segment in gathering]
    uses = Uses([segment.first_gather for segment in gathering], computes, frozenset(program.invars), program.rows)
    gathers = GatherScheduler(env, uses, options)
    residuals: list = []
    last_read = {v: i for i, segment in enumerate(program.segments) for v in segment.others}
    last_read |= dict.fromkeys(jaxprs.variables_in(program.outs), len(program.segments))
    ends = _ends(program)
    for index, segment in enumerate(program.segments):
        moving = live.intersection(segment.sources)
        live.update(segment.live_results(moving))
        results, new = segment.forward(gathers, moving)
        if segment.params:
            results = gathers.finish(results) if segment.waits_for_next else results
            gathers.position += 1
            results, new = _before_backward(results, [segment.results.index(v) for v in ends[index]], new)
        if residuals and residuals[-1] is not None:
            results, residuals[-1] = _after_offload(results, residuals[-1])
        env.update(zip(segment.results, results, strict=True))
        reached = segment.results if segment.params else [*gathers.frontier, *segment.after(gathers.frontier)]
        gathers.frontier = [v for v in reached if last_read.get(v, 0) > index]
        residuals.append(new)
    return [env[a] if isinstance(a, Gathered) or not compat.is_literal(a) else a.val for a in program.outs], residuals


def _env(program: Program, args: Sequence) -> dict:
    """Return the values of the variables that a pass begins with."""
    env = dict(zip(program.invars, args, strict=True))
    for var, params in program.joined.items():
        env[var] = jnp.stack([to_device(param.sliced(env)) for param in params])
    return env


def _ends(program: Program) -> list[list]:
    """Return, for each segment, the results that no later gathering segment needs."""
    needed: set = set()
    found = []
    for segment in reversed(program.segments):
        found.append([v for v in segment.results if v not in needed])
        needed.update(segment.others if segment.params else segment.behind(needed))
    return found[::-1]


def _before_backward(results: Sequence, ends: Sequence[int], residuals) -> tuple:
    """Return a segment's results, and its residuals delayed until the results at `ends` are computed.

    The backward pass of a loss that is summed up reads none of the summands. Otherwise XLA computes them behind it,
    and keeps what they read, gathered parameters among it, until then.
    """
    leaves, tree = jax.tree.flatten(residuals)
    waited, (leaves,) = barrier([results[i] for i in ends], leaves)
    values = {**dict(enumerate(results)), **dict(zip(ends, waited, strict=True))}
    return list(values.values()), jax.tree.unflatten(tree, leaves)


def _after_offload(results: Sequence, residuals) -> tuple:
    """Return a segment's results, delayed until the offloaded residuals of the segment before have left the device.

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
    env = _env(program, args)
    grads = GradScheduler(env, [*program.invars, *program.held], options)
    for atom, cotangent in zip(program.outs, cotangents, strict=True):
        if cotangent is not None and (isinstance(atom, Gathered) or not compat.is_literal(atom)):
            grads.add(atom, cotangent)
    pairs = [(s, r) for s, r in zip(program.segments, residuals, strict=True) if r is not None][::-1]
    gathering = [(s, r) for s, r in pairs if s.params]
    for segment, kept in gathering:
        if segment.operands:
            env.update(zip(segment.operands, kept.operands, strict=True))
    computes, last = [segment.computes for segment, _ in gathering], [s.last_gather(kept) for s, kept in gathering]
    gathers = GatherScheduler(env, Uses(last, computes, frozenset(program.invars), program.rows), options)
    for segment, kept in pairs:
        segment.backward(kept, gathers, grads)
        gathers.position += bool(segment.params)
        reached = segment.others if segment.params else [*gathers.frontier, *segment.behind(gathers.frontier)]
        gathers.frontier = [v for v in reached if v not in segment.results]
    grads.finish()
    for var, params in program.joined.items():
        for i, param in enumerate(params if var in grads.cotangents else ()):
            stack = grads.cotangents[var]  # perhaps of summands
            layer = jax.lax.index_in_dim(stack, i, stack.ndim - var.aval.ndim, keepdims=False)
            grads.add(param.root, grads.root_grad(param, layer))
    return [grads.cotangents.get(v) if on else None for v, on in zip(program.invars, active, strict=True)]


def as_function(program: Program, options: Options, zeros: Mapping[int, jax.ShapeDtypeStruct]) -> Callable:
    """Return the program as a function of its arguments and stand-ins, with its own backward pass."""
    count = len(program.invars)

    @jax.custom_vjp
    def run(*args):
        return run_forward(program, args[:count], None, options)[0]

    def forward(*args):
        active = [arg.perturbed for arg in args[:count]]
        for place, stand_in in zip(zeros, args[count:], strict=True):
            active[place] = stand_in.perturbed
        values = [arg.value for arg in args[:count]]
        results, kept = run_forward(program, values, active, options)
        return results, (values, kept, Fixed(Static(active)))

    def backward(residuals, cotangents):
        args, kept, fixed = residuals
        active = fixed.static.value
        given = [None if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents]
        grads = run_backward(program, args, active, kept, given, options)
        summed = lambda x, var: x if x is None or x.ndim == var.aval.ndim else x.sum(0)  # of per-worker partial sums
        pairs = enumerate(zip(grads, program.invars, strict=True))
        own = [None if i in zeros else summed(x, var) for i, (x, var) in pairs]
        for_zeros = [None if grads[i] is None else options.comm.like(grads[i], x) for i, x in zeros.items()]
        return (*own, *for_zeros)

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
