"""When each parameter is gathered, and when each gradient must be computed and reduce-scattered.

XLA's scheduler moves a collective as far as data dependence lets it: gathers to the top,
where they fill the memory, or to their use, where nothing hides them. So the order is said
with optimization barriers: a gather may start when the block `prefetch` blocks ahead of its
use starts, and must be done when the block before its use ends; a block's gradients must be
computed when the next block's backward pass starts, and be reduce-scattered when that ends.
What is reduced across hosts, too (hybrid sharding), has one more block's time for it.
"""

import dataclasses
import enum
import functools
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat
from zerojax.comm.barriers import barrier
from zerojax.comm.collectives import Collectives
from zerojax.dims import NOWHERE, State
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass(frozen=True)
class Options:
    """How parameters are gathered.

    Attributes:
        comm: What gathers shards and reduces gradients.
        prefetch: How many uses ahead a gather may start; 0 disables prefetch.
        reshard_after_forward: Drop gathered parameters after the forward pass.
    """

    comm: Collectives
    prefetch: int
    reshard_after_forward: bool

    def encode(self, shards: Sequence[jax.Array], params: Sequence[ShardedParam]) -> list[jax.Array]:
        """Return shards in the form that `gather` takes."""
        encode = self.comm.encoding.encode_param
        return [encode(shard, param.leaf.dtype) for shard, param in zip(shards, params, strict=True)]

    def gather(
        self, shards: Sequence[jax.Array], params: Sequence[ShardedParam], *, exposed: bool = False
    ) -> list[jax.Array]:
        """Return the gathered parameters of encoded shards."""
        return self.comm.all_gather(shards, [param.leaf for param in params], exposed=exposed)

    def reduce_scatter(
        self, grads: Sequence[jax.Array], params: Sequence[ShardedParam], *, exposed: bool = False
    ) -> list[jax.Array]:
        """Reduce-scatter gradients whose dims are in their parameter's `order`; see `Collectives`."""
        leaves = [param.grad_leaf for param in params]
        shards = self.comm.reduce_scatter(grads, leaves, exposed=exposed)
        return [param.from_order(shard) for param, shard in zip(params, shards, strict=True)]

    def is_across(self, param: ShardedParam) -> bool:
        """Return whether this schedule reduces the results of `reduce_scatter` across groups, too."""
        return not self.comm.defers and bool(self.comm.across(param.leaf))

    def reduce_across(self, shards: Sequence[jax.Array], params: Sequence[ShardedParam]) -> list[jax.Array]:
        """Reduce shards across groups; see `Collectives`."""
        return self.comm.reduce_across(shards, [param.leaf for param in params])

    def add(self, total: jax.Array | None, grad: jax.Array) -> jax.Array:
        """Return the sum of the gradients of several uses. A single gradient keeps its type."""
        if total is None:
            return grad
        wide = self.comm.encoding.sum_dtype(grad.dtype)
        return self.comm.add(total.astype(wide), grad.astype(wide))


@dataclasses.dataclass(frozen=True)
class Uses:
    """The uses of parameters in one pass over a program: its segments that gather, in the order of the pass.

    Attributes:
        params: What each use has to have gathered when it starts.
        computes: For each use, whether it has work to hide communication behind.
        arguments: The program's arguments.
        rows: Where the program's variables hold the rows of the batch.
    """

    params: Sequence[Sequence[ShardedParam]]
    computes: Sequence[bool]
    arguments: Collection
    rows: Mapping[Any, State]


class GatherScheduler:
    """The gathers of one pass over a program, each started a number of uses ahead.

    Lives as long as one trace of one pass.

    Attributes:
        env: Values of the program's variables.
        uses: What the pass gathers.
        options: How to gather.
        position: The index in `uses` of the segment that runs now.
        frontier: What depends on the segment that gathered last, and is not read yet by all that will read it.
    """

    def __init__(self, env: MutableMapping, uses: Uses, options: Options):
        self.env = env
        self.uses = uses
        self.options = options
        self.position = 0
        self.frontier: Sequence = ()
        self._next = 0
        self._gathered: dict[int, list] = {}

    def rows_of(self, variables: Sequence) -> list[State]:
        """Return where some variables hold the rows of the batch; what is made from parameters alone does not."""
        return [self.uses.rows.get(var, NOWHERE) for var in variables]

    def take(
        self,
        *anchors: Sequence[jax.Array],
        rows: Sequence[State],
        ahead: bool = True,
        beside: MutableMapping | None = None,
    ) -> tuple[list, list[list[jax.Array]]]:
        """Return the gathered parameters of this segment and the `anchors`, behind the barrier.

        With `ahead`, gathers up to `prefetch` positions on are started too, no earlier than
        the anchors are computed; a loop starts them later, with `start`.
        """
        behind = self.start(*anchors, rows=rows, ahead=ahead, beside=beside)
        return self._gathered.pop(self.position), behind

    def start(
        self,
        *anchors: Sequence[jax.Array],
        rows: Sequence[State],
        ahead: bool = True,
        beside: MutableMapping | None = None,
    ) -> list[list[jax.Array]]:
        """Start the gathers that may run beside this segment; returns the anchors.

        `rows` says where the first of the anchors, a list, hold the rows of the batch.
        Where the anchors do not depend on the segment before, `beside` has the values of the `frontier`. The gathers
        then wait for one of these too, and the segment itself does not: branches stay independent.
        """
        due = []
        for place in range(self._next, min(self.position + ahead * self.options.prefetch + 1, len(self.uses.params))):
            if place > self.position and not all(v in self.env for p in self.uses.params[place] for v in p.operands):
                break
            due.append(place)
        self._next += len(due)
        roots = list(dict.fromkeys(p.root for place in due for p in self.uses.params[place]))
        # The first anchor is what the segment reads: without it the barrier delays nothing.
        first, (*rest, values) = barrier(anchors[0], *anchors[1:], [self.env[root] for root in roots])
        waited, rows_waited = [], []
        if beside is not None:
            # It is put back for its readers: XLA drops a barrier's operand if nobody reads the result.
            keys = [key for key in self.frontier if key in beside][:1]
            waited, (values,) = barrier([beside[key] for key in keys], values)
            beside.update(zip(keys, waited, strict=True))
            rows_waited = self.rows_of(keys)
        behind = {**self.env, **dict(zip(roots, values, strict=True))}
        for place in due:
            self._gathered[place] = self._gather(place, behind, first or waited, rows if first else rows_waited)
        return [first, *rest]

    def _gather(self, place: int, env: Mapping, anchor: Sequence[jax.Array], rows: Sequence[State]) -> list[jax.Array]:
        unique = {p.key: p for p in self.uses.params[place]}
        params = list(unique.values())
        zero = functools.cache(lambda: self.options.comm.zero_after(anchor, rows))
        shards = self.options.encode([p.shard(env, zero) for p in params], params)
        exposed = not any(self.uses.computes[max(0, place - self.options.prefetch) : place])
        gathered = dict(zip(unique, self.options.gather(shards, params, exposed=exposed), strict=True))
        return [gathered[p.key] for p in self.uses.params[place]]

    @property
    def is_last(self) -> bool:
        """Return whether no later segment gathers."""
        return self.position == len(self.uses.params) - 1

    @property
    def is_hidden_after(self) -> bool:
        """Return whether a later segment of this pass has work to hide this segment's communication behind."""
        return any(self.uses.computes[self.position + 1 :])

    def finish(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this segment's results, delayed until the next segment's gathers are done.

        Otherwise XLA sinks the gather to its use.
        """
        following = self.position + 1
        if following not in self._gathered or not self.uses.computes[self.position]:
            return list(results)
        results, (self._gathered[following],) = barrier(results, self._gathered[following])
        return results


class GradState(enum.Enum):
    """What was done to a gradient, and is left to do: it is reduce-scattered, reduced across, then accumulated."""

    COMPUTED = enum.auto()
    SCATTERED = enum.auto()
    REDUCED = enum.auto()


@dataclasses.dataclass(frozen=True)
class PendingGrad:
    """A gradient that is not accumulated yet.

    Attributes:
        key: A sharded parameter, or the variable of an argument, whose gradient is not reduced here.
        value: A full gradient when `COMPUTED`, afterwards a shard.
        state: What was done to it.
        stack: The number of the scan's stack that the gradient is a layer of, if it is.
    """

    key: Any
    value: jax.Array
    state: GradState
    stack: int | None = None


class GradScheduler:
    """The gradients of one backward pass, on their way to the arguments; lives as long as its trace.

    XLA's scheduler puts off the gradients of parameters, which nothing waits for, and keeps
    every layer's activations for them. So the gradients of a block must be computed before the
    next block's backward pass starts, and be reduce-scattered before the one after; a reduction
    across (`Collectives`) has another block's time.

    Attributes:
        env: Values of the program's variables.
        arguments: The program's arguments.
        cotangents: Of variables, those of the parameters' shards among them.
        options: How to reduce.
    """

    def __init__(self, env: Mapping, arguments: Collection, options: Options):
        self.env = env
        self.arguments = dict.fromkeys(arguments)
        self.cotangents: dict = {}
        self.options = options
        self._stacks: list[tuple[ShardedParam, jax.Array]] = []
        self._queue: list[PendingGrad] = []

    @property
    def due(self) -> list[jax.Array]:
        """Return the values that must be computed before the next block's backward pass."""
        return [pending.value for pending in self._queue]

    def settle(self, due: Sequence[jax.Array]) -> None:
        """Take `due` back from behind a barrier: do what each gradient needs next."""
        queue = [dataclasses.replace(pending, value=x) for pending, x in zip(self._queue, due, strict=True)]
        for pending in queue:
            if pending.state is GradState.REDUCED:
                self._accumulate(pending)
        scattered, computed = (
            [pending for pending in queue if pending.state is state]
            for state in (GradState.SCATTERED, GradState.COMPUTED)
        )
        self._queue = [*self._reduced_across(scattered), *self._scattered(computed)]

    def add_others(self, variables: Sequence, cotangents: Sequence) -> None:
        """Add a block's cotangents of what it does not gather."""
        for var, cotangent in zip(variables, cotangents, strict=True):
            if var in self.arguments:
                self._queue.append(PendingGrad(var, cotangent, GradState.REDUCED))
            else:
                self.add(var, cotangent)

    def add_params(
        self,
        params: Sequence[ShardedParam],
        grads: Sequence,
        *,
        exposed: bool,
        stacks: Mapping[tuple, int] = MappingProxyType({}),
    ) -> None:
        """Add the gradients of one block's gathered parameters.

        Args:
            params: The parameters.
            grads: Their gradients, not yet summed over devices.
            exposed: Whether no block that computes follows in this pass.
            stacks: For the key of a layer of a scan, the number that `add_stack` gave its stack.
        """
        totals: dict[tuple, tuple[ShardedParam, jax.Array]] = {}
        for param, grad in zip(params, grads, strict=True):
            first, total = totals.get(param.key, (param, None))
            totals[param.key] = first, self.options.add(total, grad)
        computed = [
            # Transposed before the barrier, where the compiler sees that this undoes the product's own transpose.
            PendingGrad(param, param.to_order(total), GradState.COMPUTED, stacks.get(key))
            for key, (param, total) in totals.items()
        ]
        at_once = exposed or not self.options.prefetch
        self._queue += self._scattered(computed, exposed=exposed) if at_once else computed

    def add_scattered(self, params: Sequence[ShardedParam], shards: Sequence, stacks: Sequence[int]) -> None:
        """Add gradients of layers of a scan that are not reduced across yet; `stacks` as `add_stack` gave them."""
        state = GradState.SCATTERED
        self._queue += [PendingGrad(*one[:2], state, one[2]) for one in zip(params, shards, stacks, strict=True)]

    def add_stack(self, param: ShardedParam, stack: jax.Array) -> int:
        """Add the gradients of a scan's stack; a layer that is missing yet goes to `add_params`, with this number."""
        self._stacks.append((param, stack))
        return len(self._stacks) - 1

    def drain(self) -> None:
        """Accumulate all gradients but those of stacks."""
        while self._queue:
            self.settle(self.due)

    def finish(self) -> None:
        """Accumulate the last gradients."""
        self.drain()
        for param, stack in self._stacks:  # a stack of summands becomes the summands of a stack
            stack = jnp.moveaxis(stack, 0, stack.ndim - len(param.leaf.shape))
            self.add(param.root, self.root_grad(param, stack))

    def root_grad(self, param: ShardedParam, grad: jax.Array) -> jax.Array:
        """Return the gradient of the parameter's shard; see `ShardedParam.root_grad`."""
        shape = self.options.comm.grad_shape(param.stored)
        rank = grad.ndim - len(param.leaf.shape) + len(param.stored.shape)
        return param.root_grad(grad, self.env, shape[-rank:] if rank else ())

    def add(self, key: Any, cotangent: jax.Array) -> None:
        """Add a cotangent to those of its key."""
        found = self.cotangents.get(key)
        self.cotangents[key] = cotangent if found is None else self.options.comm.add(found, cotangent)

    def _scattered(self, computed: Sequence[PendingGrad], *, exposed: bool = False) -> list[PendingGrad]:
        shards = self.options.reduce_scatter([p.value for p in computed], [p.key for p in computed], exposed=exposed)
        return [
            dataclasses.replace(pending, value=shard, state=GradState.SCATTERED if across else GradState.REDUCED)
            for pending, shard in zip(computed, shards, strict=True)
            for across in [self.options.is_across(pending.key)]
        ]

    def _reduced_across(self, scattered: Sequence[PendingGrad]) -> list[PendingGrad]:
        sums = self.options.reduce_across([p.value for p in scattered], [p.key for p in scattered])
        state = GradState.REDUCED
        return [dataclasses.replace(one, value=x, state=state) for one, x in zip(scattered, sums, strict=True)]

    def _accumulate(self, pending: PendingGrad) -> None:
        param, decode = pending.key, self.options.comm.encoding.decode_grad
        if not isinstance(param, ShardedParam):
            self.add(param, pending.value)
        elif pending.stack is None:
            grad = decode(pending.value, self.env[param.root].dtype)
            self.add(param.root, self.root_grad(param, grad))
        else:
            stacked, stack = self._stacks[pending.stack]
            row = self.options.comm.like(decode(pending.value, stack.dtype), stack[0])
            self._stacks[pending.stack] = stacked, lax.dynamic_update_index_in_dim(stack, row, param.layer, 0)


def cotangents_of(keys: Sequence, variables: Sequence, cotangents: Mapping) -> list | None:
    """Return the cotangents of the results `keys`, with zeros for missing ones, or None if all are missing."""
    if not any(key in cotangents for key in keys):
        return None
    return [
        cotangents[key] if key in cotangents else compat.zero_cotangent(var.aval.shape, var.aval.dtype)
        for key, var in zip(keys, variables, strict=True)
    ]
