"""Run a scan over layers as a segment: stacked parameters stay sharded until the iteration that uses them.

The rule "loop over layers" makes this segment. Each pass carries the gathered parameters of one iteration while it
gathers the parameters of the next iteration, so that compute hides the gather. Plain autodiff would store this carry of
every iteration for the backward pass, and so every gathered layer. So the engine writes both passes as loops, and each
iteration writes its results and residuals in place into stacks. The backward loop (`scan_backward`) reduce-scatters the
gradients of one iteration while it computes the next one.

The last iteration has nothing to gather. It is peeled, so it runs after the loop, and the next segment's gathers start
together with it. A clamped index would avoid the peeling, but would gather one layer twice in each pass.

The first iteration is peeled, too. Its layers are gathered outside of the loop, and XLA overlaps a collective only with
work in the same computation. If there are two iterations, the first is not peeled. The loop then has only this
iteration, and XLA inlines a loop of one iteration.
"""

import dataclasses
import functools
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, names
from zerojax.gather import scan_backward
from zerojax.gather.loop import LayerGathers, Loop
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.segments import BlockResiduals, Segment
from zerojax.gather.sharded_param import ShardedParam, bytes_of, carried_by
from zerojax.gather.vjp import KnownRows, Passes, traced_passes

# What an iteration passes to the next one: the carry, the gathered layers of the next iteration (without prefetch, no
# layers), and stacks of the rows that the iterations have written (`Forward.rows`).
ForwardState = tuple[list, list, tuple]


@dataclasses.dataclass(frozen=True)
class Forward:
    """One scan segment's forward pass."""

    loop: Loop
    passes: Passes | None  # of the loop's body; None if there is no backward pass
    layers: LayerGathers
    shared: Sequence  # gathered parameters that every iteration uses
    consts: Sequence
    slices: Sequence  # stacks of which each iteration reads a row
    ahead: bool  # whether each iteration gathers for the next iteration

    def iterate(self, state: ForwardState, iteration, *, fetch: bool, peeled: bool) -> ForwardState:
        """Run one iteration. If `fetch` is true, also gather the layers of the next iteration."""
        carry, gathered, stacks = state
        if not self.ahead:
            gathered, carry = self.layers.gather(iteration, carry)
        following = gathered
        if fetch:
            # In the loop, a gather cannot leave its iteration. In a peeled iteration, the gather waits for the carry.
            following, behind = self.layers.gather(iteration + 1, carry if peeled else [])
            carry = behind if peeled else carry
        carry, rows = self.rows(iteration, carry, gathered)
        stacks = jax.tree.map(lambda stack, row: self.loop.write(stack, row, iteration), stacks, rows)
        return carry, following if self.ahead else [], stacks

    def rows(self, iteration, carry: Sequence, gathered: Sequence) -> tuple[list, tuple]:
        """Compute one iteration, and return `(carry, rows)`. Each row becomes one entry of a stack.

        The rows are results, saved residuals, the carry at the start, and the gathered layers if these are kept.
        """
        loop, passes = self.loop, self.passes
        others = [*self.consts, *carry, *(loop.row(x, iteration) for x in self.slices)]
        if passes is None:
            results = loop.run([*self.shared, *gathered], others)
            return results[: loop.carry], (results[loop.carry :], [], [], [])
        results, saved = passes.run([*self.shared, *gathered], others)
        carried = [c if i + loop.consts in passes.needed_others else None for i, c in enumerate(carry)]
        kept = [] if self.layers.options.reshard_after_forward else gathered
        kept = [x if i + len(self.shared) in passes.needed else None for i, x in enumerate(kept)]
        return results[: loop.carry], (results[loop.carry :], saved, carried, kept)

    def start(self, carry: list, gathered: list) -> ForwardState:
        # `jax.eval_shape` would not say which rows are in host memory.
        closed, shapes = jax.make_jaxpr(lambda *args: self.rows(0, *args)[1], return_shape=True)(carry, gathered)
        stacks = [_empty(var.aval, self.loop.length) for var in compat.opened(closed)[0].outvars]
        stacks = jax.tree.unflatten(jax.tree.structure(shapes), stacks)
        return carry, gathered if self.ahead else [], stacks


@dataclasses.dataclass(frozen=True)
class ScanSegment(Segment):
    """A loop in which each iteration gathers its own layers."""

    @functools.cached_property
    def loop(self) -> Loop:
        return Loop.of(self.jaxpr, self.params)

    def entered(self, *transforms: str) -> Any:
        return names.at(self.jaxpr.eqns[0], *transforms)

    @property
    def first_gather(self) -> Sequence[ShardedParam]:
        return self.loop.params_of(0)

    def last_gather(self, residuals: BlockResiduals) -> Sequence[ShardedParam]:
        if residuals.gathered is not None:
            return []
        last = self.loop.params_of(self.loop.length - 1)
        return [param for i, param in enumerate(last) if i in residuals.passes.needed]

    @property
    def gathered_bytes(self) -> list[int]:
        """Return the gathered bytes of two iterations, because at most two are gathered at once."""
        return [bytes_of(self.first_gather)] * min(self.loop.length, 2)

    @property
    def stacks(self) -> Sequence[ShardedParam]:
        return self.loop.stacked

    @property
    def waits_for_next(self) -> bool:
        """Return whether the iterations gather layers; see `Segment`."""
        # If the iterations gather nothing, the whole loop can hide the next segment's gathers. When the loop's results
        # waited for these gathers, XLA ended half of the gathers before the loop.
        return bool(self.loop.stacked)

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        loop, env, options, length = self.loop, gathers.env, gathers.options, self.loop.length
        ahead = options.prefetch > 0 and bool(loop.stacked)
        entry, others = self.take_inputs(gathers, ahead=not loop.stacked)
        consts, carry, slices = loop.values(others)
        layers = LayerGathers(loop, options, [p.sliced(env) for p in loop.stacked], range(len(loop.stacked)))
        shared, gathered = entry[: len(loop.shared)], entry[len(loop.shared) :]
        passes = self._passes(entry, [*consts, *carry], slices, moving, gathers) if moving else None
        run = Forward(loop, passes, layers, shared, consts, slices, ahead)

        def body(state, iteration):
            return run.iterate(state, iteration, fetch=ahead, peeled=False), None

        state = run.start(carry, gathered)
        first = int(ahead and length > 2)  # Whether the first iteration is peeled; see the module.
        if first:
            state = run.iterate(state, 0, fetch=True, peeled=True)
        inside = length - ahead - first
        if inside > 0:
            state, _ = lax.scan(body, state, jnp.arange(first, length - ahead), unroll=min(loop.eqn.unroll, inside))
        if ahead:
            if length > 1:
                rows = loop.rows_inside(gathers.rows_of(self.others), options.comm.follower)
                (carry,) = gathers.start(state[0], rows=rows[loop.consts :][: loop.carry])
                state = carry, *state[1:]
            state = run.iterate(state, length - 1, fetch=False, peeled=True)
        carry, _, (ys, saved, carried, kept) = state
        results = [[*carry, *ys][i] for i in loop.results]
        if passes is None:
            return results, None
        given = [*consts, *[None] * loop.carry, *slices]
        given = [x if i in passes.needed_others else None for i, x in enumerate(given)]
        operands = [env[v] for v in self.operands]
        stays = None if options.reshard_after_forward else (shared, kept)
        return results, BlockResiduals((saved, carried), given, operands, stays, passes)

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        scan_backward.backward(self, self.loop, residuals, gathers, grads)

    def _passes(self, entry, others, slices, moving: Set, gathers: GatherScheduler) -> Passes:
        """Return the body's passes. Every carry is active: a later iteration may make it depend on an active input."""
        loop = self.loop
        active = [index is not None and self.others[index] in moving for index in loop.others]
        active[loop.consts : loop.consts + loop.carry] = [True] * loop.carry
        trained = [p.root in moving for p in loop.params]
        rows = [jax.eval_shape(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), x) for x in slices]
        comm = gathers.options.comm
        inside = loop.rows_inside(gathers.rows_of(self.others), comm.follower)
        known = KnownRows(inside, (), comm.follower, comm)
        return traced_passes(
            loop.run,
            entry,
            [*others, *rows],
            trained=trained,
            active=active,
            rows=known,
            carried=carried_by(loop.params),
        )


def _empty(row, length: int) -> jax.Array:
    if compat.in_host_memory(row):
        from zerojax import internals

        return internals.host_buffer((length, *row.shape), row.dtype)
    return jnp.zeros((length, *row.shape), row.dtype)
