"""Compute penalties, norms and statistics of parameters on shards. The rule "reduction" makes these segments.

Each device evaluates the equations of the segment on its shards (`parts`), and one small collective combines the terms
of all devices. The cotangents of the results are as small as the results, and each device computes its shard of the
gradient from them. So the backward pass needs no gather and no reduce-scatter.

In global view, there is one loss, and the cotangent of a result is complete. In device view, each device has a loss and
a cotangent, so the backward pass first sums the cotangents over the devices.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather.on_parts import Division, evaluate_parts, together
from zerojax.gather.parts import bare, both_passes, call, flat
from zerojax.gather.residuals import BlockResiduals, Static
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.segments import Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import differentiable
from zerojax.placement.storage import to_device


@dataclasses.dataclass(frozen=True)
class ReducedSegment(Segment):
    """Reductions of parameters that are computed on shards. `params` is empty, because nothing is gathered.

    Attributes:
        shards: The parameters. In the jaxpr, they come before the others.
    """

    shards: tuple[ShardedParam, ...] = ()

    @classmethod
    def of(cls, jaxpr: Any, params: tuple, others: tuple, results: tuple) -> "ReducedSegment":
        return cls(jaxpr, (), others, results, params)

    @property
    def sources(self) -> list:
        """Return the variables of the parameters' shards and of the others; see `Segment`."""
        return [*(param.root for param in self.shards), *self.others]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.shards[0].leaf.axes

    @property
    def _dims(self) -> list[int | None]:
        return [*(param.leaf.dim for param in self.shards), *[None] * len(self.others)]

    @property
    def _divisions(self) -> list[Division | None]:
        return [*(Division.of(param.leaf) for param in self.shards), *[None] * len(self.others)]

    @property
    def _label(self) -> str:
        paths = list(dict.fromkeys(param.leaf.path for param in self.shards))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"zerojax_all_reduce[{paths[0]}{more}]"

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        """Run the forward pass; see `Segment`."""
        env, none = gathers.env, [None] * len(self.results)
        others, flat_jaxpr = [env[v] for v in self.others], flat(self.jaxpr)

        def reduce(*values):
            return evaluate_parts(flat_jaxpr, values, self._dims, self._divisions, wanted=none, label=self._label)

        results = gathers.options.comm.per_shard(reduce, [*self._shards(env), *others], self._dims, none, self.axes)
        if not moving:
            return results, None
        indices = tuple(i for i, source in enumerate(self.sources) if source in moving)
        operands = [env[v] for param in self.shards for v in param.operands]
        return results, BlockResiduals(results, others, operands, None, Static(indices))

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        wanted = [i for i, var in enumerate(self.jaxpr.outvars) if differentiable(var.aval.dtype)]
        cotangents = self.cotangents(wanted, grads)
        if cotangents is None:
            return
        comm, count, leaf = gathers.options.comm, len(self.shards), self.shards[0].leaf
        gathers.env.update(zip((v for p in self.shards for v in p.operands), residuals.operands, strict=True))
        inputs = [*self._shards(gathers.env), *residuals.others]
        moving = [i for i in residuals.passes.value if differentiable(inputs[i].dtype)]
        derivative, known = self._derivative(moving, wanted), [*(residuals.saved[i] for i in wanted), *cotangents]
        dims, divisions = [*self._dims, *[None] * len(known)], [*self._divisions, *[None] * len(known)]
        ends = [None if (of := divisions[i]) is None else (self.shards[i].leaf.dim, of) for i in moving]
        # With hybrid sharding, each group of devices has all shards. The caller may sum their gradients later.
        own_loss, across = comm.follower is None, () if comm.defers else comm.across(leaf)

        def pull(*values):
            first, last = values[: -len(cotangents)], values[-len(cotangents) :]
            if own_loss:
                with jax.named_scope(self._label):
                    last = together(lax.psum, last, (*self.axes, *across))
            found = evaluate_parts(derivative, [*first, *last], dims, divisions, wanted=ends, label=self._label)
            # Each device has the sum for all losses, and the cotangents of the other inputs are summed over devices.
            losses = (leaf.shards if comm.defers else comm.losses) if own_loss else 1
            # The padding of a gradient is zero, whatever the derivative makes of the padding of the parts.
            trimmed = lambda x, end: x if end is None else end[1].fill(x, end[0], 0)
            found = [trimmed(x, end) for x, end in zip(found, ends, strict=True)]
            return [x / losses if i >= count and losses > 1 else x for i, x in zip(moving, found, strict=True)]

        found = comm.per_shard(pull, [*inputs, *known], dims, [dims[i] for i in moving], self.axes)
        for i, cotangent in zip(moving, found, strict=True):
            if i >= count:
                grads.add(self.others[i - count], cotangent)
                continue
            param = self.shards[i]
            shard = comm.own_part(cotangent.astype(gathers.env[param.root].dtype), param.leaf)
            grads.add(param.root, grads.root_grad(param, shard))

    def _shards(self, env: Mapping) -> list[jax.Array]:
        return [to_device(param.sliced(env)).astype(param.wide) for param in self.shards]

    def _derivative(self, moving: Sequence[int], wanted: Sequence[int]) -> Any:
        """Return the flat jaxpr of a function of inputs, of the `wanted` results, and of their cotangents.

        It returns the cotangents of the inputs `moving`.
        """
        active = {i: self.jaxpr.outvars[i] for i in wanted}
        both = both_passes(lambda values: call(self.jaxpr, *values), self.jaxpr.invars, moving, active)
        jaxpr, consts = compat.opened(both)
        # The results are arguments, so that maxima are not computed again.
        count, found = len(self.jaxpr.invars), jaxpr.outvars[: len(wanted)]
        eqns = [eqn for eqn in jaxpr.eqns if set(found).isdisjoint(eqn.outvars)]
        inputs = [*compat.constvars_of(jaxpr), *jaxpr.invars[:count], *found, *jaxpr.invars[count:]]
        part = compat.part_of(jaxpr, eqns, inputs, jaxpr.outvars[len(jaxpr.outvars) - len(moving) :])
        run = functools.partial(call, part, *jaxprs.as_jax_values(consts))
        return flat(jax.make_jaxpr(run)(*map(bare, [*self.jaxpr.invars, *active.values(), *active.values()])))
