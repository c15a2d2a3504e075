"""Describe what the planner decided about the equations on parameters. `check`, `plan` and `report` print it."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zerojax import compat
from zerojax.gather.nested import NestedSegment
from zerojax.gather.rules import RULES, RUN_IN_PLACE
from zerojax.gather.run import groups_of
from zerojax.gather.segments import BlockSegment, Program

_MOST = 3  # gathers that a line names


@dataclasses.dataclass(frozen=True)
class Decided:
    """What the planner decided about the equations on parameters.

    Attributes:
        rules: For each rule of the planner, by name, the equations on parameters that it took, with their lines.
        separate: The paths of the parameters that are gathered once more for equations on parameters alone, which
            cannot share the gather of another block.
        shared: For each gather that several small blocks share, the number of these blocks (`run.groups_of`).
    """

    rules: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    separate: tuple[str, ...] = ()
    shared: tuple[int, ...] = ()

    def in_words(self) -> list[str]:
        """Return a line with the number of equations per rule, and lines with shared and separate gathers, if any."""
        counts = ", ".join(f"{name} {len(places)}" for name, places in self.rules.items())
        leaves = ", ".join([*self.separate[:_MOST], *["..."] * (len(self.separate) > _MOST)])
        separate = f"{len(self.separate)}: {leaves}" if leaves else ""
        shared = f"{sum(self.shared)} small blocks in {len(self.shared)}" if self.shared else ""
        lines = {"rules": counts, "shared gathers": shared, "separate gathers": separate}
        return [f"{name:18} {text}" for name, text in lines.items() if text]


def decided_of(program: Program, alike: Sequence[bool], shared_bytes: int = 0) -> Decided:
    """Return the decisions of a program.

    For each of its first arguments, `alike` says whether it is equal on all devices. `shared_bytes` is as in
    `Collectives`.
    """
    inner = (segment.program for segment in program.segments if isinstance(segment, NestedSegment))
    programs = (program, *inner)
    decisions = [decision for each in programs for decision in each.decisions]
    by_rule = {rule.name: tuple(named(eqn) for eqn, name in decisions if name == rule.name) for rule in RULES}
    rules = {name: places for name, places in by_rule.items() if places and name != RUN_IN_PLACE}
    separate = tuple(dict.fromkeys(_separate(program, alike)))
    numbers = [groups_of([segment for segment in each.segments if segment.params], shared_bytes) for each in programs]
    counts = [count for groups in numbers for count in Counter(groups).values()]
    return Decided(rules, separate, tuple(count for count in counts if count > 1))


def _separate(program: Program, alike: Sequence[bool]) -> Iterator[str]:
    """Yield the parameters of each block that gathers them once more, for equations on them alone."""
    differing = {var for var, on in zip(program.invars, alike, strict=False) if not on}
    for segment in program.segments:
        differing.update(segment.after(differing))
    for segment in program.segments:
        if not isinstance(segment, BlockSegment) or not segment.jaxpr.eqns or not differing.isdisjoint(segment.others):
            continue
        roots = {param.root for param in segment.params}
        if any(roots & {param.root for param in other.params} for other in program.segments if other is not segment):
            yield segment.params[0].leaf.path + f" and {len(roots) - 1} more" * (len(roots) > 1)


def named(eqn: Any) -> str:
    """Return the name of an equation's primitive, and the line of the loss from which the equation comes."""
    return " at ".join(filter(None, [eqn.primitive.name, compat.line_of(eqn)]))
