"""The backward pass of a scan over layers; see `scan`.

Each turn computes its gradients, reduce-scatters those of the turn before, writes them in
place into the stack's, and gathers for the turn after.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.gather import collectives
from zerojax.gather.residuals import Kept
from zerojax.gather.scan import Loop, Turns, loop_of
from zerojax.gather.schedule import Gathers, GradScheduler
from zerojax.gather.segments import Segment
from zerojax.gather.vjp import Passes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What one turn of the backward loop hands the next.

    Attributes:
        carry: Cotangents of the carry.
        whole: Gathered weights of the turn to come; empty without prefetch.
        pending: Gradients of gathered weights that are not reduce-scattered yet.
        fixed: Sums of the gradients of weights that every turn uses.
        consts: Sums of the cotangents of the constants.
        slices: Stacks of cotangents of what the turns sliced.
        stacks: Stacks of this device's shards of gradients.
    """

    carry: list
    whole: list
    pending: list
    fixed: list
    consts: list
    slices: list
    stacks: list


@dataclasses.dataclass(frozen=True)
class Back:
    """One scan segment's backward pass.

    Attributes:
        loop: The loop.
        two: Its body's two passes.
        turns: How the turns gather.
        keep: What the forward pass kept.
        cotangents: Stacks of the cotangents of the body's results; None where there is none, and for the carry.
        ahead: Whether each turn gathers for the next.
    """

    loop: Loop
    two: Passes
    turns: Turns
    keep: Kept
    cotangents: Sequence
    ahead: bool

    @property
    def trained(self) -> dict:
        """Key of each turning weight that has a gradient -> index among the turning."""
        first = len(self.loop.fixed)
        return {self.loop.turning[i - first].key: i - first for i in reversed(self.two.active_weights) if i >= first}

    def whole(self, number, anchor: Sequence[jax.Array] = ()) -> tuple[list, list]:
        """Gathered weights of one turn, and the anchor behind the barrier."""
        if not self.keep.whole:
            return self.turns.gather(number, anchor)
        rows = [None if s is None else self._row(s, number) for s in self.keep.whole[1]]
        return rows, list(anchor)

    def _row(self, stack, number):
        return lax.dynamic_index_in_dim(stack, self.loop.at(number), 0, keepdims=False)

    def start(self, cotangents: Sequence, whole: Sequence) -> State:
        """The state before the first turn."""
        loop, length = self.loop, self.loop.parts.length
        others = self.two.forward_others
        consts = [jnp.zeros(others[i].shape, others[i].dtype) for i in self.two.active_others if i < loop.consts]
        # Every row will be written; filling the stacks with something that is there only now, and not
        # with zeros, keeps a scheduler from making them long before.
        seed = next(c for c in cotangents if c is not None).ravel()[0]
        slices = [
            jnp.full((length, *others[i].shape), seed.astype(others[i].dtype))
            for i in self.two.active_others
            if i >= loop.consts + loop.carry
        ]
        first = [loop.fixed[i] for i in self.two.active_weights if i < len(loop.fixed)]
        options = self.turns.options
        fixed = [jnp.zeros(weight.shape, options.sum_dtype(weight.wide)) for weight in first]
        shards = [self.turns.stacks[i] for i in self.trained.values()]
        stacks = [jnp.full(shard.shape, seed.astype(shard.dtype)) for shard in shards]
        carry = [c for i, c in zip(self.two.active_results, cotangents, strict=True) if i < loop.carry]
        return State(carry, list(whole), [], fixed, consts, slices, stacks)

    def turn(self, fixed: Sequence, state: State, number, *, fetch: bool, scatter: bool, zero: Any = 0) -> State:
        """One turn: `fetch` gathers for the next one when `zero` is there, `scatter` brings home the one before."""
        loop, two = self.loop, self.two
        if self.ahead:
            whole, carry = state.whole, state.carry
            following = self.whole(number - 1 + zero)[0] if fetch else []
        else:
            whole, carry = self.whole(number, state.carry)
            following = []
        stacks = self._written(state.stacks, state.pending, number + 1) if self.ahead and scatter else state.stacks
        (saved, carried), given = self.keep.arrays
        saved = [self._row(s, number) for s in saved]
        carried = [None if c is None else self._row(c, number) for c in carried]
        slices = [None if x is None else self._row(x, number) for x in given[loop.consts + loop.carry :]]
        to_weights, to_others = two.pull(
            [*fixed, *whole], [*given[: loop.consts], *carried, *slices], saved, self._given(carry, number)
        )
        pending, to_fixed = self._sorted(to_weights)
        if not self.ahead:
            stacks, pending = self._written(stacks, pending, number), []
        by_index = dict(zip(two.active_others, to_others, strict=True))
        to_consts = [c for i, c in by_index.items() if i < loop.consts]
        to_slices = [c for i, c in by_index.items() if i >= loop.consts + loop.carry]
        return State(
            carry=[c for i, c in by_index.items() if loop.consts <= i < loop.consts + loop.carry],
            whole=following,
            pending=pending,
            fixed=[a + c.astype(a.dtype) for a, c in zip(state.fixed, to_fixed, strict=True)],
            consts=[a + c for a, c in zip(state.consts, to_consts, strict=True)],
            slices=[self._write(s, c, number) for s, c in zip(state.slices, to_slices, strict=True)],
            stacks=stacks,
        )

    def _given(self, carry: Sequence, number) -> list:
        """Cotangents of the body's active results in one turn."""
        rest, results = iter(carry), []
        for index, stack in zip(self.two.active_results, self.cotangents, strict=True):
            if index < self.loop.carry:
                results.append(next(rest))
            elif stack is None:
                aval = self.two.forward.jaxpr.outvars[index].aval
                results.append(jnp.zeros(aval.shape, aval.dtype))
            else:
                results.append(self._row(stack, number))
        return results

    def _sorted(self, to_weights: Sequence) -> tuple[list, list]:
        """`(gradients of turning weights, of fixed ones)`, uses of one weight added up."""
        first, sums = len(self.loop.fixed), dict.fromkeys(self.trained)
        fixed = []
        for index, cotangent in zip(self.two.active_weights, to_weights, strict=True):
            if index < first:
                fixed.append(cotangent)
                continue
            key = self.loop.turning[index - first].key
            sums[key] = self.turns.options.add(sums[key], cotangent)
        return list(sums.values()), fixed

    def _written(self, stacks: Sequence, gradients: Sequence, number) -> list:
        """The stacks with one turn's gradients reduce-scattered into them."""
        weights = [self.loop.turning[i].at_turn(0) for i in self.trained.values()]
        shards = self.turns.options.reduce_scatter(gradients, weights, covered=True)
        return [self._write(stack, shard, number) for stack, shard in zip(stacks, shards, strict=True)]

    def _write(self, stack, row, number):
        return lax.dynamic_update_index_in_dim(stack, row.astype(stack.dtype), self.loop.at(number), 0)


def backward(
    segment: Segment, keep: Kept, cotangents: Sequence, gathers: Gathers, position: int, returns: GradScheduler
) -> None:
    """Pull back through a scan segment; as `tape` does a block."""
    loop, two, env, options = loop_of(segment), keep.passes.value, returns.env, gathers.options
    (stored, given), length = keep.arrays, loop.parts.length
    flat, structure = jax.tree.flatten(stored)
    here = [c for c in cotangents if c is not None]
    # The residuals pass the barrier too: the turn outside the loop would else be merged with its forward twin.
    entry, (here, flat, *due) = gathers.take(position, env, here, flat, *returns.due, ahead=False)
    returns.settle(*due)
    rest = iter(here)
    cotangents = [None if c is None else next(rest) for c in cotangents]
    keep = dataclasses.replace(keep, arrays=(jax.tree.unflatten(structure, flat), given))
    first = len(loop.fixed)
    turns = Turns(loop, options, [w.sliced(env) for w in loop.turning], [i - first for i in two.needed if i >= first])
    ahead = options.prefetch > 0 and bool(loop.turning)
    back = Back(loop, two, turns, keep, cotangents, ahead)
    fixed, whole = _entry(back, entry)
    state = back.start(cotangents, whole if ahead else [])

    def middle(state, number):
        return back.turn(fixed, state, number, fetch=True, scatter=True), None

    if not ahead:
        state, _ = lax.scan(middle, state, jnp.arange(length), reverse=True)
    else:
        if length > 1:
            zero = collectives.zero_after(state.carry)
            state = back.turn(fixed, state, length - 1, fetch=True, scatter=False, zero=zero)
            carry, due = collectives.tie(state.carry, *returns.due)
            returns.settle(*due)
            state = dataclasses.replace(state, carry=carry)
        if length > 2:
            state, _ = lax.scan(middle, state, jnp.arange(1, length - 1), reverse=True)
        (carry,) = gathers.start(position, env, state.carry)
        state = back.turn(fixed, dataclasses.replace(state, carry=carry), 0, fetch=False, scatter=length > 1)
        # Else the reduce-scatter of turn 1 would be put off, past the turn that hides it, or combined with the last.
        carry, (stacks,) = collectives.tie(state.carry, state.stacks)
        pending = [collectives.tie([gradient], stacks)[0][0] for gradient in state.pending]
        state = dataclasses.replace(state, carry=carry, pending=pending, stacks=stacks)
    _give(segment, back, state, gathers, position, returns)


def _entry(back: Back, entry: Sequence) -> tuple[list, list]:
    """Weights at the first turn of the pass: `(fixed, turning)`, None where the pass does not read one."""
    loop = back.loop
    if back.keep.whole:
        return list(back.keep.whole[0]), back.whole(loop.parts.length - 1)[0]
    found = dict(zip(sorted(back.two.needed), entry, strict=True))
    total = len(loop.fixed) + len(loop.turning)
    values = [found.get(i) for i in range(total)]
    return values[: len(loop.fixed)], values[len(loop.fixed) :]


def _give(segment: Segment, back: Back, state: State, gathers: Gathers, position: int, returns: GradScheduler) -> None:
    """Hand on what the loop found."""
    loop, two = back.loop, back.two
    carry = gathers.finish(position, state.carry)
    found = dict(
        zip(
            [i for i in two.active_others if i < loop.consts]
            + [i for i in two.active_others if loop.consts <= i < loop.consts + loop.carry]
            + [i for i in two.active_others if i >= loop.consts + loop.carry],
            [*state.consts, *carry, *state.slices],
            strict=True,
        )
    )
    places = {i: place for i in found if (place := loop.others[i]) is not None}
    returns.give_others([segment.others[place] for place in places.values()], [found[i] for i in places])
    turning = [loop.turning[i] for i in back.trained.values()]
    numbers = [returns.give_stack(weight, stack) for weight, stack in zip(turning, state.stacks, strict=True)]
    left = [weight.at_turn(loop.at(0)) for weight in turning] if back.ahead else []
    fixed = [loop.fixed[i] for i in two.active_weights if i < len(loop.fixed)]
    narrow = back.turns.options.sum_dtype
    sums = [c.astype(narrow(w.dtype)) for w, c in zip(fixed, state.fixed, strict=True)]
    stacks = {weight.key: number for weight, number in zip(left, numbers, strict=False)}
    returns.give([*fixed, *left], [*sums, *state.pending], covered=gathers.covers_after(position), stacks=stacks)


def pulled(segment: Segment, keep: Kept, found: Mapping) -> list | None:
    """Cotangents of the body's active results; None for a result nobody reads, or if nobody reads any."""
    loop, two = loop_of(segment), keep.passes.value
    keys = dict(zip(loop.results, segment.results, strict=True))
    given = [found.get(keys[i]) if i in keys else None for i in two.active_results]
    if all(c is None for c in given):
        return None
    avals = [v.aval for v in two.forward.jaxpr.outvars]
    return [
        jnp.zeros(avals[i].shape, avals[i].dtype) if c is None and i < loop.carry else c
        for i, c in zip(two.active_results, given, strict=True)
    ]
