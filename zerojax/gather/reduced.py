"""Compute penalties, norms and statistics of parameters on shards. The rule "reduction" finds them and makes segments.

A penalty such as `jnp.sum(w**2)` needs no gather. Each device reduces its shard, and one small collective combines the
results. The equations that compute the operand of the reduction are its chain. They read parameters, and values that
are alike on all devices: literals, arguments, results of earlier reductions. Each equation of the chain must be
computable on one device's part of its operands (`parts.dims_after`). `Analysis` finds the chains.

`ReducedSegment` evaluates chains and reductions. The cotangents of its results are as small as the results, and each
device computes its shard of the gradient from them. So the backward pass needs no gather and no reduce-scatter. In
global view, there is one loss, and the cotangent of a result is complete. In device view, each device has a loss and a
cotangent, so the backward pass first sums the cotangents over the devices.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax
from jax import lax

from zerojax import compat, jaxprs
from zerojax.gather import parts
from zerojax.gather.on_parts import Division, Split, evaluate_on_shards
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.segments import BlockResiduals, Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import differentiable
from zerojax.placement.storage import to_device

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})


@dataclasses.dataclass
class Chain:
    """The inputs and equations that a segment needs to compute an equation on shards."""

    again: dict  # equations on values that are alike on all devices, which the segment computes again, as keys
    reads: list  # variables that are alike on all devices, and that the segment reads
    is_link: bool  # true: part of a reduction's chain, repeated in the reduction's segment; false: a reduction


class Analysis:
    """Finds chains. The containers `params`, `repeated` and `alike` belong to `Decisions`, which adds to them later."""

    def __init__(self, jaxpr: Any, params: Mapping[Any, ShardedParam], repeated: Mapping, alike: Set):
        self.params, self.repeated, self.alike = params, repeated, alike
        self.made = jaxprs.makers(jaxpr.eqns)
        self.place = {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
        self.uses, final = jaxprs.uses_of(jaxpr)
        # Variables that only reductions read, directly or after equations that can be computed on parts.
        self.reduced: set = set()
        for eqn in reversed(jaxpr.eqns):
            for var in eqn.outvars:
                readers = self.uses.get(var, ())
                if var not in final and readers and all(self._reduces(reader) for reader, _ in readers):
                    self.reduced.add(var)

    def _reduces(self, eqn: Any) -> bool:
        is_inner = eqn.primitive.name == "dot_general" and not eqn.outvars[0].aval.shape
        return eqn.primitive.name in parts.REDUCTIONS or is_inner or self._is_link(eqn)

    def _is_link(self, eqn: Any) -> bool:
        return eqn.primitive.name in parts.OF_SHARDS and self.reduced.issuperset(eqn.outvars)

    def ends(self, eqn: Any) -> list:
        """Return `[eqn]` if `eqn` is a reduction, or else the reductions to whose chains `eqn` belongs."""
        is_end = lambda eqn: not self.reduced.issuperset(eqn.outvars)
        readers = lambda eqn: [use for var in eqn.outvars for use, _ in self.uses.get(var, ())]
        return [*filter(is_end, jaxprs.reached([eqn], lambda eqn: [] if is_end(eqn) else readers(eqn)))]

    def chain(self, eqn: Any) -> Chain | None:
        """Return the chain of `eqn` if devices can compute `eqn` on their shards, or else None.

        `eqn` is a reduction, or an equation whose results are read only by reductions and their chains.
        """
        name, is_link = eqn.primitive.name, self._is_link(eqn)
        if eqn.effects or not (is_link or name in parts.REDUCTIONS or name == "dot_general"):
            return None
        again, reads = {}, []

        def behind(var):
            if var in self.params:
                reads.extend(self.params[var].operands)
            elif var in self.repeated:
                return jaxprs.variables_in(self.repeated[var].invars)
            # A stored broadcast is as large as the parameter. To compute it again for one device's part is cheap.
            elif (made := self.made.get(var)) is not None and self._is_cheap(made):
                again[made] = None
                return jaxprs.variables_in(made.invars)
            else:
                reads.append(var)
            return ()

        found = jaxprs.reached(jaxprs.variables_in(eqn.invars), behind)
        divisions = {Division.of(self.params[v].leaf) for v in found if v in self.params}
        dim = self._dim(eqn, found) if len(divisions) == 1 else parts.UNKNOWN
        if dim == parts.UNKNOWN:
            return None
        if dim is not None and not is_link:
            # Every device gets the whole result of a reduction, so it must be small.
            (division,), largest = divisions, max(a.aval.size for a in eqn.invars)
            if name not in parts.REDUCTIONS or eqn.outvars[0].aval.size * division.total > division.extent * largest:
                return None
        return Chain(again, reads, is_link=is_link and dim is not None)

    def _dim(self, eqn: Any, behind: Collection) -> parts.Dim:
        """Return the dim in which devices divide the result of `eqn`, None if all get the whole result, or `UNKNOWN`.

        `behind` are the variables from which the result is computed.
        """
        leaves = {v: self.params[v].leaf for v in behind if v in self.params}
        dims: dict = {v: leaf.dim for v, leaf in leaves.items() if not any(leaf.others)}
        dims |= {v: None for v in behind if v in self.alike and v not in leaves and v not in self.repeated}
        links = {self.place[id(made)]: made for v in behind if (made := self.repeated.get(v)) is not None}
        for _, link in sorted(links.items()):
            after = zip(link.outvars, parts.dims_after(link, dims, flattens=True), strict=True)
            dims |= {v: dim for v, dim in after if dim not in (None, parts.UNKNOWN)}
        return parts.dims_after(eqn, dims, flattens=True)[0]

    def _is_cheap(self, eqn: Any) -> bool:
        """Return whether an equation is cheap, and reads only alike values that are not computed from parameters."""
        reads = {*jaxprs.variables_in(eqn.invars)}
        of_params = not (reads.isdisjoint(self.params) and reads.isdisjoint(self.repeated))
        return not of_params and self.alike >= reads and (jaxprs.facts(eqn).elementwise or eqn.primitive.name in _MOVES)


@dataclasses.dataclass(frozen=True)
class ReducedSegment(Segment):
    """Reductions of parameters that are computed on shards. `params` is empty, because nothing is gathered.

    Attributes:
        shards: The parameters. They are the first arguments of the jaxpr, before `others`.
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
    def _splits(self) -> list[Split | None]:
        of_shards = [Split(param.leaf.dim, Division.of(param.leaf)) for param in self.shards]
        return [*of_shards, *[None] * len(self.others)]

    @property
    def _label(self) -> str:
        paths = list(dict.fromkeys(param.leaf.path for param in self.shards))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"zerojax_all_reduce[{paths[0]}{more}]"

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        env, comm = gathers.env, gathers.options.comm
        others, wanted = [env[v] for v in self.others], [None] * len(self.results)
        inputs = [*self._shards(env), *others]
        results = evaluate_on_shards(comm, parts.without_calls(self.jaxpr), inputs, self._splits, wanted, self._label)
        if not moving:
            return results, None
        indices = tuple(i for i, source in enumerate(self.sources) if source in moving)
        operands = [env[v] for param in self.shards for v in param.operands]
        return results, BlockResiduals(results, others, operands, None, indices)

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        wanted = [i for i, var in enumerate(self.jaxpr.outvars) if differentiable(var.aval.dtype)]
        cotangents = self.cotangents(wanted, grads)
        if cotangents is None:
            return
        comm, count, leaf = gathers.options.comm, len(self.shards), self.shards[0].leaf
        gathers.env.update(zip((v for p in self.shards for v in p.operands), residuals.operands, strict=True))
        inputs = [*self._shards(gathers.env), *residuals.others]
        moving = [i for i in residuals.passes if differentiable(inputs[i].dtype)]
        # In device view, each device has the cotangents of its own loss. With hybrid sharding, each group of devices
        # has all shards, and the caller may sum the gradients of the groups later.
        own_loss, across = comm.follower is None, () if comm.defers else comm.across(leaf)
        if own_loss:
            with jax.named_scope(self._label):
                cotangents = lax.psum(cotangents, (*leaf.axes, *across))
        known = [*(residuals.saved[i] for i in wanted), *cotangents]
        splits = [*self._splits, *[None] * len(known)]
        derivative, ends = self._derivative(moving, wanted), [splits[i] for i in moving]
        found = evaluate_on_shards(comm, derivative, [*inputs, *known], splits, ends, self._label)
        # In device view, each device has the sum for all losses, and the others' cotangents are summed once more later.
        losses = (leaf.shards if comm.defers else comm.losses) if own_loss else 1
        for i, cotangent in zip(moving, found, strict=True):
            if i >= count:
                grads.add(self.others[i - count], cotangent / losses if losses > 1 else cotangent)
                continue
            param = self.shards[i]
            shard = comm.own_part(cotangent.astype(gathers.env[param.root].dtype), param.leaf)
            grads.add(param.root, grads.root_grad(param, shard))

    def _shards(self, env: Mapping) -> list[jax.Array]:
        return [to_device(param.sliced(env)).astype(param.wide) for param in self.shards]

    def _derivative(self, moving: Sequence[int], wanted: Sequence[int]) -> Any:
        """Return a jaxpr without calls that computes the cotangents of the inputs with indices `moving`.

        Its arguments are all inputs, the results with indices `wanted`, and the cotangents of these results.
        """
        active = {i: self.jaxpr.outvars[i] for i in wanted}
        both = parts.both_passes(lambda values: jaxprs.run(self.jaxpr, (), *values), self.jaxpr.invars, moving, active)
        jaxpr, consts = compat.opened(both)
        # The results are arguments, so that maxima are not computed again.
        count, found = len(self.jaxpr.invars), jaxpr.outvars[: len(wanted)]
        inputs = [*jaxpr.invars[:count], *found, *jaxpr.invars[count:]]
        run = parts.function_of(jaxpr, consts, inputs, jaxpr.outvars[len(jaxpr.outvars) - len(moving) :])
        types = map(parts.bare, [*self.jaxpr.invars, *active.values(), *active.values()])
        return parts.without_calls(jax.make_jaxpr(run)(*types))
