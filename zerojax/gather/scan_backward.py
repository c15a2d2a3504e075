"""Run the backward pass of a scan over layers. `ScanSegment` calls `backward`.

The loop is a software pipeline. A layer goes through four stages, one per step of the loop. While a step computes the
gradients of one iteration, it gathers the layer of the next iteration, and reduces the gradients of earlier iterations.
The iterations run from n down to 0, so the next iteration has the next smaller number.

    step          gather    compute    reduce within    reduce across
    n (first)     n - 1     n
    n - 1         n - 2     n - 1      n
    n - 2         n - 3     n - 2      n - 1            n
    ...
    0 (last)                0          1                2

Only hybrid sharding has the last column: there, the reduce-scatter is over the devices of one group. Steps with an
empty column are peeled: they run outside of the loop. So each step in the loop has the same stages, and a `StepState`
of the same structure. A clamped index would avoid the peeling, but would gather or reduce a layer twice. After the last
step, the `GradScheduler` does the stages that remain. Without prefetch, each iteration goes through all stages before
the next one starts (`Backward.in_turn`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat
from zerojax.comm.manual import barrier
from zerojax.dims import RowDims
from zerojax.dims.loops import stacked
from zerojax.gather.loop import LayerGathers, Loop
from zerojax.gather.schedule import GatherScheduler, GradScheduler, reduce_scattered
from zerojax.gather.segments import BlockResiduals, Segment
from zerojax.gather.vjp import Passes, Sums

# While a step computes iteration i, it gathers for iteration i + _GATHER, and so on. The loop counts down.
_GATHER, _REDUCE_WITHIN, _REDUCE_ACROSS = -1, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """The values that one step of the backward loop passes to the next step."""

    carry: list  # cotangents of the scan's carry
    gathered: list  # layers of the next iteration; empty without prefetch
    pending: list  # gradients of the layers of the iteration just computed, not reduce-scattered yet
    scattered: list  # shards of the gradients one step earlier, not reduced across groups yet; empty if not hybrid
    shared: list  # sums of the gradients of parameters that every iteration uses
    consts: list  # sums of the cotangents of the constants
    slices: list  # stacks of the cotangents of the rows that the iterations read
    stacks: list  # stacks of this device's shards of the layers' gradients


@dataclasses.dataclass(frozen=True)
class Backward:
    """One scan segment's backward pass.

    `cotangents` maps the index of an active result of the body to a cotangent of the loop's results: that of the last
    carry, or a stack with one cotangent per iteration. `later` has the indices of the others whose cotangents may stay
    partial sums.
    """

    loop: Loop
    passes: Passes
    layers: LayerGathers
    residuals: BlockResiduals
    cotangents: Mapping[int, jax.Array]
    later: Collection[int]

    @functools.cached_property
    def experts(self) -> dict[int, tuple[str, ...]]:
        """Map the index of an expert in the loop's parameters to the axes over which its gradient is summed.

        If every iteration uses the expert, there are no axes: the gradient is one array, which the loop adds up.
        """
        found = self.layers.options.comm.experts(param.leaf for param in self.loop.params)
        return {i: () if i < len(self.loop.shared) else axes for i, axes in found.items()}

    @property
    def trained(self) -> dict:
        """Map the key of each stack that has a gradient to the index of the stack in `loop.stacked`."""
        first = len(self.loop.shared)
        return {self.loop.stacked[i - first].key: i - first for i in reversed(self.passes.active_params) if i >= first}

    @functools.cached_property
    def active_others(self) -> tuple[list[int], list[int], list[int]]:
        loop, active = self.loop, self.passes.active_others
        ends = 0, loop.consts, loop.consts + loop.carry, len(loop.others)
        consts, carry, slices = ([i for i in active if start <= i < end] for start, end in itertools.pairwise(ends))
        return consts, carry, slices

    @property
    def carry_rows(self) -> list[RowDims]:
        return list(cotangent_rows(self.passes, self.loop).values())[: len(self.active_others[1])]

    def gather(self, iteration, anchor: Sequence[jax.Array] = ()) -> tuple[list, list]:
        """Return one iteration's `(gathered layers, anchor)`. Layers that the forward pass kept need no gather."""
        if self.residuals.gathered is None:
            return self.layers.gather(iteration, anchor)
        _, stacks = self.residuals.gathered
        return [None if s is None else self.loop.row(s, iteration) for s in stacks], list(anchor)

    def entry(self, gathered: Sequence) -> tuple[list, list]:
        """Return `(shared parameters, layers)` of the first step, with None for a parameter that no step reads."""
        if self.residuals.gathered is not None:
            return list(self.residuals.gathered[0]), self.gather(self.loop.length - 1)[0]
        by_index = dict(zip(sorted(self.passes.needed), gathered, strict=True))
        values = [by_index.get(i) for i in range(len(self.loop.params))]
        return values[: len(self.loop.shared)], values[len(self.loop.shared) :]

    def start(self, gathered: Sequence) -> StepState:
        loop, others, comm = self.loop, self.passes.other_shapes, self.layers.options.comm
        of_consts, _, of_slices = self.active_others
        zeros = lambda i: (comm.zeros if i in self.later else compat.zero_cotangent)(others[i].shape, others[i].dtype)
        consts = [zeros(i) for i in of_consts]
        # Every row will be overwritten, so the stacks may start with any value. A value that is computed only now keeps
        # XLA from allocating the stacks at the start of the program, as it could do with zeros.
        index, first = next(iter(self.cotangents.items()))
        seed = comm.element(first, cotangent_rows(self.passes, loop)[index])
        rows = [zeros(i) for i in of_slices]
        slices = [jnp.full((loop.length, *x.shape), seed.astype(x.dtype)) for x in rows]
        used = {i: loop.shared[i] for i in self.passes.active_params if i < len(loop.shared)}
        empty = lambda i: jnp.zeros if i in self.experts else comm.zeros
        shared = [empty(i)(param.leaf.shape, comm.sum_dtype(param.wide)) for i, param in used.items()]
        dtypes = [loop.stacked[i].root.aval.dtype for i in self.trained.values()]
        shapes = [(loop.length, *comm.grad_shape(param.leaf)) for param in self._layers]
        stacks = [jnp.full(shape, seed.astype(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        carry = [c for i, c in self.cotangents.items() if i < loop.carry]
        return StepState(carry, list(gathered), [], [], shared, consts, slices, stacks)

    def pipelined(
        self, shared: Sequence, state: StepState, iteration, *, fetch: bool = True, zero: Any = 0
    ) -> StepState:
        """Run one step of the pipeline, which computes one iteration.

        `shared` are the gathered parameters that every iteration uses. If `fetch` is true, the step gathers the layers
        of the next iteration. `zero` is a zero that XLA can compute only when this gather may start.
        """
        following = self.gather(iteration + _GATHER + zero)[0] if fetch else []
        stacks = self._reduced_across(state.stacks, state.scattered, iteration + _REDUCE_ACROSS)
        stacks, scattered = self._reduced_within(stacks, state.pending, iteration + _REDUCE_WITHIN)
        pending, state = self._computed([*shared, *state.gathered], state, state.carry, iteration)
        return dataclasses.replace(state, gathered=following, pending=pending, scattered=scattered, stacks=stacks)

    def in_turn(self, shared: Sequence, state: StepState, iteration) -> StepState:
        gathered, carry = self.gather(iteration, state.carry)
        grads, state = self._computed([*shared, *gathered], state, carry, iteration)
        stacks, scattered = self._reduced_within(state.stacks, grads, iteration)
        return dataclasses.replace(state, stacks=self._reduced_across(stacks, scattered, iteration))

    def _computed(self, params: Sequence, state: StepState, carry: Sequence, iteration) -> tuple[list, StepState]:
        """Compute one iteration from its gathered parameters, and return its layers' gradients and the new state."""
        loop, passes, comm = self.loop, self.passes, self.layers.options.comm
        inner, given = loop.consts + loop.carry, self.residuals.others
        saved, carried, slices = [
            [None if x is None else loop.row(x, iteration) for x in xs] for xs in (*self.residuals.saved, given[inner:])
        ]
        others = [*given[: loop.consts], *carried, *slices]
        cotangents = self._given(carry, iteration)
        sums = Sums.of(self.later, self.experts)
        to_params, to_others = passes.pull(comm, params, others, saved, cotangents, sums=sums, paired=True)
        to_layers, to_shared = self._sorted(to_params)
        to = dict(zip(passes.active_others, to_others, strict=True))
        to_consts, to_carry, to_slices = ([to[i] for i in indices] for indices in self.active_others)
        return to_layers, dataclasses.replace(
            state,
            carry=to_carry,
            shared=[comm.add(a, c.astype(a.dtype)) for a, c in zip(state.shared, to_shared, strict=True)],
            consts=[comm.add(a, c) for a, c in zip(state.consts, to_consts, strict=True)],
            slices=[self._write(s, c, iteration) for s, c in zip(state.slices, to_slices, strict=True)],
        )

    def _given(self, carry: Sequence, iteration) -> list:
        """Return the cotangents of the body's active results in one iteration. `carry` are the carry's cotangents."""
        of_carry, results = iter(carry), []
        for index in self.passes.active_results:
            if index < self.loop.carry:
                results.append(next(of_carry))
            elif index in self.cotangents:
                results.append(self.loop.row(self.cotangents[index], iteration))
            else:
                results.append(self.passes.zero_cotangent(index))
        return results

    def _sorted(self, to_params: Sequence) -> tuple[list, list]:
        """Return `(gradients of layers, gradients of shared parameters)`. The gradients of a layer's uses are added."""
        first, totals = len(self.loop.shared), dict.fromkeys(self.trained)
        shared = []
        for index, grad in zip(self.passes.active_params, to_params, strict=True):
            if index < first:
                shared.append(grad)
                continue
            key = self.loop.stacked[index - first].key
            totals[key] = self.layers.options.comm.add_use(totals[key], grad)
        return list(totals.values()), shared

    @property
    def is_across(self) -> bool:
        return any(self.layers.options.comm.is_across(layer.leaf) for layer in self._layers)

    @property
    def _layers(self) -> list:
        """Return layer 0 of each stack that has a gradient. Callers read only its layout, which all layers share."""
        return [self.loop.stacked[i].at_layer(0) for i in self.trained.values()]

    def _reduced_within(self, stacks: Sequence, grads: Sequence, iteration) -> tuple[list, list]:
        """Reduce-scatter gradients into the stacks or, with hybrid sharding, a list. Return `(stacks, list)`."""
        if not grads:
            return list(stacks), []
        shards = reduce_scattered(self.layers.options.comm, grads, self._layers)
        return (list(stacks), shards) if self.is_across else (self._into(stacks, shards, iteration), [])

    def _reduced_across(self, stacks: Sequence, scattered: Sequence, iteration) -> list:
        if not scattered:
            return list(stacks)
        sums = self.layers.options.comm.reduce_across(scattered, [layer.leaf for layer in self._layers])
        return self._into(stacks, sums, iteration)

    def _into(self, stacks: Sequence, shards: Sequence, iteration) -> list:
        return [self._write(stack, shard, iteration) for stack, shard in zip(stacks, shards, strict=True)]

    def _write(self, stack, row, iteration):
        row = self.layers.options.comm.like(row, stack[0])
        return self.loop.write(stack, row.astype(stack.dtype), iteration)


def backward(
    segment: Segment, loop: Loop, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler
) -> None:
    """Run the backward pass of a scan segment; see `Segment.backward`."""
    passes, options = residuals.passes, gathers.options
    keys = dict(zip(loop.results, segment.results, strict=True))
    found = {i: grads.cotangents[keys[i]] for i in passes.active_results if keys.get(i) in grads.cotangents}
    if not found:
        return
    # Every iteration needs all cotangents of the carry.
    wanted = [i for i in passes.active_results if i in found or i < loop.carry]
    cotangents = [found[i] if i in found else passes.zero_cotangent(i) for i in wanted]
    rows = cotangent_rows(passes, loop)
    flat, structure = jax.tree.flatten(residuals.saved)
    # The residuals pass the barrier, too. Otherwise XLA would merge the first step's recomputation with the last
    # iteration of the forward pass, and keep the values of that iteration until then.
    entry_rows, ahead = [rows[i] for i in wanted], not loop.stacked
    entry, (cotangents, flat, due) = gathers.take(cotangents, flat, grads.due, rows=entry_rows, ahead=ahead)
    grads.settle(due)
    residuals = dataclasses.replace(residuals, saved=jax.tree.unflatten(structure, flat))
    used = [i - len(loop.shared) for i in passes.needed if i >= len(loop.shared)]
    layers = LayerGathers(loop, options, [p.sliced(grads.env) for p in loop.stacked], used)
    carried = range(loop.consts, loop.consts + loop.carry)
    summed_later = segment.summed_later(gathers, grads)
    later = [i for i, k in enumerate(loop.others) if i not in carried and k in summed_later]
    run = Backward(loop, passes, layers, residuals, dict(zip(wanted, cotangents, strict=True)), later)
    shared, gathered = run.entry(entry)
    if options.prefetch and loop.stacked:
        state = _pipeline(run, shared, run.start(gathered), gathers, grads)
    else:
        body = lambda state, iteration: (run.in_turn(shared, state, iteration), None)
        state, _ = lax.scan(body, run.start([]), jnp.arange(loop.length), reverse=True)
    _finish(segment, run, state, gathers, grads)


def _pipeline(
    run: Backward, shared: Sequence, state: StepState, gathers: GatherScheduler, grads: GradScheduler
) -> StepState:
    """Run the pipeline, with the first one or two steps and the last step peeled; see the module."""
    left = run.loop.length - 1  # The iterations from `left` down to 0 are not computed yet.
    if run.loop.length > 1:  # A single iteration is the last step, below.
        zero = run.layers.options.comm.zero_after(state.carry, run.carry_rows)
        state = run.pipelined(shared, state, left, zero=zero)
        carry, (due,) = barrier(state.carry, grads.due)
        grads.settle(due)
        state, left = dataclasses.replace(state, carry=carry), left - 1
    if left and run.is_across:  # The second step has nothing to reduce across yet.
        state, left = run.pipelined(shared, state, left), left - 1
    if left:
        body = lambda state, iteration: (run.pipelined(shared, state, iteration), None)
        state, _ = lax.scan(body, state, jnp.arange(1, left + 1), reverse=True)
    (carry,) = gathers.start(state.carry, rows=run.carry_rows)
    state = run.pipelined(shared, dataclasses.replace(state, carry=carry), 0, fetch=False)
    # Iteration 0 should hide the reduction of iteration 1. Without these barriers, XLA does this reduction afterwards,
    # or combines it with the reduction of iteration 0.
    carry, (stacks, scattered) = barrier(state.carry, state.stacks, state.scattered)
    pending = [barrier([grad], stacks + scattered)[0][0] for grad in state.pending]
    return dataclasses.replace(state, carry=carry, pending=pending, scattered=scattered, stacks=stacks)


def _finish(segment: Segment, run: Backward, state: StepState, gathers: GatherScheduler, grads: GradScheduler) -> None:
    """Add the gradients of the loop's parameters and inputs to `grads`."""
    loop, passes = run.loop, run.passes
    carry = gathers.finish(state.carry)
    ranks = [passes.other_shapes[i].ndim for i in run.active_others[2]]
    # In a stack, the layers are on dim 0, and partial sums per worker on dim 1. The scheduler has the workers first.
    slices = [jnp.moveaxis(x, 0, x.ndim - rank - 1) for x, rank in zip(state.slices, ranks, strict=True)]
    to = dict(zip(itertools.chain(*run.active_others), [*state.consts, *carry, *slices], strict=True))
    places = {i: place for i in to if (place := loop.others[i]) is not None}
    grads.add_others([segment.others[place] for place in places.values()], [to[i] for i in places])
    stacked = [loop.stacked[i] for i in run.trained.values()]
    numbers = [grads.add_stack(*pair) for pair in zip(stacked, state.stacks, strict=True)]
    left = [param.at_layer(loop.layer(0)) for param in stacked] if state.pending else []
    before = [param.at_layer(loop.layer(1)) for param in stacked] if state.scattered else []
    grads.add_scattered(before, state.scattered, numbers[: len(before)])
    shared = [loop.shared[i] for i in passes.active_params if i < len(loop.shared)]
    sum_dtype = gathers.options.comm.sum_dtype
    sums = [c.astype(sum_dtype(p.cotangent_dtype)) for p, c in zip(shared, state.shared, strict=True)]
    stacks = {param.key: number for param, number in zip(left, numbers, strict=False)}
    exposed = not gathers.is_hidden_after
    grads.add_params([*shared, *left], [*sums, *state.pending], exposed=exposed, stacks=stacks)


def cotangent_rows(passes: Passes, loop: Loop) -> dict[int, RowDims]:
    """Return which dims of a loop's cotangents hold the rows of the batch. Stacked results have stacked cotangents."""
    pairs = zip(passes.active_results, passes.result_rows, strict=True)
    return {i: rows if i < loop.carry else stacked(rows) for i, rows in pairs}
