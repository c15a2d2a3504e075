"""Divide a loss into stages, and compile each stage into a forward and a backward program.

Also find which chunks each stage reads, in which order, and how many gradients each chunk gets. Segments with equal
equations and layouts share their programs.
"""

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zerojax import compat, jaxprs, names
from zerojax.comm.mesh import constrain
from zerojax.dims import NOWHERE
from zerojax.gather.scan import ScanSegment
from zerojax.gather.schedule import GatherScheduler, GradScheduler, Options
from zerojax.gather.segments import BlockResiduals, BlockSegment, Program, Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import KnownRows, traced_passes
from zerojax.layout.leaf import replace_at
from zerojax.offload.chunked import MOST_ROWS
from zerojax.staged.model_files import ChunkId, DiskShard, OnDisk


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
    Programs slice any other stack themselves; `operands` are the values that these slices read, such as layer indices.
    """

    def __init__(
        self, segment: Segment, wanted: Wanted, rows: KnownRows, options: Options, by_row: Sequence[bool], mesh: Any
    ):
        """Trace the passes. `by_row` says for each parameter whether its shard is one row of a stack."""
        assert isinstance(segment, BlockSegment)
        params = list(map(_plain, segment.params, by_row))
        slots = lambda variables: tuple(Slot(v.aval) for v in variables)
        inputs = segment.jaxpr.invars[len(params) :]
        self._segment = dataclasses.replace(
            segment, params=tuple(params), others=slots(inputs), results=slots(segment.jaxpr.outvars), scope=()
        )
        self._options, self._by_row, self._mesh = options, tuple(by_row), mesh
        self.operands = self._segment.operands
        self._arguments = frozenset(self._segment.others[i] for i in wanted.summands)
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

    def _forward(self, shards: Sequence, others: Sequence, operands: Sequence) -> tuple[list, list]:
        """Return `(results, saved)`, where `saved` are the residuals for the backward pass."""
        segment = self._segment
        env = dict(zip(segment.others, others, strict=True)) | self._roots(dict(enumerate(shards)), operands)
        gathered, others = segment.take_inputs(self._gathers(env, segment.params))
        if self.passes is None:
            return segment.run(gathered, others), []
        with names.in_scopes((), "jvp"):
            return self.passes.run(gathered, others)

    def _backward(
        self, shards: Sequence, others: Sequence, saved: Sequence, cotangents: Sequence, operands: Sequence
    ) -> tuple[list, list]:
        """Return `(gradients of shards, cotangents of other inputs)`. An entry that was not computed is None.

        `shards` are the shards of parameters in `needed`, and `others` the inputs in `kept`. A cotangent may be None.
        """
        segment, passes = self._segment, self.passes
        assert passes is not None
        env = self._roots(dict(zip(self.needed, shards, strict=True)), operands)
        read: list[Any] = [None] * len(segment.others)
        for i, x in zip(self.kept, others, strict=True):
            read[i] = x
        grads = GradScheduler(env, self._options, self._arguments, self._arguments)
        pairs = zip(segment.results, cotangents, strict=True)
        grads.cotangents.update({key: x for key, x in pairs if x is not None})
        residuals = BlockResiduals(saved, read, [], None, passes)
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

    def _roots(self, shards: dict[int, Array], operands: Sequence[Array]) -> dict:
        """Return the shard of each parameter by slot, and the operands by variable.

        For parameters without a shard, return its shape and type.
        """
        params = enumerate(zip(self._segment.params, self._by_row, strict=True))
        value = lambda x, by_row: jnp.squeeze(x, 0) if by_row else x
        roots = {
            p.root: value(shards[i], by_row)
            if i in shards
            else jax.ShapeDtypeStruct(p.stored.storage_shape, p.root.aval.dtype)
            for i, (p, by_row) in params
        }
        return roots | dict(zip(self.operands, operands, strict=True))

    def _gathers(self, env: dict, params: Sequence[ShardedParam]) -> GatherScheduler:
        """Return a scheduler of this segment's gathers. The second use, without parameters, stands for later ones."""
        computes = [self._segment.computes, False]
        return GatherScheduler(env, self._options, [params, []], computes, [0, 1], self._arguments, {})


def _plain(param: ShardedParam, by_row: bool) -> ShardedParam:
    """Return a parameter without its path and without a disk row's slices, in which equal segments may differ."""
    leaf = dataclasses.replace(param.leaf, path="", reason="")
    stored, slices = (leaf, ()) if by_row else (param.stored, param.slices)
    stored = dataclasses.replace(stored, dtype=param.stored.dtype, path="", reason="")
    slot = Slot(jax.ShapeDtypeStruct(stored.shape, stored.dtype))
    return dataclasses.replace(param, root=slot, stored=stored, leaf=leaf, slices=slices, layer=None)


def _row_read(param: ShardedParam, of: OnDisk) -> int | None:
    """Return the row on disk that a parameter's slices select, or None if they do not select exactly one chunk."""
    sliced = len(param.slices) == 2 and param.slices[1].primitive.name in ("squeeze", "reshape")
    if not sliced or not of.chunking.is_by_row(of.leaf):
        return None
    first, (last,) = param.slices[0], param.slices[1].outvars
    shape = first.invars[0].aval.shape
    if last.aval.shape != shape[1:] or first.outvars[0].aval.shape != replace_at(shape, 0, 1):
        return None
    if first.primitive.name == "slice":
        return first.params["start_indices"][0]
    start = first.invars[1]
    return int(jnp.clip(start.val, 0, shape[0] - 1)) if compat.is_literal(start) else None


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """A segment, its programs, and the sources of its parameters."""

    segment: BlockSegment
    stage: Stage
    sources: tuple[DiskShard, ...]

    @property
    def needed(self) -> list[DiskShard]:
        return [self.sources[i] for i in self.stage.needed]


class StagedProgram:
    """A traced function, divided into stages."""

    def __init__(
        self, program: Program, on_disk: Mapping[int, OnDisk], active: Sequence[bool], options: Options, mesh: Any
    ):
        """Make the stages of a program, whose first result is differentiated.

        `on_disk` has the parameters on disk by their index among the program's arguments. `active` says for each
        parameter whether its gradient is needed.
        """
        self.program = program
        self.variables = {program.invars[i]: of for i, of in on_disk.items()}
        self._options, self.mesh, self.add = options, mesh, jax.jit(options.comm.add)
        self._stages: dict[Any, Stage] = {}
        self.live = program.live(active, program.outs[:1])  # the variables whose cotangents are needed
        # The cotangents of these variables stay one partial sum per worker until they are gradients of parameters.
        self._summed_later = frozenset([*program.invars, *self._weights()])
        self.items = [self._item(segment) for segment in program.segments]
        self.backward = self._reached()
        passes = ((item, item.stage.passes) for item in self.backward)
        trained = [item.sources[i] for item, of in passes if of is not None for i in of.active_params]
        # The number of gradients that each chunk gets in one backward pass.
        self.expected = collections.Counter[ChunkId](chunk_id for source in trained for chunk_id in source.chunk_ids)
        uses = [*(item.sources for item in self.items), *(item.needed for item in self.backward)]
        reads = [tuple(dict.fromkeys(chunk_id for source in use for chunk_id in source.chunk_ids)) for use in uses]
        # The chunks of each execution of a stage that reads chunks, in the order of a forward and a backward pass.
        self.reads = [use for use in reads if use]

    def _check_loops(self, segment: Segment) -> None:
        """Raise a ValueError if the segment gathers parameters in full for a loop that could read them in parts."""
        early = segment.lasting and set(segment.results).isdisjoint(jaxprs.variables_in(self.program.outs))
        params = dict(zip(segment.jaxpr.invars, segment.params, strict=False))
        inside = [v for v, p in params.items() if p in segment.stacks] or scanned_inside(segment.jaxpr, params)
        whole = params if early else inside
        if paths := sorted({f"params{self.variables[params[v].root].leaf.path}" for v in whole}):
            raise ValueError(
                f"A loop reads {', '.join(paths)}, but not one layer per iteration, so the devices would hold all "
                f'layers at once. Offload(params="disk") reads one layer per iteration of a jax.lax.scan over stacks '
                f"of at most {MOST_ROWS} layers that are as in the tree of parameters, and not sharded over their "
                f"layers. Scan over such stacks outside of other loops and of jax.checkpoint, put jax.checkpoint "
                f"around one layer, and leave microbatches to accumulate= of train_step. Raise "
                f"Tuning(persist_below=) to keep small stacks on the devices."
            )

    @property
    def last_read(self) -> dict[Any, int]:
        """Return, for each variable, the index of the last item that reads it."""
        found = {}
        for i, item in enumerate(self.items):
            operands = [v for p in item.segment.params for v in p.operands]
            found |= dict.fromkeys([*item.segment.others, *operands], i)
        return found | dict.fromkeys(jaxprs.variables_in(self.program.outs), len(self.items))

    def _weights(self) -> set:
        """Return variables computed from parameters alone. Skip a segment if one of its other results is `live`."""
        weights = {v for v in self.program.invars if (rows := self.program.rows.get(v)) is not None and not rows.places}
        for segment in self.program.segments:
            if isinstance(segment, BlockSegment) and not segment.has_rule:
                others = set(segment.after([v for v in segment.others if v not in weights]))
                weights.update(set(segment.results) - others if self.live.isdisjoint(others) else ())
        return weights

    def _item(self, segment: Segment) -> Item:
        moving = set() if self.live.isdisjoint(segment.results) else self.live.intersection(segment.sources)
        self._check_loops(segment)
        if isinstance(segment, ScanSegment):  # A loop that reads no layers is one program.
            segment = BlockSegment(segment.jaxpr, segment.params, segment.others, segment.results)
        assert isinstance(segment, BlockSegment)
        on_disk = [self.variables[param.root] for param in segment.params]
        sources = tuple(map(DiskShard, on_disk, map(_row_read, segment.params, on_disk)))
        results = None
        if not segment.params:
            results = tuple(i for i, key in enumerate(segment.results) if key in self.live)
        wanted = Wanted(
            tuple(p.root in moving for p in segment.params),
            tuple(v in moving for v in segment.others),
            results,
            frozenset(i for i, v in enumerate(segment.others) if v in self._summed_later),
        )
        rows = self.program.rows
        others, outs = ([rows.get(v, NOWHERE) for v in variables] for variables in (segment.others, segment.results))
        by_row = [source.n is not None for source in sources]
        comm = self._options.comm
        stage = self._stage(segment, wanted, KnownRows(others, outs, comm.follower, comm), by_row)
        return Item(segment, stage, sources)

    def _stage(self, segment: BlockSegment, wanted: Wanted, rows: KnownRows, by_row: list[bool]) -> Stage:
        """Return the stage of a segment. Segments with equal equations and layouts share a stage."""
        make = functools.partial(Stage, segment, wanted, rows, self._options, by_row, self.mesh)
        is_sliced = any(p.slices and not row for p, row in zip(segment.params, by_row, strict=True))
        if segment.shared is None or is_sliced:
            return make()
        params = tuple(
            (dataclasses.replace(p.leaf, path="", reason=""), p.stored.dtype, p.wide, p.order) for p in segment.params
        )
        others = tuple((v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in segment.jaxpr.invars[len(params) :])
        key = id(segment.shared), params, others, wanted, tuple(rows.others), tuple(rows.results), tuple(by_row)
        if key not in self._stages:
            self._stages[key] = make()
        return self._stages[key]

    def _reached(self) -> list[Item]:
        """Return the items whose results get cotangents in the backward pass, in the order of that pass."""
        reached, found = {v for v in jaxprs.variables_in(self.program.outs[:1]) if v in self.live}, []
        for item in reversed(self.items):
            passes = item.stage.passes
            if passes is not None and not reached.isdisjoint(item.segment.results[i] for i in passes.active_results):
                found.append(item)
                reached.update(v for v in item.segment.others if v in self.live)
        return found


def scanned_inside(jaxpr: Any, variables: Collection) -> set:
    """Return the `variables` that a scan in `jaxpr`, or in a jaxpr inside its equations, scans over."""
    found: set = set()
    for eqn in jaxpr.eqns:
        if (loop := compat.loop_of(eqn)) is not None:
            found.update(v for v in jaxprs.variables_in(eqn.invars[loop.consts + loop.carry :]) if v in variables)
        for inner in compat.inner_jaxprs(eqn):
            # The arguments of a branch are the last operands, after the number of the branch.
            pairs = zip(reversed(inner.invars), reversed(eqn.invars), strict=False)
            outer = {v: atom for v, atom in pairs if not compat.is_literal(atom) and atom in variables}
            found.update(outer[v] for v in scanned_inside(inner, outer))
    return found
