"""The schedule decides when each parameter is gathered, and when each gradient is computed and reduced.

`engine` makes a `GatherScheduler` for each pass and a `GradScheduler` for the backward pass. Segments ask the
`GatherScheduler` for gathered parameters, and give gradients to the `GradScheduler`.

XLA's scheduler moves a collective as far as data dependence allows. Gathers move to the start of the program, where
they fill the memory, or to their use, where no compute hides them. An optimization barrier is the only portable way to
fix an order, because its results depend on all of its operands. The barriers here enforce four rules. A block is a
segment that gathers.

- A gather may start when an earlier block starts: the one that comes `prefetch` blocks before the use. The shards pass
  a barrier together with the earlier block's input (`GatherScheduler.start`).
- A gather must end when the block just before its use ends. The gathered parameters pass a barrier together with the
  results of the block before (`GatherScheduler.finish`).
- A block's gradients must be computed when the next block's backward pass starts, and reduce-scattered when that pass
  ends. The gradients pass a barrier together with the next block's cotangents (`GradScheduler.due` and `settle`).
- In hybrid sharding, a gradient is also reduced across hosts. This second reduction must end one block later.

Consecutive small blocks are one group (`engine.gather_groups`), which has one gather and one reduction. The rules hold
for the group as if it were one block, but each block's gradients must still be computed when the next block starts.
"""

import bisect
import dataclasses
import enum
import itertools
from collections.abc import Collection, Mapping, MutableMapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.comm.manual import barrier
from zerojax.dims import NOWHERE, RowDims
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass(frozen=True)
class Options:
    """The options for gathering parameters and reducing gradients in a pass."""

    comm: Collectives
    prefetch: int  # how many groups ahead a gather may start; 0 disables prefetch
    reshard_after_forward: bool  # whether gathered parameters are dropped after the forward pass


@dataclasses.dataclass(eq=False)
class GatherScheduler:
    """The gathers of one pass over a program. The scheduler exists as long as one trace of the pass.

    Each segment that gathers is one use of parameters. For each use, `take` starts the gathers that are due (`start`),
    and returns the parameters of this use. The segment then computes its results, and `finish` delays them until the
    gathers for the next use are done. Then `engine` updates `position` and `frontier`.

    An anchor is a list of arrays that a gather waits for: the shards pass a barrier with the anchor. The segment must
    read the anchor as the barrier returns it, because XLA drops an array from a barrier if nothing reads it afterwards.
    """

    env: MutableMapping  # values of the program's variables
    options: Options
    params: Sequence[Sequence[ShardedParam]]  # for each use, in order, the parameters that it needs when it starts
    computes: Sequence[bool]  # for each use, whether it has work that hides communication (`Segment.computes`)
    groups: Sequence[int]  # for each use, the number of its group, from 0
    arguments: Collection  # the program's arguments, and the scales of quantised weights
    rows: Mapping[Any, RowDims]  # for each variable of the program, which dims hold the rows of the batch
    position: int = 0  # the use that runs now
    frontier: Sequence = ()  # variables that depend on the previous use, and that a later segment reads; empty at first
    _next: int = 0
    _gathered: dict[int, list] = dataclasses.field(default_factory=dict)

    def rows_of(self, variables: Sequence) -> list[RowDims]:
        """Return which dims of `variables` hold the rows of the batch. A variable that is not in `rows` holds none."""
        return [self.rows.get(var, NOWHERE) for var in variables]

    def take(self, *anchors: Sequence[jax.Array], **options: Any) -> tuple[list, list[list[jax.Array]]]:
        """Call `start` with the same arguments, and return `(gathered parameters of this segment, anchors)`."""
        waited = self.start(*anchors, **options)
        return self._gathered.pop(self.position), waited

    @jax.named_scope(names.SHARDS)
    def start(
        self,
        *anchors: Sequence[jax.Array],
        rows: Sequence[RowDims],
        ahead: bool = True,
        beside: MutableMapping | None = None,
    ) -> list[list[jax.Array]]:
        """Start the gathers that may run during this segment. Return the anchors, as the barrier returns them.

        `rows` has the row dims of the first anchor's arrays. If `ahead` is true, the gathers of the next `prefetch`
        groups start, too. A loop that gathers layers starts those only in its last iteration.

        `beside` maps variables to values, for a segment on an independent branch, which does not depend on the previous
        segment that gathered. The gathers (not the segment) then also wait for one variable of the `frontier`, and its
        value in `beside` is replaced. In the first block of a pass, the frontier is empty, so `beside` has no effect.
        """
        due, last = [], self.groups[self.position] + (self.options.prefetch if ahead else 0)
        for use in range(self._next, bisect.bisect_right(self.groups, last)):
            # A later gather must wait if it reads a slice whose index is not computed yet.
            if use > self.position and not all(v in self.env for p in self.params[use] for v in p.operands):
                break
            due.append(use)
        self._next += len(due)
        roots = list(dict.fromkeys(p.root for use in due for p in self.params[use]))
        anchor, (*others, shards) = barrier(anchors[0], *anchors[1:], [self.env[root] for root in roots])
        waited, rows_waited = [], []
        if beside is not None:
            # The value that the barrier returns replaces the old one, because XLA drops what no equation reads.
            keys = [key for key in self.frontier if key in beside][:1]
            waited, (shards,) = barrier([beside[key] for key in keys], shards)
            beside.update(zip(keys, waited, strict=True))
            rows_waited = self.rows_of(keys)
        # The gathers wait for the anchor and, with `beside`, for a variable of the frontier. With neither of them, as
        # in a first block that reads only arguments, the gathers wait for nothing.
        after_barrier = {**self.env, **dict(zip(roots, shards, strict=True))}
        for _, uses in itertools.groupby(due, self.groups.__getitem__):
            self._gather([*uses], after_barrier, anchor or waited, rows if anchor else rows_waited)
        return [anchor, *others]

    def _gather(self, uses: Sequence[int], env: Mapping, anchor: Sequence, rows: Sequence[RowDims]) -> None:
        """Gather the parameters of `uses`, which are in one group. Parameters with equal keys are gathered once."""
        unique = {p.key: p for use in uses for p in self.params[use]}
        params = list(unique.values())
        # XLA:CPU removes the barrier that the shards passed, and then slices a layer early if the layer's index is
        # constant. So the index depends on the anchor.
        zero = self.options.comm.zero_after(anchor, rows) if any(p.layer is not None for p in params) else None
        shards = [p.shard(env, zero) for p in params]
        # If no work hides this gather, its buckets are smaller, so that the use can start on the first of them.
        start = bisect.bisect_left(self.groups, self.groups[uses[0]] - self.options.prefetch)
        exposed = not any(self.computes[start : uses[0]])
        full = self.options.comm.all_gather(shards, [p.leaf for p in params], exposed=exposed)
        gathered = dict(zip(unique, full, strict=True))
        self._gathered |= {use: [gathered[p.key] for p in self.params[use]] for use in uses}

    @property
    def is_last(self) -> bool:
        return self.groups[self.position] == self.groups[-1]

    @property
    def ends_group(self) -> bool:
        return self.position + 1 not in self._group(self.position)

    def _group(self, use: int) -> range:
        number = self.groups[use]
        return range(bisect.bisect_left(self.groups, number), bisect.bisect_right(self.groups, number))

    @property
    def is_hidden_after(self) -> bool:
        return any(self.computes[self.position + 1 :])

    def finish(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """Return this segment's results. The last results of a group are delayed until the next group's gathers end."""
        if self.position + 1 == len(self.params) or not self.ends_group:
            return list(results)
        following = [use for use in self._group(self.position + 1) if use in self._gathered]
        # Without the barrier, XLA moves the gather down to its use. But a segment without products does not hide the
        # gather, so there the barrier would only delay the results.
        if not any(self.computes[use] for use in self._group(self.position)):
            return list(results)
        results, gathered = barrier(results, *(self._gathered[use] for use in following))
        self._gathered |= dict(zip(following, gathered, strict=True))
        return results


def reduce_scattered(
    comm: Collectives, grads: Sequence[jax.Array], params: Sequence[ShardedParam], *, exposed: bool = False
) -> list[jax.Array]:
    """Reduce-scatter gradients, whose dims are in the order `ShardedParam.order`. Return shards in the stored order."""
    shards = comm.reduce_scatter(grads, [param.grad_leaf for param in params], exposed=exposed)
    return [param.from_order(shard) for param, shard in zip(params, shards, strict=True)]


class GradState(enum.Enum):
    """The last step that a gradient has gone through. A gradient that needs no reduction is `REDUCED` at once."""

    COMPUTED = enum.auto()
    SCATTERED = enum.auto()
    REDUCED = enum.auto()


@dataclasses.dataclass(frozen=True)
class PendingGrad:
    """A gradient that is not accumulated yet."""

    # The `ShardedParam` whose gradient this is, or the variable of another argument, which needs no reduction.
    key: Any
    value: jax.Array  # the full gradient if it is `COMPUTED`, or if `key` is a variable; else the shard's gradient
    state: GradState
    stack: int | None = None  # if the gradient is that of one layer of a scan's stack, the number from `add_stack`


@dataclasses.dataclass(eq=False)
class GradScheduler:
    """The gradients of one backward pass. The scheduler exists as long as one trace of the pass.

    No equation of the pass reads a parameter's gradient, so XLA's scheduler would compute all gradients at the end, and
    keep every layer's activations until the end. A gradient therefore waits in a queue. Each block passes the queue
    through its barrier (`due`, `settle`), and each gradient moves on by one `GradState`.
    """

    env: Mapping  # values of the program's variables
    options: Options
    arguments: Collection  # the program's arguments; their gradients also wait in the queue
    # Variables whose cotangents may stay partial sums: arguments, until the pass ends, and values that are computed
    # from parameters alone, until their cotangents have become gradients of the parameters.
    summed_later: Set
    # The accumulated cotangents, by variable. For a sharded parameter, the gradient of the shard.
    cotangents: dict = dataclasses.field(default_factory=dict)
    # Whether the next block is in the group of the block that ran last. If so, gradients wait for the next block.
    group_continues: bool = False
    _stacks: list[tuple[ShardedParam, jax.Array]] = dataclasses.field(default_factory=list)
    _queue: list[PendingGrad] = dataclasses.field(default_factory=list)
    # gradients that passed a barrier, and wait for the rest of their group
    _waiting: list[PendingGrad] = dataclasses.field(default_factory=list)

    @property
    def due(self) -> list[jax.Array]:
        return [pending.value for pending in self._queue]

    @jax.named_scope(names.SHARDS)
    def settle(self, due: Sequence[jax.Array], *, flush: bool = False) -> None:
        """Move each gradient in the queue on by one `GradState`. `due` has `self.due`, as a barrier returned it.

        `REDUCED` gradients are accumulated. If `flush` is true, gradients do not wait for the rest of their group.
        """
        queue = [dataclasses.replace(pending, value=x) for pending, x in zip(self._queue, due, strict=True)]
        in_state = lambda state: [pending for pending in queue if pending.state is state]
        for pending in in_state(GradState.REDUCED):
            self._accumulate(pending)
        # A block of frozen parameters, which adds no gradients, may end the group. So the block says when waiting ends.
        waits = self.group_continues and not flush
        computed = [*self._waiting, *in_state(GradState.COMPUTED)]
        self._waiting = computed if waits else []
        reduced = self._reduced_across(in_state(GradState.SCATTERED))
        self._queue = [*reduced, *self._scattered([] if waits else computed)]

    def add_others(self, variables: Sequence, cotangents: Sequence) -> None:
        """Add the cotangents of a block's other inputs, which are not gathered."""
        for var, cotangent in zip(variables, cotangents, strict=True):
            if var in self.arguments:
                self._queue.append(PendingGrad(var, cotangent, GradState.REDUCED))
            else:
                self.add_input(var, cotangent)

    def add_input(self, var: Any, cotangent: jax.Array) -> None:
        """Accumulate the cotangent of a segment's input, summed over the workers unless `summed_later` has `var`."""
        partial = var not in self.summed_later and cotangent.ndim > var.aval.ndim
        self.add(var, cotangent.sum(0) if partial else cotangent)

    @jax.named_scope(names.SHARDS)
    def add_params(
        self,
        params: Sequence[ShardedParam],
        grads: Sequence,
        *,
        exposed: bool,
        stacks: Mapping[tuple, int] = MappingProxyType({}),
        waits: bool = False,
    ) -> None:
        """Add the gradients of one block's gathered parameters. These gradients are not summed over devices yet.

        `exposed` says that no later block of this pass can hide the reduction. `stacks` maps the key of a scan's layer
        to the number that `add_stack` returned for its stack. `waits` says that these gradients are reduced together
        with those of a later block of the same group.
        """
        totals: dict[tuple, tuple[ShardedParam, jax.Array]] = {}
        for param, grad in zip(params, grads, strict=True):
            first, total = totals.get(param.key, (param, None))
            totals[param.key] = first, self.options.comm.add_use(total, grad)
        computed = [
            # Here, before the barrier, the compiler sees that this transpose undoes the transpose of the product.
            self._with_waiting(PendingGrad(param, param.to_order(total), GradState.COMPUTED, stacks.get(key)))
            for key, (param, total) in totals.items()
        ]
        if exposed:
            # Wait until the previous block's gradients are reduced. Otherwise XLA may reduce the previous ones later,
            # when nothing is left to compute. Reductions across hosts use another link, so nothing waits for those.
            sent = [
                x.value
                for x in self._queue
                if isinstance(x.key, ShardedParam) and x.state is self._scattered_state(x.key)
            ]
            computed = [dataclasses.replace(x, value=barrier([x.value], sent)[0][0]) for x in computed]
        if not waits and (exposed or not self.options.prefetch):
            computed, self._waiting = self._scattered([*self._waiting, *computed], exposed=exposed), []
        self._queue += computed

    def _with_waiting(self, new: PendingGrad) -> PendingGrad:
        """Return `new`, plus the waiting gradient of an earlier block if both are of the same gathered parameter.

        Until the group ends, memory then holds only this sum, which passes the next block's barrier.
        """
        for i, earlier in enumerate(self._waiting):
            if earlier.key.key == new.key.key and earlier.stack == new.stack:
                del self._waiting[i]
                value = new.key.to_order(earlier.key.from_order(earlier.value))
                return dataclasses.replace(new, value=self.options.comm.add_use(value, new.value))
        return new

    def add_scattered(self, params: Sequence[ShardedParam], shards: Sequence, stacks: Sequence[int]) -> None:
        """Add shards of layers' gradients, to be reduced across hosts. `stacks` are numbers from `add_stack`."""
        triples = zip(params, shards, stacks, strict=True)
        self._queue += [PendingGrad(param, shard, GradState.SCATTERED, stack) for param, shard, stack in triples]

    def add_stack(self, param: ShardedParam, stack: jax.Array) -> int:
        """Add a stack of layers' gradients. Return its number, for the layers that are added after the scan."""
        self._stacks.append((param, stack))
        return len(self._stacks) - 1

    def finish(self) -> None:
        while self._queue or self._waiting:
            self.settle(self.due, flush=True)
        for param, stack in self._stacks:
            # The layers are on dim 0, and partial sums per group on dim 1. A parameter's gradient has the groups first.
            stack = jnp.moveaxis(stack, 0, stack.ndim - len(param.leaf.shape))
            self.add(param.root, self.root_grad(param, stack))

    @jax.named_scope(names.SHARDS)
    def root_grad(self, param: ShardedParam, grad: jax.Array) -> jax.Array:
        shape = self.options.comm.grad_shape(param.stored)
        # `grad` may have one more dim in front, with one entry per group. The result keeps this dim.
        rank = grad.ndim - len(param.leaf.shape) + len(param.stored.shape)
        return param.root_grad(grad, self.env, shape[-rank:] if rank else ())

    @jax.named_scope(names.SHARDS)
    def add(self, key: Any, cotangent: jax.Array) -> None:
        total = self.cotangents.get(key)
        self.cotangents[key] = cotangent if total is None else self.options.comm.add(total, cotangent)

    def _scattered(self, computed: Sequence[PendingGrad], *, exposed: bool = False) -> list[PendingGrad]:
        grads, params = [p.value for p in computed], [p.key for p in computed]
        shards = reduce_scattered(self.options.comm, grads, params, exposed=exposed)
        pairs = zip(computed, shards, strict=True)
        return [dataclasses.replace(pending, value=x, state=self._scattered_state(pending.key)) for pending, x in pairs]

    def _scattered_state(self, param: ShardedParam) -> GradState:
        return GradState.SCATTERED if self.options.comm.is_across(param.leaf) else GradState.REDUCED

    def _reduced_across(self, scattered: Sequence[PendingGrad]) -> list[PendingGrad]:
        sums = self.options.comm.reduce_across([p.value for p in scattered], [p.key.leaf for p in scattered])
        pairs = zip(scattered, sums, strict=True)
        return [dataclasses.replace(pending, value=x, state=GradState.REDUCED) for pending, x in pairs]

    def _accumulate(self, pending: PendingGrad) -> None:
        param = pending.key
        if not isinstance(param, ShardedParam):
            self.add(param, pending.value)
        elif pending.stack is None:
            grad = lax.convert_element_type(pending.value, param.root.aval.dtype)
            self.add(param.root, self.root_grad(param, grad))
        else:
            stacked, stack = self._stacks[pending.stack]
            row = self.options.comm.like(lax.convert_element_type(pending.value, stack.dtype), stack[0])
            self._stacks[pending.stack] = stacked, lax.dynamic_update_index_in_dim(stack, row, param.layer, 0)
