"""A scan over layers whose iterations Python runs. All iterations share one forward and one backward program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp

from zerojax import compat
from zerojax.dims import NOWHERE, Follower, State
from zerojax.gather.loop import Loop
from zerojax.gather.scan import ScanSegment
from zerojax.gather.segments import BlockSegment
from zerojax.gather.sharded_param import ShardedParam
from zerojax.gather.vjp import RowStates
from zerojax.staged.sources import Source
from zerojax.staged.stage import Stage, Stages, Wanted

SourceOf = Callable[[ShardedParam], Source]


@dataclasses.dataclass(frozen=True, eq=False)
class StagedLoop:
    """A scan over layers, run one iteration at a time.

    Attributes:
        segment: The segment that consists of the scan.
        stage: The forward and backward programs of the scan's body.
        shared: The sources of the parameters that every iteration reads.
        stacked: For each stack of layers, the source of each layer.
        consts: Arrays that the body closes over.
    """

    segment: ScanSegment
    stage: Stage
    shared: tuple[Source, ...]
    stacked: tuple[tuple[Source, ...], ...]
    consts: tuple

    @property
    def loop(self) -> Loop:
        return self.segment.loop

    def sources(self, iteration: int) -> list[Source]:
        """Return the sources of the parameters that one iteration reads."""
        layer = self.loop.layer(iteration)
        return [*self.shared, *(layers[layer] for layers in self.stacked)]

    def values(self, env: Mapping) -> tuple[list, list, list]:
        """Return the operands `(consts, carry, slices)` of the scan, in the types of the body's inputs."""
        loop, types = self.loop, [v.aval.dtype for v in _others(self.loop)]
        values = [
            jnp.asarray(literal, dtype) if index is None else env[self.segment.others[index]]
            for index, literal, dtype in zip(loop.others, loop.literals, types, strict=False)
        ]
        inner = loop.consts + loop.carry
        return values[: loop.consts], values[loop.consts : inner], values[inner:]


def staged_loop(
    segment: ScanSegment,
    stages: Stages,
    source_of: SourceOf,
    layers_of: Callable[[ShardedParam], tuple[Source, ...] | None],
    moving: Collection,
    arguments: Collection,
    rows: Mapping[Any, State],
    follower: Follower | None,
) -> StagedLoop | None:
    """Return a scan whose iterations Python can run, or None if the scan's layers cannot be read one by one.

    Args:
        segment: The segment that consists of the scan.
        stages: The stages of the program, to which the body's stage is added.
        source_of: A function that returns the source of a parameter.
        layers_of: A function that returns the sources of a stack's layers, or None if they cannot be read one by one.
        moving: The scan's input variables whose cotangents are needed.
        arguments: The arguments of the whole program.
        rows: For each variable, the dims along which its value holds the rows of the batch.
        follower: The analysis that follows the rows into the body. None: they are unknown.
    """
    loop = segment.loop
    stacked = [layers_of(p) for p in loop.stacked]
    by_row = [{source.row is not None for source in layers or ()} for layers in stacked]
    if not loop.stacked or any(len(kinds) != 1 for kinds in by_row):
        return None
    shared = tuple(map(source_of, loop.shared))
    body, consts = compat.opened(loop.eqn.body)
    operands = list(zip(loop.is_param, body.invars, strict=True))
    params, others = [v for on, v in operands if on], _others(loop)
    jaxpr = compat.part_of(body, body.eqns, [*params, *others, *compat.constvars_of(body)], body.outvars)
    layers = (*loop.shared, *(p.at_layer(0) for p in loop.stacked))
    block = BlockSegment(jaxpr, layers, tuple(others), tuple(jaxpr.outvars))
    carried = range(loop.consts, loop.consts + loop.carry)
    active = [index is not None and segment.others[index] in moving for index in loop.others]
    active[loop.consts : loop.consts + loop.carry] = [bool(moving)] * loop.carry
    summands = [
        i
        for i, index in enumerate(loop.others)
        if i not in carried and index is not None and segment.others[index] in arguments
    ]
    none = [False] * len(consts)
    wanted = Wanted(tuple(p.root in moving for p in loop.params), (*active, *none), None, frozenset(summands))
    states = [*loop.rows_inside([rows.get(key, NOWHERE) for key in segment.others], follower), *[NOWHERE] * len(consts)]
    by_rows = [*(source.row is not None for source in shared), *(kinds.pop() for kinds in by_row)]
    stage = stages.of(block, wanted, RowStates(states, (), follower), by_rows)
    return StagedLoop(segment, stage, shared, tuple(layers or () for layers in stacked), tuple(consts))


def _others(loop: Loop) -> list:
    """Return the body's input variables that are not parameters."""
    body, _ = compat.opened(loop.eqn.body)
    return [v for on, v in zip(loop.is_param, body.invars, strict=True) if not on]
