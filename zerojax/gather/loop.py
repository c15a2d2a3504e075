"""Sort the operands of a scan over layers by kind, and gather the layers of one iteration, for both passes of the scan.

A scan equation lists its operands as `(*constants, *carry, *stacks)`. Constants and stacks may contain sharded
parameters, but the carry does not. This module separates parameters, which the engine gathers, from other operands.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, names
from zerojax.comm.manual import barrier
from zerojax.dims import NOWHERE, UNKNOWN, Follower, RowDims
from zerojax.dims.loops import into_loop
from zerojax.gather.evaluate import as_gathered, evaluate_gathered
from zerojax.gather.schedule import Options
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass(frozen=True)
class Loop:
    """The operands of a scan segment, sorted by kind."""

    eqn: compat.LoopEqn
    is_param: tuple[bool, ...]  # for each operand of the loop, whether it is a sharded parameter
    shared: tuple[ShardedParam, ...]  # the parameters among the constants: every iteration uses them
    stacked: tuple[ShardedParam, ...]  # the parameters among the stacks: each iteration uses one layer of them
    others: tuple[int | None, ...]  # for each other operand, its index among the segment's others; None for a literal
    literals: tuple  # for each other operand, its value if it is a literal
    consts: int  # the number of constants in `others`, which come first
    carry: int  # the number of carried operands in `others`, which come next; stacks come last
    results: tuple[int, ...]  # for each result of the segment, its index among the body's results

    @classmethod
    def of(cls, jaxpr, params: Sequence[ShardedParam]) -> "Loop":
        """Sort the operands of the only equation of `jaxpr`, a loop. The first arguments of `jaxpr` are `params`."""
        (eqn,) = jaxpr.eqns
        loop = compat.loop_of(eqn)
        assert loop is not None
        by_var = dict(zip(jaxpr.invars, params, strict=False))
        places = {var: i for i, var in enumerate(jaxpr.invars[len(params) :])}
        is_param = [not compat.is_literal(a) and a in by_var for a in eqn.invars]
        others = [a for a, on in zip(eqn.invars, is_param, strict=True) if not on]
        order = {var: i for i, var in enumerate(eqn.outvars) if not compat.is_dropped(var)}
        return cls(
            loop,
            tuple(is_param),
            shared=tuple(by_var[a] for i, a in enumerate(eqn.invars) if is_param[i] and i < loop.consts),
            stacked=tuple(by_var[a] for i, a in enumerate(eqn.invars) if is_param[i] and i >= loop.consts),
            others=tuple(None if compat.is_literal(a) else places[a] for a in others),
            literals=tuple(a.val if compat.is_literal(a) else None for a in others),
            consts=sum(not on for on in is_param[: loop.consts]),
            carry=loop.carry,
            results=tuple(order[var] for var in jaxpr.outvars),
        )

    @property
    def params(self) -> tuple[ShardedParam, ...]:
        return *self.shared, *self.stacked

    @property
    def length(self) -> int:
        return self.eqn.length

    def layer(self, iteration):
        return self.length - 1 - iteration if self.eqn.reverse else iteration

    def params_of(self, iteration: int) -> list[ShardedParam]:
        return [*self.shared, *(p.at_layer(self.layer(iteration)) for p in self.stacked)]

    @jax.named_scope(names.SHARDS)
    def row(self, stack: jax.Array, iteration) -> jax.Array:
        return lax.dynamic_index_in_dim(stack, self.layer(iteration), 0, keepdims=False)

    @jax.named_scope(names.SHARDS)
    def write(self, stack: jax.Array, row: jax.Array, iteration) -> jax.Array:
        return lax.dynamic_update_index_in_dim(stack, row, self.layer(iteration), 0)

    def values(self, given: Sequence) -> tuple[list, list, list]:
        """Split `given`, the values of the segment's `others`, into `(consts, carry, slices)`."""
        values = [
            jnp.asarray(literal) if index is None else given[index]
            for index, literal in zip(self.others, self.literals, strict=True)
        ]
        return values[: self.consts], values[self.consts :][: self.carry], values[self.consts + self.carry :]

    def rows_inside(self, rows: Sequence[RowDims], follower: Follower | None) -> list[RowDims]:
        """Return which dims of the body's arguments, except parameters, hold the rows of the batch.

        `rows` has the row dims of the segment's `others`. Without a `follower`, all row dims are unknown.
        """
        if follower is None:
            return [UNKNOWN] * len(self.others)
        others = iter([NOWHERE if index is None else rows[index] for index in self.others])
        inside = into_loop(follower, self.eqn, [NOWHERE if on else next(others) for on in self.is_param])
        return [state for state, on in zip(inside, self.is_param, strict=True) if not on]

    def run(self, params: Sequence, others: Sequence) -> list:
        """Run the body on gathered parameters and on `(*consts, *carry, *slices)`."""
        gathered = (as_gathered(*pair) for pair in zip(params, self.params, strict=True))
        remaining = iter(others)
        values = [next(gathered if on else remaining) for on in self.is_param]
        return evaluate_gathered(*compat.opened(self.eqn.body), values)


@dataclasses.dataclass(frozen=True)
class LayerGathers:
    """The gathers of every iteration of one pass.

    `shards` has the shard of each stack in `loop.stacked`. `used` has the indices of the stacks that this pass gathers.
    """

    loop: Loop
    options: Options
    shards: Sequence[jax.Array]
    used: Sequence[int]

    @jax.named_scope(names.SHARDS)
    def gather(self, iteration, anchor: Sequence[jax.Array] = ()) -> tuple[list, list]:
        """Gather one iteration's layers after the anchor. Return `(layers, anchor)`, with None for an unused stack."""
        stacked = self.loop.stacked
        unique = {stacked[i].key: i for i in self.used}
        # Only the layout is read. All layers of a stack have the same layout, so layer 0 serves for every iteration.
        layers = [stacked[i].at_layer(0) for i in unique.values()]
        # The cast is made row by row. A cast before the loop would copy the stack.
        rows = [stacked[i].row(self.shards[i], self.loop.layer(iteration)) for i in unique.values()]
        anchor, (rows,) = barrier(anchor, rows)
        gathered = dict(zip(unique, self.options.comm.all_gather(rows, [layer.leaf for layer in layers]), strict=True))
        return [gathered[p.key] if i in self.used else None for i, p in enumerate(stacked)], anchor
