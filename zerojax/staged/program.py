"""Divide a loss into stages. Find the chunks that each stage reads, their order, and the gradients per chunk."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import compat
from zerojax.dims import NOWHERE
from zerojax.gather.options import Options
from zerojax.gather.scan import ScanSegment
from zerojax.gather.segments import BlockSegment, Gathered, PlainSegment, Program, Segment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import RowStates
from zerojax.staged.before_loops import gathered_before_loops
from zerojax.staged.loop import StagedLoop, staged_loop
from zerojax.staged.sources import OnDisk, Piece, Source, source_of
from zerojax.staged.stage import Stage, Stages, Wanted
from zerojax.staged.whole import WholeStage

log = logging.getLogger("zerojax.staged")


@dataclasses.dataclass(frozen=True, eq=False)
class StagedBlock:
    """A segment that runs once per pass.

    Attributes:
        segment: The segment.
        stage: The forward and backward programs of the segment.
        sources: The source of each parameter of the segment.
    """

    segment: Segment
    stage: Stage
    sources: tuple[Source, ...]


Item = StagedBlock | StagedLoop | WholeStage


class StagedProgram:
    """A traced function, divided into stages. Each message of `gathered_before` is logged as a warning.

    Attributes:
        program: The traced function and its segments.
        items: One stage per segment, in the order in which they run.
        reads: The chunks of each execution of a stage that reads chunks, in the order of a forward and a backward pass.
        expected: The number of gradients that each chunk gets in one backward pass.
        backward: The items that have a backward pass. The last item of `items` comes first.
        live: The variables whose cotangents are needed.
    """

    def __init__(
        self, program: Program, on_disk: Mapping[int, OnDisk], active: Sequence[bool], options: Options, mesh: Any
    ):
        """Make the stages of a program.

        Args:
            program: A loss or another function. Its first result is differentiated.
            on_disk: The parameters on disk, by their index among the program's arguments.
            active: For each parameter, whether its gradient is needed.
            options: How parameters are gathered.
            mesh: The mesh of the shards.
        """
        self.program = program
        self.variables = {program.invars[i]: of for i, of in on_disk.items()}
        self._stages, self._options, self._mesh = Stages(options, mesh), options, mesh
        self.live = program.live(active, program.outs[:1])
        self._arguments = frozenset([*program.invars, *program.held])
        self.items = [self._item(segment) for segment in program.segments]
        self.backward = self._reached()
        self.expected: collections.Counter[Piece] = collections.Counter()
        for sources in self._trained_uses():
            self.expected.update(piece for source in sources for piece in source.pieces)
        forward = [list(use) for item in self.items for use in _forward_uses(item)]
        backward = [use for item in self.backward for use in _backward_uses(item)]
        uses = [
            tuple(dict.fromkeys(piece for source in use for piece in source.pieces)) for use in [*forward, *backward]
        ]
        self.reads = [use for use in uses if use]
        for reason in self.gathered_before:
            log.warning(reason)

    @property
    def gathered_before(self) -> list[str]:
        """Return, per loop whose layers cannot be read one by one, a message with its parameters and the reason."""
        return [
            *(item.reason for item in self.items if isinstance(item, WholeStage)),
            *(self._gathered_whole(params) for s in self.program.segments if (params := gathered_before_loops(s))),
        ]

    def _gathered_whole(self, params: Sequence[ShardedParam]) -> str:
        """Return a message that says which parameters are gathered in full before a loop, and why."""
        roots = [root for p in params for root in ([x.root for x in self.program.joined.get(p.root, ())] or [p.root])]
        paths = ", ".join(f"params{path}" for path in sorted({self.variables[root].leaf.path for root in roots}))
        return (
            f"A loop reads {paths} in every iteration, and cannot read one layer per iteration. So the devices gather "
            f"them in full before the loop, and hold them while it runs. Use jax.lax.scan over a stack of layers, "
            f"outside of jax.checkpoint, if they do not fit."
        )

    @property
    def last_read(self) -> dict[Any, int]:
        """Return, for each variable, the index of the last item that reads it."""
        found = {}
        for i, item in enumerate(self.items):
            operands = [v for p in item.segment.params for v in p.operands]
            found |= dict.fromkeys([*item.segment.others, *operands], i)
        return found | dict.fromkeys(variables_of(self.program.outs), len(self.items))

    def _item(self, segment: Segment) -> Item:
        moving = set() if self.live.isdisjoint(segment.results) else self.live.intersection(segment.sources)
        rows, follower = self.program.rows, self._options.comm.follower
        if isinstance(segment, ScanSegment):
            loop = staged_loop(
                segment, self._stages, self._source, self._layers, moving, self._arguments, rows, follower
            )
            if loop is not None:
                return loop
        if not isinstance(segment, BlockSegment | PlainSegment):
            return WholeStage(segment, self._sources_of_root(segment), moving, self.program, self._options)
        sources = tuple(map(self._source, segment.params))
        results = None
        if isinstance(segment, PlainSegment):
            results = tuple(i for i, key in enumerate(segment.results) if key in self.live)
        wanted = Wanted(
            tuple(p.root in moving for p in segment.params),
            tuple(v in moving for v in segment.others),
            results,
            frozenset(i for i, v in enumerate(segment.others) if v in self._arguments),
        )
        others, outs = ([rows.get(v, NOWHERE) for v in variables] for variables in (segment.others, segment.results))
        by_row = [source.row is not None for source in sources]
        stage = self._stages.of(segment, wanted, RowStates(others, outs, follower), by_row)
        return StagedBlock(segment, stage, sources)

    def _source(self, param: ShardedParam) -> Source:
        """Return the source of a parameter's shard.

        Raises:
            ValueError: If the parameter is taken from a stack that the loss makes with `jnp.stack`.
        """
        if param.root not in self.variables:
            raise ValueError(
                f"params{param.leaf.path} is taken from a stack of parameters, which a step in stages does not build: "
                f'Offload(params="disk") reads one layer at a time. Scan over the stack alone, or keep the layers '
                f"stacked in the tree of parameters."
            )
        return source_of(param, self.variables[param.root])

    def _layers(self, param: ShardedParam) -> tuple[Source, ...] | None:
        """Return the source of each layer of a stack, or None if the layers cannot be read one by one."""
        if param.slices:
            return None
        if param.root in self.program.joined:
            return tuple(map(self._source, self.program.joined[param.root]))
        of = self.variables[param.root]
        return tuple(Source(of, row) for row in range(of.leaf.shape[0])) if of.is_by_row else None

    def _sources_of_root(self, segment: Segment) -> dict[Any, tuple[Source, ...]]:
        """Return the sources of the arrays of which a segment's parameters are slices, by the variable of the array."""
        members = {p.root: self.program.joined.get(p.root) for p in segment.params}
        return {
            root: (Source(self.variables[root]),) if layers is None else tuple(map(self._source, layers))
            for root, layers in members.items()
        }

    def _reached(self) -> list[Item]:
        """Return the items whose results get cotangents in the backward pass, in the order of that pass."""
        reached, found = {v for v in variables_of(self.program.outs[:1]) if v in self.live}, []
        for item in reversed(self.items):
            if not reached.isdisjoint(_differentiated(item)):
                found.append(item)
                reached.update(v for v in item.segment.others if v in self.live)
        return found

    def _trained_uses(self) -> list[list[Source]]:
        """Return the sources that get gradients, for each execution of a stage's backward program."""
        uses = []
        for item in self.backward:
            if isinstance(item, WholeStage):
                uses.append([source for root in item.trained for source in item.roots[root]])
                continue
            assert item.stage.passes is not None
            chosen = item.stage.passes.active_params
            uses += [[use[i] for i in chosen] for use in _forward_uses(item)]
        return uses


def variables_of(outs: Sequence) -> list:
    return [atom for atom in outs if isinstance(atom, Gathered) or not compat.is_literal(atom)]


def _differentiated(item: Item) -> list:
    """Return the results of an item that can be differentiated."""
    if isinstance(item, WholeStage):
        return list(item.segment.results) if item.is_differentiated else []
    if item.stage.passes is None:
        return []
    if isinstance(item, StagedLoop):
        places = zip(item.loop.results, item.segment.results, strict=True)
        return [key for i, key in places if i in item.stage.passes.active_results]
    return [item.segment.results[i] for i in item.stage.passes.active_results]


def _forward_uses(item: Item) -> list[list[Source]]:
    """Return the sources that each execution of an item's forward program reads."""
    if isinstance(item, StagedLoop):
        return [item.sources(iteration) for iteration in range(item.loop.length)]
    return [list(item.sources)]


def _backward_uses(item: Item) -> list[list[Source]]:
    """Return the sources that each execution of an item's backward program reads, in the order of the executions."""
    if isinstance(item, WholeStage):
        return [item.sources]
    return [[use[i] for i in item.stage.needed] for use in reversed(_forward_uses(item))]
