"""The options of a pass: its collectives, and how far ahead it gathers. Schedules, segments and loops read them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax

from zerojax.comm.collectives import Collectives
from zerojax.gather.sharded_param import ShardedParam


class Sums(NamedTuple):
    """The sums over devices that the reduction of gradients makes, instead of the backward pass of a segment."""

    later: tuple[int, ...] = ()  # indices of the others whose cotangents may be partial sums
    experts: tuple[tuple[int, tuple[str, ...]], ...] = ()  # `Collectives.experts` of `(*params, *others)`, as pairs

    @classmethod
    def of(cls, later: Iterable[int], experts: Mapping[int, tuple[str, ...]]) -> "Sums":
        return cls(tuple(later), tuple(experts.items()))


@dataclasses.dataclass(frozen=True)
class Options:
    """The options for gathering parameters and reducing gradients."""

    comm: Collectives
    prefetch: int  # how many uses ahead a gather may start; 0 disables prefetch
    reshard_after_forward: bool  # whether gathered parameters are dropped after the forward pass

    def reduce_scatter(
        self, grads: Sequence[jax.Array], params: Sequence[ShardedParam], *, exposed: bool = False
    ) -> list[jax.Array]:
        """Reduce-scatter gradients whose dims are in the `order` of their parameter; see `Collectives`."""
        leaves = [param.grad_leaf for param in params]
        shards = self.comm.reduce_scatter(grads, leaves, exposed=exposed)
        return [param.from_order(shard) for param, shard in zip(params, shards, strict=True)]

    def is_across(self, param: ShardedParam) -> bool:
        """Return whether a result of `reduce_scatter` must be reduced across groups during this pass, too."""
        return not self.comm.defers and bool(self.comm.across(param.leaf))

    def add(self, total: jax.Array | None, grad: jax.Array) -> jax.Array:
        """Add the gradient of one more use to a total, in a wide type. The first gradient keeps its type."""
        if total is None:
            return grad
        wide = self.comm.sum_dtype(grad.dtype)
        return self.comm.add(total.astype(wide), grad.astype(wide))
