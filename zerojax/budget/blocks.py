"""Find the blocks of a loss, and let each block save the same share of the bytes that its backward pass reads.

A block is a function that `zerojax.block` marks, or the body of a `scan`. A block that contains a `jax.checkpoint` or
a `zerojax.remat_within` stays as it is, because the user has already decided what the block saves. `memory_of_blocks`
describes what the blocks save, offload and recompute.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from zerojax import compat, jaxprs, names, signatures
from zerojax.budget.graph import (
    Choice,
    Graph,
    choose_saved,
    flops_of,
    graph_of,
    is_array_atom,
    least_bytes,
    run_named,
    without_consts,
)
from zerojax.budget.remat import checkpointed
from zerojax.units import format_bytes, format_flops


class Block(NamedTuple):
    """A block of a loss."""

    line: str  # the line of the user's code that calls the block
    calls: int  # the number of times that one call of the loss runs the block
    jaxpr: Any  # the block's open jaxpr
    graph: Graph  # the graph of the values that the block's backward pass reads
    is_loop: bool  # whether the block is the body of a scan
    inputs: int  # bytes of the activations that one call takes as arguments; these are saved, too


class UsersBlock(NamedTuple):
    """A block that contains a `jax.checkpoint` or `remat_within`, or a call of one of these outside of blocks."""

    line: str
    calls: int
    jaxpr: Any


class Blocks:
    """The blocks of one loss. Each call of a function that `rematerialised` or `observed` returned finds them anew.

    Blocks in `decided` stay as they are, because the user has decided what these blocks save. Blocks with equal jaxprs
    share one graph, so only the first of them is analysed.
    """

    def __init__(self):
        self.found: list[Block] = []
        self.decided: list[UsersBlock] = []
        self._graphs: dict[Any, tuple[Any, Graph]] = {}
        self._choices: dict[tuple[int, bool, float], Choice] = {}

    def choice(self, block: Block, share: float) -> Choice:
        """Return the values that a block saves if it may save `share` of its bytes.

        If `share` is 0, only the results of collectives are saved. If it is 1, all values that the backward pass reads
        are saved. Any other `share` is a share of `Graph.kept`, because XLA recomputes elementwise functions of saved
        values by itself. In a loop, XLA does not recompute these functions, so `share` is a share of `Graph.bytes`,
        and a value is not saved if copying it would take longer than recomputing it.
        """
        key = id(block.graph), block.is_loop, share
        if key not in self._choices:
            least = least_bytes(block.graph)
            most = block.graph.bytes if block.is_loop else block.graph.kept
            budget = least + int(share * max(most - least, 0))
            choice = choose_saved(block.graph, budget, in_loop=block.is_loop)
            if share == 1:
                choice = dataclasses.replace(choice, saved_bytes=block.graph.bytes, flops=0)
            self._choices[key] = choice
        return self._choices[key]

    def held_bytes(self, share: float) -> int:
        """Return the bytes of the blocks' values at the beginning of the backward pass, counted over all devices.

        These are the values that all calls have saved, plus what the backward pass of one call computes: recomputed
        values and cotangents. The call that computes the most bytes counts.
        """
        held = most = 0
        for block in self.found:
            # If everything is saved, XLA still keeps less outside of loops: it recomputes elementwise functions.
            whole = share == 1 and not block.is_loop
            saved = block.graph.kept if whole else self.choice(block, share).saved_bytes
            held += block.calls * (block.inputs + saved)
            most = max(most, self._computed(block, saved))
        return held + most

    def _computed(self, block: Block, saved: int) -> int:
        """Estimate the bytes that the backward pass of a call has in memory in addition to the saved values.

        These are the cotangent from the next block (as large as the inputs), and the recomputed values or the largest
        cotangent, whichever is larger: most recomputed values are freed before the largest cotangent is computed. A
        loop also copies the saved values of one iteration out of their stacks.
        """
        graph = block.graph
        return block.inputs + max(graph.kept - saved, graph.largest) + (min(saved, graph.kept) if block.is_loop else 0)

    def rematerialised(self, fn: Callable, share: float) -> Callable:
        """Return a function that computes the same as `fn`, and in which each block saves `share` of its bytes.

        The first argument of `fn` is differentiated. Each call of the returned function replaces `found` and `decided`.
        """

        @functools.wraps(fn)
        def run(*args, **kwargs):
            jaxpr, consts, arrays, structure = self._look(fn, args, kwargs)
            return jax.tree.unflatten(structure, self._evaluate(share, jaxpr, consts, *arrays))

        return run

    def observed(self, fn: Callable) -> Callable:
        """Return a function that computes the same as `fn`, and whose calls also replace `found` and `decided`."""

        @functools.wraps(fn)
        def run(*args, **kwargs):
            self._look(fn, args, kwargs)
            return fn(*args, **kwargs)

        return run

    def _look(self, fn: Callable, args: tuple, kwargs: dict) -> tuple[Any, Sequence, list, Any]:
        """Find the blocks in a call of `fn`. Return the call's jaxpr, constants, arguments and structure of results."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        traced = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | jax.core.Tracer)]

        def flat(*arrays):
            given = dict(zip(traced, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(structure, [given.get(i, x) for i, x in enumerate(leaves)])
            return fn(*args, **kwargs)

        arrays = [leaves[i] for i in traced]
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        jaxpr, consts = compat.opened(closed)
        params = len(jax.tree.leaves(args[0]))
        active = [var for i, var in zip(traced, jaxpr.invars, strict=True) if i < params]
        every = list(self._find(jaxpr, 1, active, [var for var in jaxpr.invars if var not in active]))
        self.found = [block for block in every if isinstance(block, Block)]
        self.decided = [block for block in every if isinstance(block, UsersBlock)]
        return jaxpr, consts, arrays, jax.tree.structure(shapes)

    def _find(self, jaxpr: Any, calls: int, active: Sequence, data: Sequence) -> Iterator[Block | UsersBlock]:
        """Yield the blocks of a jaxpr that runs `calls` times.

        `active` has the arguments that are differentiated, and `data` has the arguments that depend on the batch.
        Blocks without cotangents, such as a scan over data alone, save nothing and are left out.
        """
        passes_on = lambda eqn, reads: eqn.outvars if reads and eqn.primitive.name != "stop_gradient" else ()
        moved = jaxprs.dependent_on(active, jaxpr.eqns, passes_on)
        of_data = jaxprs.dependent_on(data, jaxpr.eqns, passes_on)
        for eqn in jaxpr.eqns:
            is_active = [not compat.is_literal(atom) and atom in moved for atom in eqn.invars]
            if not any(is_active):
                continue
            (part, inner), loop = part_of_loss(eqn), compat.loop_of(eqn)
            is_data = [not compat.is_literal(atom) and atom in of_data for atom in eqn.invars]
            times = calls if loop is None else calls * loop.length
            if part is Block:
                # The arguments of the loss, and the arrays that a loop slices, are in memory anyway.
                in_loop = () if loop is None else eqn.invars[loop.consts : loop.consts + loop.carry]
                given = jaxpr.invars if loop is None else [v for v in eqn.invars if not any(v is c for c in in_loop)]
                inputs = [v for v, on in zip(eqn.invars, is_data, strict=True) if on and not any(v is g for g in given)]
                sizes = [jaxprs.nbytes(var) for var in inputs if jaxprs.differentiable(var.aval.dtype)]
                yield Block(compat.line_of(eqn), times, inner, self._graph(inner), loop is not None, sum(sizes))
            elif part is UsersBlock:
                yield UsersBlock(compat.line_of(eqn), times, inner)
            elif inner is not None:
                chosen = lambda flags, inner=inner: [v for v, on in zip(inner.invars, flags, strict=True) if on]
                yield from self._find(inner, calls, chosen(is_active), chosen(is_data))

    def _graph(self, jaxpr: Any) -> Graph:
        key = signatures.signature(jaxpr)
        key = id(jaxpr) if key is None else key
        if key not in self._graphs:
            whole, avals = without_consts(jaxpr)
            # The jaxpr is kept, because its `id` may be the key.
            self._graphs[key] = jaxpr, graph_of(whole, (), avals)
        return self._graphs[key][1]

    def _evaluate(self, share: float, jaxpr: Any, consts: Sequence, *args: Any) -> list:
        """Evaluate a jaxpr so that each block in it saves `share` of the block's bytes."""
        blocks = {id(block.jaxpr): block for block in self.found}

        def is_changed(eqn: Any) -> bool:
            part, inner = part_of_loss(eqn)
            return id(inner) in blocks or (part is None and inner is not None and any(map(is_changed, inner.eqns)))

        def rule(eqn, values):
            if share == 1 or not is_changed(eqn):
                return None
            if (block := blocks.get(id(part_of_loss(eqn)[1]))) is None:
                return jaxprs.evaluate_call(eqn, values, rule)
            loop, (body, consts) = compat.loop_of(eqn), _opened_body(eqn)
            run = functools.partial(run_named, body)
            run = checkpointed(run, self.choice(block, share), prevent_cse=loop is None)
            return run(consts, *values) if loop is None else loop.evaluate(lambda values: run(consts, *values), values)

        return jaxprs.evaluate(jaxpr, consts, args, rule)


def _opened_body(eqn: Any) -> tuple[Any, Sequence]:
    loop = compat.loop_of(eqn)
    return compat.opened(compat.called(eqn) if loop is None else loop.body)


def part_of_loss(eqn: Any) -> tuple[type | None, Any]:
    """Return `Block`, `UsersBlock` or None (no block) for an equation, and the open jaxpr inside the equation.

    For an equation that is no block, the jaxpr is that of a call, which may contain blocks. It is None if the equation
    is not a call, or if the call constrains shardings and so cannot be inlined. A block with refs gives `(None, None)`,
    because `BlockMemory` cannot describe refs.
    """
    if compat.is_remat(eqn):
        inputs = list(dict.fromkeys(jaxprs.variables_in(eqn.invars)))
        part, jaxpr = UsersBlock, compat.part_of(compat.inlined_body(eqn), [eqn], inputs, eqn.outvars)
    elif compat.loop_of(eqn) is not None or names.is_block(eqn):
        jaxpr, _ = _opened_body(eqn)
        part = UsersBlock if any(map(compat.is_remat, jaxprs.equations(jaxpr))) else Block
    else:
        shardings = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
        is_constrained = any(isinstance(s, jax.sharding.Sharding) for s in shardings)
        called = None if is_constrained else compat.called(eqn)
        return None, None if called is None else compat.opened(called)[0]
    has_refs = any(compat.is_ref(atom) for e in jaxprs.equations(jaxpr) for atom in [*e.invars, *e.outvars])
    return (None, None) if has_refs else (part, jaxpr)


@dataclasses.dataclass(frozen=True)
class BlockMemory:
    """What equal blocks save and recompute. Bytes and FLOPs are per call and device.

    Attributes:
        line: The line of the user's code that calls the block.
        calls: The number of calls in one evaluation of the loss.
        saved: Bytes that a call saves on the device for the backward pass, without the block's arguments.
        offloaded: Bytes that a call saves in host memory.
        recomputed: Bytes of the other values that the backward pass reads.
        flops: FLOPs that the backward pass repeats to recompute these values.
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

    Bytes and FLOPs of a call are divided by the number `devices`.
    """
    found = dict[Any, tuple[int, ...]]()  # the figures of the user's blocks, by signature
    calls = collections.Counter[tuple[str, tuple[int, ...]]]()
    for block in blocks.found:
        choice = blocks.choice(block, share)
        figures = choice.saved_bytes, 0, block.graph.bytes, choice.flops, choice.most_flops
        calls[block.line, figures] += block.calls
    for block in blocks.decided:
        signature = signatures.signature(block.jaxpr, functions=False)
        key = id(block.jaxpr) if signature is None else signature
        found[key] = found.get(key) or _figures(block.jaxpr)
        calls[block.line, found[key]] += block.calls
    return tuple(
        BlockMemory(
            line=line,
            calls=count,
            saved=saved // devices,
            offloaded=offloaded // devices,
            recomputed=max(most - saved - offloaded, 0) // devices,
            flops=flops // devices,
            share=flops / max(all_flops, 1),
        )
        for (line, (saved, offloaded, most, flops, all_flops)), count in calls.items()
    )


def table_lines(blocks: Sequence[BlockMemory]) -> Iterator[tuple[str, ...]]:
    if blocks:
        yield "", "saved", "offloaded", "recomputed", "repeated", "of FLOPs"
    for b in blocks:
        sizes = [format_bytes(size) for size in (b.saved, b.offloaded, b.recomputed)]
        yield f"{b.calls} x {b.line}", *sizes, format_flops(b.flops), f"{b.share:.0%}"


def _figures(jaxpr: Any) -> tuple[int, ...]:
    """Describe a user's block by five numbers, from the block's gradients with and without its `jax.checkpoint`.

    The numbers are:

    - the bytes saved on the device, and the bytes saved in host memory;
    - the bytes that the backward pass reads;
    - the FLOPs that the `jax.checkpoint` repeats, and the FLOPs that compute all values that the backward pass reads.
    """
    whole, avals = without_consts(jaxpr)
    own = functools.partial(jaxprs.inline_calls, whole, ())
    inlined = lambda eqn, values: jaxprs.evaluate_call(eqn, values, inlined) if compat.inlined_body(eqn) else None
    plain = lambda *args: jaxprs.evaluate(whole, (), args, inlined)

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(own, *args)[1])

    traced = compat.opened(jax.make_jaxpr(residuals)(*avals))[0]
    kept = {var for var in jaxprs.variables_in(traced.outvars) if var not in {*traced.invars} and is_array_atom(var)}
    host = sum(jaxprs.nbytes(var) for var in kept if compat.in_host_memory(var.aval))
    graph = graph_of(*compat.opened(jax.make_jaxpr(plain)(*avals)), avals)
    flops = _flops_of_gradient(own, avals) - _flops_of_gradient(plain, avals)
    return sum(map(jaxprs.nbytes, kept)) - host, host, graph.bytes, max(flops, 0), sum(e.flops for e in graph.equations)


def _flops_of_gradient(fn: Any, avals: Sequence) -> int:
    def both(*args):
        results, pull = jax.vjp(fn, *args)
        ones = lambda x: jnp.ones_like(x) if jaxprs.differentiable(x.dtype) else np.zeros(x.shape, jax.dtypes.float0)
        return results, [x for x in pull(jax.tree.map(ones, results)) if x.dtype != jax.dtypes.float0]

    return sum(map(flops_of, jaxprs.alive(compat.opened(jax.make_jaxpr(both)(*avals))[0])))
