"""A `Segment` has equations of the loss that run together on the same gathered parameters. A `Program` has segments.

`rules` chooses the class of each segment, `planner` makes them, and `engine` runs them forward and backward.

plain    `BlockSegment` without parameters: consecutive equations that use no sharded parameter
block    `BlockSegment`: one use of parameters (an equation, a user's remat, or a call of `zerojax.block`)
scan     `ScanSegment` (`scan`): a loop over stacked layers; each iteration works like a block
reduced  `ReducedSegment` (`reduced`): reductions of parameters, which are computed on shards and gather nothing

Each segment is differentiated by itself (`vjp`). If JAX differentiated the loss as a whole, gathered parameters would
be residuals, and the backward pass could not gather them again at a time that we choose.

Five words say which values have cotangents:

live      the variables of a program through which a cotangent flows from the results to an argument that needs one
moving    the live variables among a segment's inputs; none if no result of the segment is live
trained   for each parameter of a segment, whether it is moving
active    the same for the other inputs, and for the arguments of the whole program. The fields `active_params`,
          `active_others` and `active_results` of `Passes` have indices instead.
wanted    the indices of a segment's results that are live
"""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import jax

from zerojax import compat, jaxprs, names
from zerojax.comm.collectives import Collectives
from zerojax.dims import RowDims
from zerojax.gather.evaluate import as_gathered, evaluate_gathered
from zerojax.gather.schedule import GatherScheduler, GradScheduler
from zerojax.gather.sharded_param import ShardedParam, bytes_of, carried_by
from zerojax.gather.vjp import KnownRows, Passes, Sums, differentiable, shared_passes
from zerojax.primitives import Kind

if TYPE_CHECKING:
    from zerojax.gather.shardwise import Shardwise

_COMPUTING = frozenset({Kind.PRODUCT, Kind.KERNEL, Kind.FOREIGN})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockResiduals:
    """What a segment's forward pass stores for its backward pass."""

    # The saved residuals of `Passes.run`. For a scan, a pair `(saved, carried)`: stacks of these residuals, and stacks
    # of the carry with which each iteration started. For reductions, the results of the reductions.
    saved: Any
    others: Any  # inputs of the segment that are not gathered; None for an input that the backward pass does not read
    operands: Any  # values that the slices of the segment's parameters read (`ShardedParam.operands`)
    # None if the backward pass gathers the parameters again, else the list of gathered parameters. For a scan, a pair
    # `(shared, kept)` of parameters that every iteration uses, and stacks of gathered layers.
    gathered: Any
    # The `Passes` of the segment, or of one iteration of a scan. For reductions, the indices of the moving sources.
    passes: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Segment(abc.ABC):
    """Equations that run together."""

    jaxpr: Any  # from `(*params, *others)` to `results`
    params: tuple[ShardedParam, ...]  # the parameters to gather
    others: tuple  # the variables of the other inputs
    results: tuple  # the variables by which later segments or the caller read the results
    scope, lasting = (), False  # see `BlockSegment`

    def entered(self, *transforms: str) -> Any:
        """Enter the context in which the segment runs. A loop enters its name scopes inside those of `transforms`."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, Any]:
        """Run the forward pass, and return `(results, residuals)`.

        `moving` has the `sources` whose cotangents are wanted. If `moving` is empty, the residuals are None.
        """

    @abc.abstractmethod
    def backward(self, residuals: Any, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Take the results' cotangents from `grads`, and add the cotangents of parameters and others to `grads`."""

    @property
    def first_gather(self) -> Sequence[ShardedParam]:
        return self.params

    def last_gather(self, residuals: Any) -> Sequence[ShardedParam]:
        if residuals.gathered is not None:
            return []
        return [param for i, param in enumerate(self.params) if i in residuals.passes.needed]

    @property
    def gathered_bytes(self) -> list[int]:
        return [bytes_of(self.params)]

    @property
    def stacks(self) -> Sequence[ShardedParam]:
        """Return the stacks of which each iteration of a loop gathers one layer; `()` for other segments."""
        return ()

    @property
    def waits_for_next(self) -> bool:
        """Return whether the next gathers must end before this segment's results are used."""
        return True

    @property
    def sources(self) -> list:
        return [*(param.root for param in self.params), *self.others]

    @property
    def operands(self) -> list:
        return [v for param in self.params for v in param.operands]

    @functools.cached_property
    def computes(self) -> bool:
        """Return whether the segment has a matrix product or a kernel, which can hide communication."""
        return any(jaxprs.facts(eqn).kind in _COMPUTING for eqn in jaxprs.equations(self.jaxpr))

    def run(self, params: Sequence, others: Sequence) -> list:
        """Compute the results. `params` are in the types in which they were gathered."""
        if not self.params:
            return jaxprs.run(self.jaxpr, (), *others)
        values = [as_gathered(*pair) for pair in zip(params, self.params, strict=True)]
        return evaluate_gathered(self.jaxpr, (), [*values, *others])

    def live_results(self, moving: Set) -> list:
        """Return the results through which cotangents may flow to a variable in `moving`."""
        return self._results_in(jaxprs.moved_by(self._given(moving), self.jaxpr))

    def live_sources(self, results: Collection) -> list:
        """Return the sources to which cotangents may flow from any of `results`."""
        return self._sources_in(jaxprs.moving(self._returned(results), self.jaxpr))

    def after(self, sources: Collection) -> list:
        """Return the results that depend on any of `sources`."""
        return self._results_in(jaxprs.dependent_on(self._given(sources), self.jaxpr.eqns))

    def behind(self, results: Collection) -> list:
        """Return the sources that any of `results` depends on."""
        return self._sources_in(jaxprs.needed_for(self.jaxpr.eqns, self._returned(results))[1])

    def _given(self, sources: Collection) -> list:
        return [v for v, source in zip(self.jaxpr.invars, self.sources, strict=True) if source in sources]

    def _returned(self, results: Collection) -> list:
        return [v for key, v in zip(self.results, self.jaxpr.outvars, strict=True) if key in results]

    def _sources_in(self, variables: Collection) -> list:
        return [key for key, v in zip(self.sources, self.jaxpr.invars, strict=True) if v in variables]

    def _results_in(self, variables: Collection) -> list:
        return [key for key, v in zip(self.results, self.jaxpr.outvars, strict=True) if v in variables]

    def take_inputs(self, gathers: GatherScheduler, *, ahead: bool = True) -> tuple[list, list]:
        """Return `(gathered parameters, others)` for the forward pass, and start the gathers of later segments.

        The gathers wait for an anchor: an input that depends on the previous segment that gathered. A segment without
        an input of this kind is an independent branch, and its anchor is any input that a segment computed. The
        branch's gathers also wait for the previous segment (`beside`), but its computation must not wait for it.
        """
        if not self.params:
            return [], [gathers.env[v] for v in self.others]
        # One anchor is enough, because each input in `follows` depends on the previous segment that gathered.
        follows = [v for v in self.others if v in gathers.frontier]
        anchors = (follows or [v for v in self.others if v not in gathers.arguments])[-1:]
        beside = None if follows else gathers.env
        rows, values = gathers.rows_of(anchors), [gathers.env[v] for v in anchors]
        gathered, (values,) = gathers.take(values, rows=rows, ahead=ahead, beside=beside)
        gathers.env.update(zip(anchors, values, strict=True))
        return gathered, [gathers.env[v] for v in self.others]

    def summed_later(self, gathers: GatherScheduler, grads: GradScheduler) -> list[int]:
        """Return the indices of the others whose cotangents stay partial sums: arguments, and values that hold no rows.

        A value without rows may be a norm of a weight. If the norm's cotangent were summed, the compiler would also
        all-reduce the gradient of the weight, and then divide the arithmetic on this gradient over the devices.
        """
        # A parameter that was gathered for a loop is not among `rows`. Values of an extended type have no sums.
        is_number = lambda v: not jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
        has_none = lambda v: (rows := gathers.rows.get(v)) is not None and not rows.places and is_number(v)
        return [i for i, v in enumerate(self.others) if v in grads.summed_later or has_none(v)]

    @functools.cached_property
    def has_rule(self) -> bool:
        """Return whether the segment has a `jax.custom_vjp`, whose derivative may be nonlinear in the cotangents."""
        return any(compat.name_of(eqn) == "custom_vjp_call" for eqn in jaxprs.equations(self.jaxpr))

    def pulled(
        self, residuals: BlockResiduals, gathered: Sequence, given: Sequence, comm: Collectives, sums: Sums, zero=None
    ) -> tuple[list, list]:
        """Call `Passes.pull` once or, if a cotangent has partial sums, once per worker and without collectives."""
        passes: Passes = residuals.passes
        kept, avals = (residuals.others, residuals.saved), [self.jaxpr.outvars[i].aval for i in passes.active_results]
        given = [x.sum(0) if self.has_rule and x.ndim > a.ndim else x for x, a in zip(given, avals, strict=True)]
        rows = comm.by_worker(given, [aval.shape for aval in avals])
        with names.in_scopes(self.scope, "transpose", "jvp"):
            if rows is None:
                return passes.pull(comm, gathered, *kept, given, zero, sums=sums)
            one = dataclasses.replace(comm, mesh=None)
            return jax.vmap(lambda row: passes.pull(one, gathered, *kept, row, zero, sums=sums))(rows)

    def cotangents(self, indices: Sequence[int], grads: GradScheduler) -> list | None:
        """Return the cotangents of the results at `indices`: zeros for missing ones, but None if all are missing."""
        keys, avals = [self.results[i] for i in indices], [self.jaxpr.outvars[i].aval for i in indices]
        if not any(key in grads.cotangents for key in keys):
            return None
        return [
            grads.cotangents[key] if key in grads.cotangents else compat.zero_cotangent(aval.shape, aval.dtype)
            for key, aval in zip(keys, avals, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class BlockSegment(Segment):
    """One use of parameters, which are gathered together; or equations that use none."""

    # A cache of `Passes` by the types of their inputs. Segments with the same equations, such as the layers of an
    # unrolled model, share the cache. None if no other segment has these equations.
    shared: dict[Hashable, Passes] | None = dataclasses.field(default=None, compare=False)
    scope: tuple = ()  # the outermost name scopes of the equations, if `jaxpr` does not have them (`equal`)
    lasting: bool = False  # whether the results are gathered parameters, for several later segments

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        gathered, others = self.take_inputs(gathers)
        if not moving:
            with names.in_scopes(self.scope):
                return self.run(gathered, others), None
        comm = gathers.options.comm
        passes = shared_passes(
            self.shared,
            self.run,
            gathered,
            others,
            trained=[p.root in moving for p in self.params],
            active=[v in moving for v in self.others],
            # A segment without parameters may have unrelated equations, so it differentiates only its live results.
            wanted=None if self.params else [self.results.index(v) for v in self.live_results(moving)],
            rows=KnownRows(gathers.rows_of(self.others), gathers.rows_of(self.results), comm.follower, comm),
            carried=carried_by(self.params),
        )
        with names.in_scopes(self.scope, "jvp"):
            results, saved = passes.run(gathered, others)
        others = [x if i in passes.needed_others else None for i, x in enumerate(others)]
        # Between the last use and its backward pass runs only the end of the loss. So dropping the last use's
        # parameters and gathering them again would save no memory.
        keeps = not self.params or gathers.is_last or not gathers.options.reshard_after_forward
        kept = [x if i in passes.needed else None for i, x in enumerate(gathered)] if keeps else None
        return results, BlockResiduals(saved, others, [gathers.env[v] for v in self.operands], kept, passes)

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        passes: Passes = residuals.passes
        cotangents = self.cotangents(passes.active_results, grads)
        if cotangents is None:
            return
        comm = gathers.options.comm
        if not self.params:
            sums = Sums(tuple(i for i in passes.active_others if self.others[i] in grads.summed_later))
            _, to_others = self.pulled(residuals, (), cotangents, comm, sums)
            for index, cotangent in zip(passes.active_others, to_others, strict=True):
                grads.add_input(self.others[index], cotangent)
            return
        # Gradients in `due` come from the previous segment of this pass. They are in the barrier, so the gathers
        # wait for that segment, and `beside` is not needed.
        beside = None if grads.due else grads.cotangents
        again, (cotangents, due) = gathers.take(cotangents, grads.due, rows=passes.result_rows, beside=beside)
        grads.settle(due)
        gathered = residuals.gathered
        if gathered is None:
            values = dict(zip(sorted(passes.needed), again, strict=True))
            gathered = [values.get(i) for i in range(len(self.params))]
        # A segment without products may be a lookup, whose gradient is added into zeros. If the zeros did not depend on
        # `zero`, XLA could allocate them at the start of the program.
        makes_none = self.computes or all(jaxprs.facts(eqn).adds_no_zeros for eqn in jaxprs.equations(self.jaxpr))
        zero = None if makes_none else comm.zero_after(cotangents, passes.result_rows)
        sums = Sums.of(self.summed_later(gathers, grads), comm.experts(param.leaf for param in self.params))
        to_params, to_others = self.pulled(residuals, gathered, cotangents, comm, sums, zero)
        to_others = gathers.finish(to_others)
        grads.add_others([self.others[i] for i in passes.active_others], to_others)
        exposed, waits = not gathers.is_hidden_after, not gathers.ends_group
        with names.at_end(self.jaxpr, self.scope, "transpose", "jvp"):  # for the transposes of gradients
            grads.add_params([self.params[i] for i in passes.active_params], to_params, exposed=exposed, waits=waits)


def is_plain(eqn: Any) -> bool:
    """Return whether an equation can run in any block. Effects, remats, kernels and loops over layers cannot."""
    if eqn.effects or eqn.primitive.name in ("shard_map", "pallas_call") or compat.is_remat(eqn):
        return False
    # The operands that a scan reads row by row may be stacks of layers. Power iterations have no such operands.
    loop = compat.loop_of(eqn)
    return loop is None or len(eqn.invars) == loop.consts + loop.carry


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function, divided into segments."""

    invars: tuple  # variables of the arguments: parameters' shards, other arguments, constants
    segments: tuple[Segment, ...]  # in the order in which they run
    outs: tuple  # the results: variables or literals
    shardwise: "tuple[Shardwise, ...]"  # computations of quantised weights, on shards at the start of each pass
    rows: Mapping[Any, RowDims]  # which dims of a variable hold the rows of the batch; empty in device view
    experts: frozenset = frozenset()  # variables of experts that a data axis divides, and that are not gathered

    def live(self, active: Sequence[bool], results: Sequence) -> set:
        """Return the variables through which cotangents flow from `results` to the arguments that are `active`."""
        pairs = zip(self.invars, active, strict=False)
        forward = {v for v, on in pairs if on and differentiable(v.aval.dtype)}
        forward.update(c.param.root for c in self.shardwise if not forward.isdisjoint(c.eqn.invars))
        for segment in self.segments:
            forward.update(segment.live_results(forward.intersection(segment.sources)))
        found = set(jaxprs.variables_in(results))
        for segment in reversed(self.segments):
            found.update(segment.live_sources(found))
        found.update(v for c in self.shardwise if c.param.root in found for v in jaxprs.variables_in(c.eqn.invars))
        return forward & found
