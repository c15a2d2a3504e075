"""Segments of a loss function: equations that run together on the parameters gathered for them.

plain   consecutive equations that use no sharded parameter
block   a use: one equation, a user's remat, or what `zerojax.block` marks
scan    a loop over stacked layers, each iteration of which is a block (`scan`)

Each is differentiated here, and not by JAX as part of the loss: only so can the backward
pass gather each parameter again at a time of our choosing.
"""

import abc
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any

import jax
import jax.core

from zerojax import compat, jaxprs
from zerojax.comm.collectives import Collectives
from zerojax.gather.alike import SharedPasses
from zerojax.gather.evaluate import as_gathered, evaluate
from zerojax.gather.residuals import BlockResiduals, Static
from zerojax.gather.schedule import GatherScheduler, GradScheduler, cotangents_of
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import Passes, RowStates, differentiable, traced_passes

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call", "ffi_call"})


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A parameter, or something computed from parameters alone, that one segment gathers for later ones to read.

    Attributes:
        var: Its variable, by which its shard is known.
        segment: Which segment gathers it.
    """

    var: Any
    segment: int


@dataclasses.dataclass(frozen=True)
class Segment(abc.ABC):
    """Equations that run together.

    Attributes:
        jaxpr: The equations, from `(*params, *others)` to `results`.
        params: Parameters to gather for them.
        others: What else is read: variables, or `Gathered` parameters.
        results: What later segments or the caller read: variables, or `Gathered` parameters.
    """

    jaxpr: Any
    params: tuple[ShardedParam, ...]
    others: tuple
    results: tuple

    @abc.abstractmethod
    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, Any]:
        """Return `(results, residuals)`.

        `moving` are the `sources` that want cotangents; without them residuals are None.
        """

    @abc.abstractmethod
    def backward(self, residuals: Any, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Pull the cotangents of the results back to the parameters and others."""

    @property
    def first_gather(self) -> Sequence[ShardedParam]:
        """Return the parameters to gather when the forward pass starts."""
        return self.params

    def last_gather(self, residuals: Any) -> Sequence[ShardedParam]:
        """Return the parameters to gather when the backward pass starts."""
        if residuals.gathered is not None:
            return []
        return [param for i, param in enumerate(self.params) if i in residuals.passes.value.needed]

    @property
    def gathered_bytes(self) -> list[int]:
        """Return the bytes gathered by each use of parameters, in order."""
        return [bytes_of(self.params)]

    @property
    def stacks(self) -> Sequence[ShardedParam]:
        """Return the stacks of which each iteration gathers one layer."""
        return ()

    @property
    def waits_for_next(self) -> bool:
        """Return whether results are passed on only when the next segment's parameters are gathered."""
        return True

    @property
    def sources(self) -> list:
        """Return the variables of the parameters' shards and of the others, in the order of the jaxpr's arguments."""
        return [*(param.root for param in self.params), *self.others]

    @property
    def operands(self) -> list:
        """Return the variables that the slices of the parameters read."""
        return [v for param in self.params for v in param.operands]

    @functools.cached_property
    def computes(self) -> bool:
        """Return whether the segment has enough work to hide communication behind: a matrix product or a kernel."""
        return _has_product(self.jaxpr)

    def run(self, params: Sequence, others: Sequence) -> list:
        """Compute the results from the gathered parameters, in the type they are gathered in."""
        if not self.params:
            return jax.core.eval_jaxpr(self.jaxpr, (), *others)
        values = [as_gathered(*pair) for pair in zip(params, self.params, strict=True)]
        return evaluate(self.jaxpr, (), [*values, *others])

    def live_results(self, moving: Set) -> list:
        """Return the results that may depend on a variable in `moving`."""

        def live(eqn, reads):
            if not reads or eqn.primitive.name == "stop_gradient":
                return ()
            return [v for v in eqn.outvars if differentiable(v.aval.dtype)]

        return self._dependent(moving, live)

    def after(self, sources: Collection) -> list:
        """Return the results that depend on some of the `sources`."""
        return self._dependent(sources, lambda eqn, reads: eqn.outvars if reads else ())

    def behind(self, results: Collection) -> list:
        """Return the inputs that some of the `results` depend on."""
        wanted = [v for key, v in zip(self.results, self.jaxpr.outvars, strict=True) if key in results]
        _, reads = jaxprs.needed_for(self.jaxpr.eqns, wanted)
        return [key for key, v in zip(self.sources, self.jaxpr.invars, strict=True) if v in reads]

    def _dependent(self, sources: Collection, results: Callable) -> list:
        start = [v for v, source in zip(self.jaxpr.invars, self.sources, strict=True) if source in sources]
        found = jaxprs.dependent_on(start, self.jaxpr.eqns, results)
        return [key for key, v in zip(self.results, self.jaxpr.outvars, strict=True) if v in found]

    def start(self, gathers: GatherScheduler, *, ahead: bool = True) -> tuple[list, list]:
        """Return `(gathered parameters, others)` of the forward pass.

        Gathers further on are started behind what the segment reads of the one before; a branch that reads
        nothing of it leaves the waiting to the gathers.
        """
        follows = [v for v in self.others if v in gathers.frontier]
        anchors = (follows or [v for v in self.others if v not in gathers.uses.arguments])[-1:]
        beside = None if follows else gathers.env
        rows, values = gathers.rows_of(anchors), [gathers.env[v] for v in anchors]
        gathered, (values,) = gathers.take(values, rows=rows, ahead=ahead, beside=beside)
        gathers.env.update(zip(anchors, values, strict=True))
        return gathered, [gathers.env[v] for v in self.others]

    def row_states(self, gathers: GatherScheduler) -> RowStates:
        """Return where others and results hold the rows of the batch."""
        follower = gathers.options.comm.follower
        return RowStates(gathers.rows_of(self.others), gathers.rows_of(self.results), follower)

    def cotangents(self, indices: Sequence[int], grads: GradScheduler) -> list | None:
        """Return the cotangents of some results, or None if there are none."""
        variables = [self.jaxpr.outvars[i] for i in indices]
        return cotangents_of([self.results[i] for i in indices], variables, grads.cotangents)


@dataclasses.dataclass(frozen=True)
class PlainSegment(Segment):
    """Equations that use no sharded parameter."""

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        """Run the forward pass; see `Segment`."""
        others = [gathers.env[v] for v in self.others]
        if not moving:
            return self.run((), others), None
        live = set(self.live_results(moving))
        active = [v in moving for v in self.others]
        wanted = [i for i, key in enumerate(self.results) if key in live]
        rows = self.row_states(gathers)
        passes = traced_passes(self.run, (), others, trained=(), active=active, wanted=wanted, rows=rows)
        results, saved = passes.run((), others)
        others = [x if i in passes.needed_others else None for i, x in enumerate(others)]
        return results, BlockResiduals(saved, others, [], [], Static(passes))

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        passes: Passes = residuals.passes.value
        cotangents = self.cotangents(passes.active_results, grads)
        if cotangents is None:
            return
        later = [i for i in passes.active_others if self.others[i] in grads.arguments]
        comm, others, saved = gathers.options.comm, residuals.others, residuals.saved
        _, to_others = passes.pull(comm, (), others, saved, cotangents, reduced_later=later)
        for index, cotangent in zip(passes.active_others, to_others, strict=True):
            grads.add(self.others[index], cotangent)


@dataclasses.dataclass(frozen=True)
class BlockSegment(Segment):
    """A use of parameters, gathered together.

    Attributes:
        shared: The passes that it shares with segments of the same equations; None if there are none.
    """

    shared: SharedPasses | None = dataclasses.field(default=None, compare=False)

    def forward(self, gathers: GatherScheduler, moving: Set) -> tuple[list, BlockResiduals | None]:
        """Run the forward pass; see `Segment`."""
        gathered, others = self.start(gathers)
        if not moving:
            return self.run(gathered, others), None
        trained, active = [p.root in moving for p in self.params], [v in moving for v in self.others]
        trace = traced_passes if self.shared is None else self.shared.passes
        passes = trace(self.run, gathered, others, trained=trained, active=active, rows=self.row_states(gathers))
        results, saved = passes.run(gathered, others)
        others = [x if i in passes.needed_others else None for i, x in enumerate(others)]
        # Between the last use and its backward pass there is only the loss: resharding would save nothing.
        keeps = gathers.is_last or not gathers.options.reshard_after_forward
        kept = [x if i in passes.needed else None for i, x in enumerate(gathered)] if keeps else None
        return results, BlockResiduals(saved, others, [gathers.env[v] for v in self.operands], kept, Static(passes))

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        passes: Passes = residuals.passes.value
        cotangents = self.cotangents(passes.active_results, grads)
        if cotangents is None:
            return
        # Gradients that are due make the gathers wait for the segment before.
        beside = None if grads.due else grads.cotangents
        again, (cotangents, due) = gathers.take(cotangents, grads.due, rows=passes.result_rows, beside=beside)
        grads.settle(due)
        gathered = residuals.gathered
        if gathered is None:
            values = dict(zip(sorted(passes.needed), again, strict=True))
            gathered = [values.get(i) for i in range(len(self.params))]
        comm = gathers.options.comm
        zero = None if self.computes else comm.zero_after(cotangents, passes.result_rows)
        later = [i for i, v in enumerate(self.others) if v in grads.arguments]

        def pull(comm: Collectives, cotangents: Sequence) -> tuple[list, list]:
            others, saved = residuals.others, residuals.saved
            return passes.pull(comm, gathered, others, saved, cotangents, zero, reduced_later=later)

        shapes = [self.jaxpr.outvars[i].aval.shape for i in passes.active_results]
        to_params, to_others = comm.each_worker(pull, cotangents, shapes)
        to_others = gathers.finish(to_others)
        grads.add_others([self.others[i] for i in passes.active_others], to_others)
        grads.add_params([self.params[i] for i in passes.active_params], to_params, exposed=not gathers.is_hidden_after)


@dataclasses.dataclass(frozen=True)
class HeldSegment(BlockSegment):
    """Something computed of parameters alone, which is kept for all that reads it."""

    def backward(self, residuals: BlockResiduals, gathers: GatherScheduler, grads: GradScheduler) -> None:
        """Run the backward pass; see `Segment`."""
        grads.drain()  # the cotangents of its readers
        super().backward(residuals, gathers, grads)


def with_shared_passes(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return segments, of which those that have the same equations on other parameters share their passes."""
    segments = list(segments)
    signatures = [_signature(segment) if isinstance(segment, BlockSegment) else None for segment in segments]
    counts = Counter(signatures)
    shared = {signature: SharedPasses() for signature, count in counts.items() if signature and count > 1}
    return tuple(
        dataclasses.replace(segment, shared=shared[signature]) if signature in shared else segment
        for segment, signature in zip(segments, signatures, strict=True)
    )


def _signature(segment: Segment) -> Any:
    jaxpr = jaxprs.signature(segment.jaxpr)
    return jaxpr and (jaxpr, tuple((param.leaf.dtype, param.wide) for param in segment.params))


def bytes_of(params: Iterable[ShardedParam]) -> int:
    """Return the bytes of some gathered parameters, in the types they are gathered in. Each gather counts once."""
    leaves = {param.key: param.leaf for param in params}.values()
    return sum(leaf.bytes for leaf in leaves)


def _has_product(jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PRODUCTS or any(map(_has_product, compat.inner_jaxprs(eqn))):
            return True
    return False
