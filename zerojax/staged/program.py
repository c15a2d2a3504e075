"""Divide a loss into stages. Find the chunks that each stage reads, their order, and the gradients per chunk."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE
from zerojax.gather.options import Options
from zerojax.gather.scan import ScanSegment
from zerojax.gather.segments import BlockSegment, Gathered, PlainSegment, Program, Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import RowStates
from zerojax.layout.chunked import MOST_ROWS
from zerojax.staged.item import Item
from zerojax.staged.sources import OnDisk, Piece, Source, source_of
from zerojax.staged.stage import Stage, Wanted


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
        trained = [source for item in self.backward for use in item.trained_uses for source in use]
        # The number of gradients that each chunk gets in one backward pass.
        self.expected = collections.Counter[Piece](piece for source in trained for piece in source.pieces)
        uses = [use for item in self.items for use in item.forward_uses]
        uses += [use for item in self.backward for use in item.backward_uses]
        reads = [tuple(dict.fromkeys(piece for source in use for piece in source.pieces)) for use in uses]
        # The chunks of each execution of a stage that reads chunks, in the order of a forward and a backward pass.
        self.reads = [use for use in reads if use]

    def _check_loops(self, segment: Segment) -> None:
        """Raise a ValueError if the segment gathers parameters in full for a loop that could read them in parts."""
        returned = [key for key in self.program.outs if isinstance(key, Gathered)]
        early = any(isinstance(key, Gathered) and key not in returned for key in segment.results)
        params = dict(zip(segment.jaxpr.invars, segment.params, strict=False))
        whole = params if early else scanned_inside(segment.jaxpr, params)
        if paths := sorted({f"params{self.variables[params[v].root].leaf.path}" for v in whole}):
            raise ValueError(
                f"A loop reads {', '.join(paths)}, but not one layer per iteration, so the devices would hold all "
                f'layers at once. Offload(params="disk") reads one layer per iteration of a jax.lax.scan over stacks '
                f"that are as in the tree of parameters, and not sharded over their layers. Scan over such stacks "
                f"outside of other loops and of jax.checkpoint, put jax.checkpoint around one layer, and leave "
                f"microbatches to accumulate= of train_step. Raise persist_below= to keep small stacks on the devices."
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
        if isinstance(segment, ScanSegment) and segment.loop.stacked:
            return self._scan(segment, moving)
        if isinstance(segment, ScanSegment):  # A loop that reads no layers is one program.
            segment = BlockSegment(segment.jaxpr, segment.params, segment.others, segment.results)
        assert isinstance(segment, BlockSegment)
        self._check_loops(segment)
        sources = tuple(map(self._source, segment.params))
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
        count = len(segment.results)
        return Item(segment, stage, sources, segment.others, len(segment.others), tuple(range(count)), count)

    def _scan(self, segment: ScanSegment, moving: set) -> Item:
        loop, rows = segment.loop, self.program.rows
        stacked = tuple(map(self._layers, loop.stacked))
        shared = tuple(map(self._source, loop.shared))
        body, closed = compat.opened(loop.eqn.body)
        operands = list(zip(loop.is_param, body.invars, strict=True))
        params, inputs = [v for on, v in operands if on], [v for on, v in operands if not on]
        jaxpr = compat.part_of(body, body.eqns, [*params, *inputs, *compat.constvars_of(body)], body.outvars)
        layers = (*loop.shared, *(p.at_layer(0) for p in loop.stacked))
        block = BlockSegment(jaxpr, layers, tuple(inputs), tuple(jaxpr.outvars))
        others = tuple(None if index is None else segment.others[index] for index in loop.others)
        carried = range(loop.consts, loop.consts + loop.carry)
        active = [bool(moving) if i in carried else key in moving for i, key in enumerate(others)]
        wanted = Wanted(
            tuple(p.root in moving for p in loop.params),
            (*active, *[False] * len(closed)),
            None,
            frozenset(i for i, key in enumerate(others) if i not in carried and key in self._summed_later),
        )
        inside = loop.rows_inside([rows.get(key, NOWHERE) for key in segment.others], self._follower)
        states = RowStates([*inside, *[NOWHERE] * len(closed)], (), self._follower)
        by_row = [source.row is not None for source in (*shared, *(sources[0] for sources in stacked))]
        stage = self._stage(block, wanted, states, by_row)
        values = zip(loop.others, loop.literals, inputs, strict=True)
        literals = {i: jnp.asarray(x, v.aval.dtype) for i, (index, x, v) in enumerate(values) if index is None}
        return Item(
            segment,
            stage,
            shared,
            others,
            loop.consts,
            loop.results,
            loop.carry,
            stacked=stacked,
            length=loop.length,
            reverse=loop.eqn.reverse,
            carry=loop.carry,
            literals=literals,
            closed=tuple(closed),
        )

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

    def _source(self, param: ShardedParam) -> Source:
        return source_of(param, self.variables[param.root])

    def _layers(self, param: ShardedParam) -> tuple[Source, ...]:
        """Return the source of each layer of a stack, or raise a ValueError if they cannot be read one by one."""
        of = self.variables[param.root]
        if param.slices or not of.is_by_row:
            raise ValueError(
                f"A loop scans over params{of.leaf.path}, whose layers cannot be read one by one. "
                f'Offload(params="disk") reads the layers of stacks of at most {MOST_ROWS} layers, as they are in the '
                f"tree of parameters. Scan over such a stack."
            )
        return tuple(Source(of, row) for row in range(of.leaf.shape[0]))

    def _reached(self) -> list[Item]:
        """Return the items whose results get cotangents in the backward pass, in the order of that pass."""
        reached, found = {v for v in variables_of(self.program.outs[:1]) if v in self.live}, []
        for item in reversed(self.items):
            if not reached.isdisjoint(item.differentiated):
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
