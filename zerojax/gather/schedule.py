"""When each parameter is gathered, and when each gradient must be computed and reduce-scattered.

XLA's scheduler moves a collective as far as data dependence lets it: gathers to the top,
where they fill the memory, or to the last moment, where nothing is left to hide them
behind. So the order is said with optimization barriers: a gather may start when the block
`prefetch` blocks ahead of its use starts, and must be through when the block before its
use ends; a block's gradients must be computed when the next block's backward pass starts,
and be reduce-scattered when that ends.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.gather import collectives
from zerojax.gather.sharded_param import ShardedParam


@dataclasses.dataclass(frozen=True)
class Options:
    """How parameters are gathered.

    Attributes:
        axis: Mesh axis the parameters are cut over.
        prefetch: How many uses ahead a gather may start; 0 is none.
        bucket_bytes: Leaves of one block travel together up to this many logical bytes.
        reshard_after_forward: Drop gathered parameters after the forward pass.
        reduce: Floating type in which gradients are summed over the devices; None: their own.
    """

    axis: tuple[str, ...]
    prefetch: int
    bucket_bytes: int
    reshard_after_forward: bool
    reduce: np.dtype | None = None

    def gather(self, shards: Sequence[jax.Array], weights: Sequence[ShardedParam], *, covered: bool) -> list[jax.Array]:
        """Logical arrays of the shards of `weights`; `covered` by another block's work or not."""
        return collectives.gather(shards, weights, axis=self.axis, bucket_bytes=self._bucket(covered))

    def reduce_scatter(
        self, cotangents: Sequence[jax.Array], weights: Sequence[ShardedParam], *, covered: bool
    ) -> list[jax.Array]:
        """Shards of the summed cotangents of `weights`; `covered` by another block's work or not."""
        if self.reduce is not None:
            floats = [jnp.issubdtype(c.dtype, jnp.floating) for c in cotangents]
            cotangents = [c.astype(self.reduce) if on else c for c, on in zip(cotangents, floats, strict=True)]
        size = self._bucket(covered)
        return collectives.reduce_scatter(cotangents, weights, axis=self.axis, bucket_bytes=size, in_turn=not covered)

    def sum_dtype(self, dtype: np.dtype) -> np.dtype:
        """The type in which one device adds up the gradients of several uses."""
        return dtype if self.reduce is None else jnp.promote_types(dtype, self.reduce)

    def add(self, held: jax.Array | None, cotangent: jax.Array) -> jax.Array:
        """The gradients of several uses, added up; a single one is left as it is."""
        if held is None:
            return cotangent
        wide = self.sum_dtype(cotangent.dtype)
        return held.astype(wide) + cotangent.astype(wide)

    def _bucket(self, covered: bool) -> int:
        """The first gather and the last reduce-scatter can only hide behind their own block: piece by piece."""
        return self.bucket_bytes if covered else self.bucket_bytes // 4


class Gathers:
    """The gathers of one pass over a program, each started a number of uses ahead.

    Lives as long as one trace of one pass. `order` holds the weights that each gathering
    segment needs, in the order of the pass, `computes` whether it has work to hide others behind.
    """

    def __init__(self, order: Sequence[Sequence[ShardedParam]], computes: Sequence[bool], options: Options):
        self.order = order
        self.computes = computes
        self.options = options
        self.next = 0
        self.ready: dict[int, list] = {}

    def take(
        self, position: int, env: Mapping, *anchors: Sequence[jax.Array], ahead: bool = True
    ) -> tuple[list, list[list[jax.Array]]]:
        """Gathered weights of the segment at `position`, and the `anchors`, now behind the barrier.

        With `ahead`, gathers up to `prefetch` positions on are started too, no earlier than
        the anchors are there; a loop starts them later, with `start`.
        """
        behind = self.start(position, env, *anchors, ahead=ahead)
        return self.ready.pop(position), behind

    def start(
        self, position: int, env: Mapping, *anchors: Sequence[jax.Array], ahead: bool = True
    ) -> list[list[jax.Array]]:
        """Start what may start while the segment at `position` runs; gives the anchors back."""
        due = []
        for place in range(self.next, min(position + ahead * self.options.prefetch + 1, len(self.order))):
            if place > position and not all(v in env for w in self.order[place] for v in w.operands):
                break
            due.append(place)
        self.next += len(due)
        roots = list(dict.fromkeys(w.root for place in due for w in self.order[place]))
        # The first anchor is what the segment reads: without it the barrier holds nothing back.
        first, (*rest, values) = collectives.tie(anchors[0], *anchors[1:], [env[root] for root in roots])
        behind = {**env, **dict(zip(roots, values, strict=True))}
        for place in due:
            unique = {w.key: w for w in self.order[place]}
            shards = [w.shard(behind, collectives.zero_after(first)) for w in unique.values()]
            covered = any(self.computes[max(0, place - self.options.prefetch) : place])
            gathered = self.options.gather(shards, list(unique.values()), covered=covered)
            whole = dict(zip(unique, gathered, strict=True))
            self.ready[place] = [whole[w.key] for w in self.order[place]]
        return [first, *rest]

    def covers_after(self, position: int) -> bool:
        """Whether a later segment of this pass has work to hide communication behind."""
        return any(self.computes[position + 1 :])

    def finish(self, position: int, results: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the segment at `position`, once the next segment's gathers are through.

        Else a scheduler puts the gather off until nothing is left to hide it behind.
        """
        following = position + 1
        if following not in self.ready or not self.computes[position]:
            return list(results)
        results, (self.ready[following],) = collectives.tie(results, self.ready[following])
        return results


class GradScheduler:
    """Cotangents of gathered weights, on their way to the shards; lives as long as one trace of one pass.

    A scheduler left to itself puts off the gradients of parameters, which nothing waits for,
    and keeps every layer's activations for them. So the gradients of a block must be computed
    before the next block's backward pass starts, and be reduce-scattered before the one after.
    """

    def __init__(self, env: Mapping, found: MutableMapping, options: Options, arguments: frozenset):
        self.env = env
        self.found = found
        self.options = options
        self.arguments = arguments
        self.stacks: list[tuple[ShardedParam, jax.Array]] = []
        self.small: tuple[list, list] = ([], [])
        self.computed: tuple[list[tuple[ShardedParam, int | None]], list] = ([], [])
        self.scattered: tuple[list[tuple[ShardedParam, int | None]], list] = ([], [])

    @property
    def due(self) -> tuple[list, list, list]:
        """What must be there before the next block's backward pass.

        Gradients of whole parameters, of gathered ones, and shards of those of the block before.
        """
        return self.small[1], self.computed[1], self.scattered[1]

    def settle(self, small: list, computed: list, scattered: list) -> None:
        """Take `due` back from behind the barrier; start to reduce-scatter the gathered gradients."""
        for var, cotangent in zip(self.small[0], small, strict=True):
            add(self.found, var, cotangent)
        self.small = [], []
        for (weight, place), shard in zip(self.scattered[0], scattered, strict=True):
            self._bring(weight, place, shard)
        places = self.computed[0]
        self.scattered = places, self._scatter(places, computed, covered=True)
        self.computed = [], []

    def give_others(self, variables: Sequence, cotangents: Sequence) -> None:
        """Add a block's cotangents of what is no gathered weight."""
        for var, cotangent in zip(variables, cotangents, strict=True):
            if var in self.arguments:
                self.small[0].append(var)
                self.small[1].append(cotangent)
            else:
                add(self.found, var, cotangent)

    def give(
        self,
        weights: Sequence[ShardedParam],
        cotangents: Sequence,
        *,
        covered: bool,
        stacks: Mapping[tuple, int] = MappingProxyType({}),
    ) -> None:
        """Add the gradients of one block's gathered weights.

        Args:
            weights: The weights.
            cotangents: Their gradients, not yet summed over devices.
            covered: Whether more blocks that compute follow in this pass.
            stacks: For the key of a layer of a scan, the number that `give_stack` gave its stack.
        """
        unique: dict = {}
        for weight, cotangent in zip(weights, cotangents, strict=True):
            _, held = unique.get(weight.key, (weight, None))
            unique[weight.key] = weight, self.options.add(held, cotangent)
        places = [(weight, stacks.get(key)) for key, (weight, _) in unique.items()]
        # Before the barrier, where the compiler sees that this undoes the product's own transpose.
        made = [weight.to_order(cotangent) for weight, cotangent in unique.values()]
        if self.options.prefetch and covered:
            self.computed = places, made
        else:
            shards = self._scatter(places, made, covered=covered)
            self.scattered = [*self.scattered[0], *places], [*self.scattered[1], *shards]

    def finish(self) -> None:
        """Bring the last gradients home."""
        self.settle(*self.due)
        self.settle(*self.due)
        for weight, stack in self.stacks:
            add(self.found, weight.root, weight.root_cotangent(stack, self.env))

    def give_stack(self, weight: ShardedParam, stack: jax.Array) -> int:
        """Add the gradients of a scan's stack; a layer that is missing yet goes to `give`, with the number returned."""
        self.stacks.append((weight, stack))
        return len(self.stacks) - 1

    def _scatter(self, places: Sequence[tuple[ShardedParam, int | None]], made: Sequence, *, covered: bool) -> list:
        weights = [weight for weight, _ in places]
        shards = self.options.reduce_scatter(made, [weight.as_made for weight in weights], covered=covered)
        return [weight.from_order(shard) for weight, shard in zip(weights, shards, strict=True)]

    def _bring(self, weight: ShardedParam, place: int | None, shard: jax.Array) -> None:
        if place is None:
            add(self.found, weight.root, weight.root_cotangent(shard, self.env))
            return
        stacked, stack = self.stacks[place]
        row = shard.astype(stack.dtype)
        self.stacks[place] = stacked, lax.dynamic_update_index_in_dim(stack, row, weight.turn, 0)


def add(found: MutableMapping, key, cotangent) -> None:
    """Add a cotangent to those found already."""
    found[key] = found[key] + cotangent if key in found else cotangent


def pulled(keys: Sequence, variables: Sequence, found: Mapping) -> list | None:
    """Cotangents of the results `keys`, zeros where there is none; None if there is none at all."""
    if not any(key in found for key in keys):
        return None
    return [
        found[key] if key in found else jnp.zeros(var.aval.shape, var.aval.dtype)
        for key, var in zip(keys, variables, strict=True)
    ]
