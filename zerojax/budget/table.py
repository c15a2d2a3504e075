"""Describe what the blocks of a loss save, offload and recompute, for `zerojax.plan` and `MemoryFit`."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import compat, jaxprs, signatures
from zerojax.budget.blocks import Blocks
from zerojax.budget.graph import flops_of, graph_of, is_array_atom
from zerojax.units import format_bytes, format_flops


@dataclasses.dataclass(frozen=True)
class BlockMemory:
    """What equal blocks save and recompute. Bytes and FLOPs are per call and device.

    Attributes:
        line: The line of the user's code that calls the block.
        calls: The number of calls in one evaluation of the loss.
        saved: Bytes that a call saves on the device for the backward pass, without the block's arguments.
        offloaded: Bytes that a call saves in host memory.
        recomputed: Bytes of the other values that the backward pass reads.
        flops: FLOPs that the backward pass repeats to recompute them.
        share: `flops` as a share of the FLOPs that compute all values that the backward pass reads.
    """

    line: str
    calls: int
    saved: int
    offloaded: int
    recomputed: int
    flops: int
    share: float


def memory_of_blocks(blocks: Blocks, share: float, devices: int) -> tuple[BlockMemory, ...]:
    """Return what the blocks of a loss save if each saves `share` of its bytes, in the order of their first calls.

    Bytes and FLOPs of a block are divided over the `devices`.
    """
    calls, figures = collections.Counter[tuple[Any, str]](), dict[tuple[Any, str], _Figures]()
    for key, block in [(id(block.graph), block) for block in blocks.found]:
        choice = blocks.choice(block, share)
        calls[key, block.line] += block.calls
        figures[key, block.line] = choice.saved_bytes, 0, block.graph.bytes, choice.flops, choice.most_flops
    for block in blocks.decided:
        signature = signatures.signature(block.jaxpr, functions=False)
        key = id(block.jaxpr) if signature is None else signature, block.line
        calls[key] += block.calls
        if key not in figures:
            figures[key] = _figures(block.jaxpr)
    equal = collections.Counter[BlockMemory]()  # such as blocks that differ only in an argument's weak type
    for (key, line), (saved, offloaded, most, flops, all_flops) in figures.items():
        described = BlockMemory(
            line=line,
            calls=0,
            saved=saved // devices,
            offloaded=offloaded // devices,
            recomputed=max(most - saved - offloaded, 0) // devices,
            flops=flops // devices,
            share=flops / max(all_flops, 1),
        )
        equal[described] += calls[key, line]
    return tuple(dataclasses.replace(described, calls=count) for described, count in equal.items())


def table_lines(blocks: Sequence[BlockMemory]) -> Iterator[tuple[str, ...]]:
    if blocks:
        yield "", "saved", "offloaded", "recomputed", "repeated", "of FLOPs"
    for b in blocks:
        sizes = [format_bytes(size) for size in (b.saved, b.offloaded, b.recomputed)]
        yield f"{b.calls} x {b.line}", *sizes, format_flops(b.flops), f"{b.share:.0%}"


# Bytes saved on the device, bytes saved in host memory, bytes that the backward pass reads, FLOPs that it repeats, and
# FLOPs of all values that it reads.
_Figures = tuple[int, int, int, int, int]


def _figures(jaxpr: Any) -> _Figures:
    """Return the figures of a block from its backward pass, with and without its `jax.checkpoint`."""
    inputs = [*compat.constvars_of(jaxpr), *jaxpr.invars]
    avals = [var.aval for var in inputs]
    own = functools.partial(jaxprs.inline_calls, compat.part_of(jaxpr, jaxpr.eqns, inputs, jaxpr.outvars), ())
    plain = functools.partial(_without_remat, compat.part_of(jaxpr, jaxpr.eqns, inputs, jaxpr.outvars), ())

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(own, *args)[1])

    traced = compat.opened(jax.make_jaxpr(residuals)(*avals))[0]
    kept = {var for var in jaxprs.variables_in(traced.outvars) if var not in {*traced.invars} and is_array_atom(var)}
    host = sum(jaxprs.nbytes(var) for var in kept if compat.in_host_memory(var.aval))
    graph = graph_of(*compat.opened(jax.make_jaxpr(plain)(*avals)), avals)
    flops = _flops_of_gradient(own, avals) - _flops_of_gradient(plain, avals)
    return sum(map(jaxprs.nbytes, kept)) - host, host, graph.bytes, max(flops, 0), sum(e.flops for e in graph.equations)


def _without_remat(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    def rule(eqn, values):
        return None if compat.inlined_body(eqn) is None else jaxprs.evaluate_call(eqn, values, rule)

    return jaxprs.evaluate(jaxpr, consts, args, rule)


def _flops_of_gradient(fn: Any, avals: Sequence) -> int:
    def both(*args):
        results, pull = jax.vjp(fn, *args)
        ones = lambda x: jnp.ones_like(x) if jaxprs.differentiable(x.dtype) else np.zeros(x.shape, jax.dtypes.float0)
        return results, [x for x in pull(jax.tree.map(ones, results)) if x.dtype != jax.dtypes.float0]

    return sum(map(flops_of, jaxprs.alive(compat.opened(jax.make_jaxpr(both)(*avals))[0])))
