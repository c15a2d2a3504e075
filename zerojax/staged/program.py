"""Divide a loss into stages. Find the chunks that each stage reads, their order, and the gradients per chunk."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE
from zerojax.gather.scan import ScanSegment
from zerojax.gather.schedule import Options
from zerojax.gather.segments import BlockSegment, Gathered, PlainSegment, Program, Segment
from zerojax.gather.vjp import RowStates
from zerojax.offload.chunked import MOST_ROWS
from zerojax.staged.sources import ChunkId, OnDisk, ShardSource, source_of
from zerojax.staged.stage import Stage, Wanted


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """A segment, its programs, and the sources of its parameters."""

    segment: BlockSegment
    stage: Stage
    sources: tuple[ShardSource, ...]

    @property
    def needed(self) -> list[ShardSource]:
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
        self._options, self._mesh, self._follower = options, mesh, options.comm.follower
        self._stages: dict[Any, Stage] = {}
        self.live = program.live(active, program.outs[:1])  # the variables whose cotangents are needed
        # The cotangents of these variables stay one partial sum per worker until they are gradients of parameters.
        self._summed_later = frozenset([*program.invars, *self._weights()])
        self.items = [self._item(segment) for segment in program.segments]
        self.backward = self._reached()
        passes = ((item, item.stage.passes) for item in self.backward)
        trained = [item.sources[i] for item, of in passes if of is not None for i in of.active_params]
        # The number of gradients that each chunk gets in one backward pass.
        self.expected = collections.Counter[ChunkId](piece for source in trained for piece in source.pieces)
        uses = [*(item.sources for item in self.items), *(item.needed for item in self.backward)]
        reads = [tuple(dict.fromkeys(piece for source in use for piece in source.pieces)) for use in uses]
        # The chunks of each execution of a stage that reads chunks, in the order of a forward and a backward pass.
        self.reads = [use for use in reads if use]

    def _check_loops(self, segment: Segment) -> None:
        """Raise a ValueError if the segment gathers parameters in full for a loop that could read them in parts."""
        returned = [key for key in self.program.outs if isinstance(key, Gathered)]
        early = any(isinstance(key, Gathered) and key not in returned for key in segment.results)
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
        return found | dict.fromkeys(variables_of(self.program.outs), len(self.items))

    def _weights(self) -> set:
        """Return what segments compute from parameters alone, if no other result of the segment has a cotangent."""
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
        sources = tuple(source_of(param, self.variables[param.root]) for param in segment.params)
        results = None
        if isinstance(segment, PlainSegment):
            results = tuple(i for i, key in enumerate(segment.results) if key in self.live)
        wanted = Wanted(
            tuple(p.root in moving for p in segment.params),
            tuple(v in moving for v in segment.others),
            results,
            frozenset(i for i, v in enumerate(segment.others) if v in self._summed_later),
        )
        rows = self.program.rows
        others, outs = ([rows.get(v, NOWHERE) for v in variables] for variables in (segment.others, segment.results))
        by_row = [source.row is not None for source in sources]
        stage = self._stage(segment, wanted, RowStates(others, outs, self._follower), by_row)
        return Item(segment, stage, sources)

    def _stage(self, segment: BlockSegment, wanted: Wanted, rows: RowStates, by_row: list[bool]) -> Stage:
        """Return the stage of a segment. Segments with equal equations and layouts share one."""
        make = functools.partial(Stage, segment, wanted, rows, self._options, by_row, self._mesh)
        if segment.shared is None:
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
        reached, found = {v for v in variables_of(self.program.outs[:1]) if v in self.live}, []
        for item in reversed(self.items):
            passes = item.stage.passes
            if passes is not None and not reached.isdisjoint(item.segment.results[i] for i in passes.active_results):
                found.append(item)
                reached.update(v for v in item.segment.others if v in self.live)
        return found


def scanned_inside(jaxpr: Any, variables: Collection) -> set:
    """Return the variables over which scans inside of a segment run."""
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


def variables_of(outs: Sequence) -> list:
    return [atom for atom in outs if isinstance(atom, Gathered) or not compat.is_literal(atom)]
