"""A scan over layers whose stacked parameters stay shards until their turn.

Both passes carry this turn's gathered parameters while they gather the next turn's, so
that the gather hides behind the turn. Plain autodiff would keep that carry, every layer
of it; here each pass is a loop of its own, and what must be kept is written in place into
stacks by the turn that makes it. The backward loop reduce-scatters the gradients of the
turn before while it computes its own.

The turns at the ends, which have nothing to gather or nothing to scatter, stand outside
the loops: so no byte is moved that is not needed. (A clamped index would gather one layer
twice, in each pass.)
"""

import dataclasses
import functools
from collections.abc import MutableMapping, Sequence, Set

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat
from zerojax.gather import collectives
from zerojax.gather.evaluate import Narrow, evaluate
from zerojax.gather.residuals import Kept, Static
from zerojax.gather.schedule import Gathers, Options
from zerojax.gather.segments import Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import Passes, passes


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan segment's operands, sorted.

    Attributes:
        parts: The scan equation, taken apart.
        operands: For each of its operands `("weight", i)`, `("other", i)` or `("literal", value)`.
        fixed: Weights that every turn uses whole: constants of the loop.
        turning: Stacks of which each turn uses one layer.
        others: For each other operand, its index among the segment's others, or None for a literal.
        literals: For each other operand, its value if it is a literal.
        consts: How many of the others are constants; then `carry` carried ones, then slices.
        carry: How many of the others are carried.
        results: For each of the segment's results, its index among the body's.
    """

    parts: compat.ScanParts
    operands: tuple
    fixed: tuple[ShardedParam, ...]
    turning: tuple[ShardedParam, ...]
    others: tuple[int | None, ...]
    literals: tuple
    consts: int
    carry: int
    results: tuple[int, ...]

    def at(self, turn):
        """Which layer turn number `turn` works on."""
        return self.parts.length - 1 - turn if self.parts.reverse else turn

    def first(self, turn: int) -> list[ShardedParam]:
        """All weights of one turn."""
        return [*self.fixed, *(w.at_turn(self.at(turn)) for w in self.turning)]

    def values(self, env_others: Sequence) -> tuple[list, list, list]:
        """`(consts, carry, slices)` out of the segment's others."""
        given = [
            jnp.asarray(lit) if index is None else env_others[index]
            for index, lit in zip(self.others, self.literals, strict=True)
        ]
        return given[: self.consts], given[self.consts :][: self.carry], given[self.consts + self.carry :]

    def run(self, weights: Sequence, others: Sequence) -> list:
        """The body, on `(fixed and turning weights, consts and carry and slices)`."""
        believed = [*self.fixed, *self.turning]
        args = []
        for kind, index in self.operands:
            if kind == "other":
                args.append(others[index])
            else:
                weight, value = believed[index], weights[index]
                args.append(value if weight.dtype == weight.wide else Narrow(value, weight.wide))
        return evaluate(*compat.opened(self.parts.body), args)


def loop_of(segment: Segment) -> Loop:
    """Sort the operands of a scan segment."""
    (eqn,) = segment.jaxpr.eqns
    parts = compat.scan_parts(eqn)
    weights = dict(zip(segment.jaxpr.invars, segment.weights, strict=False))
    places = {var: i for i, var in enumerate(segment.jaxpr.invars[len(segment.weights) :])}
    is_weight = [not compat.is_literal(a) and a in weights for a in eqn.invars]
    fixed = [weights[a] for a, on in zip(eqn.invars[: parts.consts], is_weight, strict=False) if on]
    turning = [weights[a] for i, a in enumerate(eqn.invars) if is_weight[i] and i >= parts.consts]
    operands, others, literals = [], [], []
    for atom, on in zip(eqn.invars, is_weight, strict=True):
        if on:
            operands.append(("weight", sum(kind == "weight" for kind, _ in operands)))
            continue
        operands.append(("other", len(others)))
        others.append(None if compat.is_literal(atom) else places[atom])
        literals.append(atom.val if compat.is_literal(atom) else None)
    consts = sum(not on for on in is_weight[: parts.consts])
    order = {var: i for i, var in enumerate(eqn.outvars) if not compat.is_dropped(var)}
    results = tuple(order[var] for var in segment.jaxpr.outvars)
    return Loop(
        parts,
        tuple(operands),
        tuple(fixed),
        tuple(turning),
        tuple(others),
        tuple(literals),
        consts,
        parts.carry,
        results,
    )


def first_weights(segment: Segment) -> list[ShardedParam]:
    """What the forward pass has to have gathered when the loop starts."""
    return loop_of(segment).first(0)


def last_weights(segment: Segment, keep: Kept) -> list[ShardedParam]:
    """What the backward pass has to have gathered when the loop starts."""
    loop, two = loop_of(segment), keep.passes.value
    return [] if keep.whole else [w for i, w in enumerate(loop.first(loop.parts.length - 1)) if i in two.needed]


@dataclasses.dataclass(frozen=True)
class Turns:
    """What every turn of one pass works with.

    Attributes:
        loop: The loop.
        options: How to gather.
        stacks: For each turning weight, its shard of the stack.
        used: Indices of the turning weights that this pass gathers.
    """

    loop: Loop
    options: Options
    stacks: Sequence[jax.Array]
    used: Sequence[int]

    def gather(self, turn, anchor: Sequence[jax.Array] = ()) -> tuple[list, list]:
        """The `used` weights of one turn, None for the others; started when `anchor` is there."""
        unique = {self.loop.turning[i].key: i for i in self.used}
        layers = [self.loop.turning[i].layer(self.stacks[i], self.loop.at(turn)) for i in unique.values()]
        tied, (layers,) = collectives.tie(anchor, layers)
        weights = [self.loop.turning[i].at_turn(0) for i in unique.values()]
        whole = dict(zip(unique, self.options.gather(layers, weights, covered=True), strict=True))
        found = [whole[w.key] if i in self.used else None for i, w in enumerate(self.loop.turning)]
        return found, tied


def forward(
    segment: Segment,
    env: MutableMapping,
    anchors: Sequence,
    moving: Set,
    gathers: Gathers,
    position: int,
    last: bool,
) -> tuple[list, Kept | None]:
    """Run a scan segment; as `tape` does a block."""
    loop = loop_of(segment)
    length, ahead = loop.parts.length, gathers.options.prefetch > 0 and bool(loop.turning)
    entry, (tied,) = gathers.take(position, env, [env[v] for v in anchors], ahead=False)
    env.update(zip(anchors, tied, strict=True))
    others = [env[v] for v in segment.others]
    consts, carry, slices = loop.values(others)
    turns = Turns(loop, gathers.options, [w.sliced(env) for w in loop.turning], range(len(loop.turning)))
    fixed, whole = entry[: len(loop.fixed)], entry[len(loop.fixed) :]
    two = _passes(segment, loop, entry, [*consts, *carry], slices, moving) if moving else None
    rows_of = functools.partial(_forward_turn, loop, two, fixed, consts, slices, gathers.options)

    def turn(state, number, *, fetch: bool, inside: bool):
        carry, whole, stacks = state
        if not ahead:
            whole, carry = turns.gather(number, carry)
        following = whole
        if fetch:  # outside the loop nothing but a barrier keeps a gather from starting with the program
            following, tied = turns.gather(number + 1, [] if inside else carry)
            carry = carry if inside else tied
        carry, rows = rows_of(number, carry, whole)
        stacks = jax.tree.map(lambda s, r: lax.dynamic_update_index_in_dim(s, r, loop.at(number), 0), stacks, rows)
        return carry, following if ahead else [], stacks

    closed, shapes = jax.make_jaxpr(lambda c, w: rows_of(0, c, w)[1], return_shape=True)(carry, whole)
    stacks = [_empty(var.aval, length) for var in compat.opened(closed)[0].outvars]
    state = carry, whole if ahead else [], jax.tree.unflatten(jax.tree.structure(shapes), stacks)
    body = lambda state, number: (turn(state, number, fetch=ahead, inside=True), None)
    begun = int(ahead and length > 2)
    if begun:  # outside the loop the gathers of the first turn can hide behind its own products
        state = turn(state, 0, fetch=True, inside=False)
    inside = length - ahead - begun
    if inside > 0:
        state, _ = lax.scan(body, state, jnp.arange(begun, length - ahead), unroll=min(loop.parts.unroll, inside))
    if ahead:
        if length > 1:
            carry, whole, stacks = state
            (carry,) = gathers.start(position, env, carry)
            state = carry, whole, stacks
        state = turn(state, length - 1, fetch=False, inside=False)
    carry, _, (ys, saved, carried, kept_whole) = state
    results = [[*carry, *ys][i] for i in loop.results]
    if two is None:
        return results, None
    read = {i for pool, i in two.sources if pool == "other"}
    given = [*consts, *[None] * loop.carry, *slices]
    given = [x if i in read else None for i, x in enumerate(given)]
    operands = [env[v] for w in segment.weights for v in w.operands]
    stays = [] if gathers.options.reshard_after_forward else [fixed, kept_whole]
    return results, Kept(((saved, carried), given), operands, stays, Static(two))


def _passes(segment: Segment, loop: Loop, entry, kept, slices, moving: Set) -> Passes:
    """The two passes of the body; a carry counts as active when anything is."""
    active = [index is not None and segment.others[index] in moving for index in loop.others]
    active[loop.consts : loop.consts + loop.carry] = [True] * loop.carry
    trained = [w.root in moving for w in [*loop.fixed, *loop.turning]]
    rows = [jax.eval_shape(lambda x: lax.index_in_dim(x, 0, 0, keepdims=False), x) for x in slices]
    return passes(loop.run, entry, [*kept, *rows], trained=trained, active=active)


def _forward_turn(loop: Loop, two: Passes | None, fixed, consts, slices, options: Options, number, carry, whole):
    """`(carry, rows)`, the rows being what this turn writes: results, residuals, its carry, gathered weights."""
    xs = [lax.dynamic_index_in_dim(x, loop.at(number), 0, keepdims=False) for x in slices]
    others = [*consts, *carry, *xs]
    if two is None:
        results = loop.run([*fixed, *whole], others)
        return results[: loop.carry], (results[loop.carry :], [], [], [])
    results, saved = two.run([*fixed, *whole], others)
    read = {i - loop.consts for pool, i in two.sources if pool == "other"}
    carried = [c if i in read else None for i, c in enumerate(carry)]
    needed = [] if options.reshard_after_forward else whole
    needed = [w if i + len(fixed) in two.needed else None for i, w in enumerate(needed)]
    return results[: loop.carry], (results[loop.carry :], saved, carried, needed)


def _empty(row, length: int) -> jax.Array:
    """A stack to be written in turns, in the memory that the rows are in."""
    if jnp.issubdtype(row.dtype, jax.dtypes.extended):
        return jax.vmap(lambda _: jax.random.key(0, impl=row.dtype._impl), axis_size=length)(None)
    if compat.in_host_memory(row):
        return compat.host_buffer((length, *row.shape), row.dtype)
    return jnp.zeros((length, *row.shape), row.dtype)
