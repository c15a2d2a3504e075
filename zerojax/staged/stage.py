"""Compile a segment into a forward and a backward program. Segments with equal equations and layouts share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax.comm.mesh import constrain
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Options, Uses
from zerojax.gather.segments import BlockResiduals, BlockSegment, Segment, Static
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import RowStates, traced_passes

if TYPE_CHECKING:
    from jaxtyping import Array


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A placeholder for a variable, in a stage that several segments share."""

    aval: Any  # the shape and type of the variable's value


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The cotangents that a segment's backward pass must compute."""

    trained: tuple[bool, ...]  # for each parameter, whether its gradient is needed
    active: tuple[bool, ...]  # for each other input, whether its cotangent is needed
    # indices of the results that are differentiated; None: all results with a differentiable type
    results: tuple[int, ...] | None
    summands: frozenset[int]  # indices of the other inputs whose cotangents may stay one partial sum per worker


class Stage:
    """The forward and backward programs of a segment.

    The programs take parameters as shards. A shard that is one row of a stack has a dim 0 of length 1, as on disk.
    """

    def __init__(
        self, segment: Segment, wanted: Wanted, rows: RowStates, options: Options, by_row: Sequence[bool], mesh: Any
    ):
        """Trace the passes. `by_row` says for each parameter whether its shard is one row of a stack."""
        assert isinstance(segment, BlockSegment)
        roots = [Slot(jax.ShapeDtypeStruct(p.leaf.shape, p.stored.dtype)) for p in segment.params]
        params = [_plain(p, slot) for p, slot in zip(segment.params, roots, strict=True)]
        slots = lambda variables: tuple(Slot(v.aval) for v in variables)
        inputs = segment.jaxpr.invars[len(params) :]
        self._segment = dataclasses.replace(
            segment, params=tuple(params), others=slots(inputs), results=slots(segment.jaxpr.outvars), scope=()
        )
        self._options, self._by_row, self._mesh = options, tuple(by_row), mesh
        self._arguments = [self._segment.others[i] for i in sorted(wanted.summands)]
        self.passes = None  # stays None if no cotangent of an input is needed
        if any(wanted.trained) or any(wanted.active):
            self.passes = traced_passes(
                segment.run,
                [jax.ShapeDtypeStruct(p.leaf.shape, p.leaf.dtype) for p in params],
                [v.aval for v in inputs],
                trained=wanted.trained,
                active=wanted.active,
                wanted=wanted.results,
                rows=rows,
            )
        self.needed = [] if self.passes is None else sorted(self.passes.needed)
        self.kept = [] if self.passes is None else sorted(self.passes.needed_others)
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward)

    def _forward(self, shards: Sequence[Array], others: Sequence[Array]) -> tuple[list, list]:
        """Return `(results, saved)`, where `saved` are the residuals for the backward pass."""
        segment = self._segment
        env = dict(zip(segment.others, others, strict=True)) | self._roots(dict(enumerate(shards)))
        gathered, others = segment.take_inputs(self._gathers(env, segment.params))
        return (segment.run(gathered, others), []) if self.passes is None else self.passes.run(gathered, others)

    def _backward(
        self, shards: Sequence[Array], others: Sequence[Array], saved: Sequence, cotangents: Sequence[Array | None]
    ) -> tuple[list, list]:
        """Return `(gradients of shards, cotangents of other inputs)`. Those that were not computed are None.

        `shards` are those of the parameters in `needed`, and `others` the inputs in `kept`. A cotangent may be None.
        """
        segment, passes = self._segment, self.passes
        assert passes is not None
        env = self._roots(dict(zip(self.needed, shards, strict=True)))
        read: list[Any] = [None] * len(segment.others)
        for i, x in zip(self.kept, others, strict=True):
            read[i] = x
        grads = GradScheduler(env, self._arguments, self._options)
        pairs = zip(segment.results, cotangents, strict=True)
        grads.cotangents.update({key: x for key, x in pairs if x is not None})
        residuals = BlockResiduals(saved, read, [], None, Static(passes))
        segment.backward(residuals, self._gathers(env, segment.last_gather(residuals)), grads)
        grads.finish()
        found = [grads.cotangents.get(p.root) for p in segment.params]
        to_params = [
            None if x is None else self._stored(x, p, on)
            for x, p, on in zip(found, segment.params, self._by_row, strict=True)
        ]
        return to_params, [grads.cotangents.get(key) for key in segment.others]

    def _stored(self, grad: Array, param: ShardedParam, by_row: bool) -> Array:
        """Return a shard's gradient in the parameter's storage layout. A row of a stack gets its dim 0 of length 1."""
        leaf = param.stored
        if by_row:
            assert leaf.dim is not None
            others = (None, *leaf.others) if leaf.others else ()
            leaf = dataclasses.replace(leaf, shape=(1, *leaf.shape), dim=leaf.dim + 1, others=others)
            grad = jnp.expand_dims(grad, 0)
        return constrain(self._mesh, grad, leaf)

    def _roots(self, shards: dict[int, Array]) -> dict:
        """Return the shard of each parameter by slot. For parameters without a shard, return its shape and type."""
        params = enumerate(zip(self._segment.params, self._by_row, strict=True))
        value = lambda x, by_row: jnp.squeeze(x, 0) if by_row else x
        return {
            p.root: value(shards[i], by_row)
            if i in shards
            else jax.ShapeDtypeStruct(p.leaf.storage_shape, p.root.aval.dtype)
            for i, (p, by_row) in params
        }

    def _gathers(self, env: dict, params: Sequence[ShardedParam]) -> GatherScheduler:
        """Return a scheduler of the gathers of this segment. The empty second use represents all later segments."""
        uses = Uses([params, []], [self._segment.computes, False], frozenset(self._arguments), {})
        return GatherScheduler(env, uses, self._options)


def _plain(param: ShardedParam, slot: Slot) -> ShardedParam:
    """Return a parameter without slices, for a shard that is sliced before the stage runs."""
    leaf = dataclasses.replace(param.leaf, path="", reason="")
    stored = dataclasses.replace(leaf, dtype=slot.aval.dtype)
    return dataclasses.replace(param, root=slot, stored=stored, leaf=leaf, slices=(), layer=None)
