"""A segment as Python runs it: once per pass, or, if the segment is a scan over layers, once per iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zerojax.gather.segments import Segment
from zerojax.staged.sources import Source
from zerojax.staged.stage import Stage

if TYPE_CHECKING:
    from jaxtyping import Array


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """A segment with its programs and the sources of its parameters. All iterations of a scan share the programs."""

    segment: Segment
    stage: Stage  # the forward and backward programs of the segment, or of the scan's body
    shared: tuple[Source, ...]  # the sources of the parameters that every iteration reads
    others: tuple  # the variables that are no parameters: constants, then the carry, then stacks; None for a literal
    consts: int  # the number of constants among `others`
    results: tuple[int, ...]  # for each result of the segment, its index among the results of the stage
    returned: int  # how many results of the stage are not stacked; they come first; for a scan, they are the carry
    stacked: tuple[tuple[Source, ...], ...] = ()  # for each stack of layers, the source of each layer
    length: int = 1  # the number of iterations
    reverse: bool = False  # whether the first iteration reads the last layer
    carry: int = 0  # the number of carried values among `others`
    # the values of literals, by index among `others`
    literals: Mapping[int, Array] = dataclasses.field(default_factory=dict)
    closed: tuple = ()  # arrays that a scan's body closes over

    def layer(self, iteration: int) -> int:
        return self.length - 1 - iteration if self.reverse else iteration

    def sources(self, iteration: int) -> list[Source]:
        return [*self.shared, *(layers[self.layer(iteration)] for layers in self.stacked)]

    @property
    def forward_uses(self) -> list[list[Source]]:
        """Return the sources that each execution of the forward program reads."""
        return [self.sources(iteration) for iteration in range(self.length)]

    @property
    def backward_uses(self) -> list[list[Source]]:
        """Return the sources that each execution of the backward program reads, in the order of the executions."""
        return [[use[i] for i in self.stage.needed] for use in reversed(self.forward_uses)]

    @property
    def trained_uses(self) -> list[list[Source]]:
        """Return the sources whose gradients each execution of the backward program returns."""
        assert self.stage.passes is not None
        return [[use[i] for i in self.stage.passes.active_params] for use in self.forward_uses]

    @property
    def differentiated(self) -> list:
        active = () if self.stage.passes is None else self.stage.passes.active_results
        return [key for i, key in zip(self.results, self.segment.results, strict=True) if i in active]

    def values(self, env: Mapping) -> tuple[list, list, list]:
        """Return the values of `others` as `(consts, carry, slices)`."""
        values = [self.literals[i] if i in self.literals else env[key] for i, key in enumerate(self.others)]
        inner = self.consts + self.carry
        return values[: self.consts], values[self.consts : inner], values[inner:]
