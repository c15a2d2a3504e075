"""Find the cheapest way to train that fits: estimate candidates, order them by cost, and compile until one fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerojax.config import Config
from zerojax.planning.activations import PlainGradient
from zerojax.planning.candidates import COST_RESOLUTION, Candidate, SearchSpace, candidates, rejection
from zerojax.planning.compiled_plan import Plan
from zerojax.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True)
class Fit:
    """The cheapest way to train that fits, and all other candidates.

    Attributes:
        chosen: The first candidate, in order of preference, whose compiled step fits.
        plan: The plan of `chosen`.
        tried: All candidates in order of preference, the fewest devices first, each with its verdict.
    """

    chosen: Candidate
    plan: Plan
    tried: tuple[Candidate, ...]

    def __str__(self) -> str:
        """Return the choice, then a table with the preferred batch for each stage, loss and offload."""
        shown: dict[tuple, Candidate] = {}
        for candidate in self.tried:
            if candidate.variant not in shown or candidate == self.chosen:
                shown[candidate.variant] = candidate
        column = lambda title, cells: max(len(cell) for cell in (title, *cells)) + 2
        loss = column("loss", [c.loss for c in shown.values()])
        within = any(c.shard_axis or c.params_axis for c in shown.values())
        over = column("shards over", [c.sharding for c in shown.values()]) if within else 0
        cell = lambda text: f"{text:{over}s}" if within else ""
        lines = [
            f"{self.chosen} on {self.plan.topology}",
            f"  compiled: {format_bytes(self.plan.peak)} of {format_bytes(self.plan.usable)} usable per device",
            f"devices  stage  {cell('shards over')}{'loss':{loss}s}{'state':16s}"
            f"{'rows':>8s}{'peak':>10s}{'per row':>10s}",
        ]
        lines += [
            f"{c.devices:7d}  {c.stage:5d}  {cell(c.sharding)}{c.loss:{loss}s}{c.placement:16s}{c.rows:8,d}"
            f"{format_bytes(c.peak):>10s}{'' if c.seconds == math.inf else format_seconds(c.seconds):>10s}  {c.verdict}"
            for c in shown.values()
        ]
        return "\n".join(lines)


def search(
    config: Config,
    losses: Mapping[str, PlainGradient],
    params: Any,
    batch: Any,
    *,
    space: SearchSpace,
    counts: Sequence[int],
    compile_plan: Callable[[Candidate], Plan],
) -> Fit:
    """Find the cheapest candidate that fits, on the first number of devices with such a candidate.

    Candidates replace the stage, mesh and offload of `config`, and dim 0 of `batch`. Of two losses of equal cost, the
    first is preferred.

    Raises:
        ValueError: If nothing fits.
    """
    tried: list[Candidate] = []
    for count in counts:
        estimated = [
            dataclasses.replace(c, verdict=rejection(c, space.usable(count)))
            for c in candidates(config, losses, params, batch, space, count)
        ]
        ordered = list(by_preference([c for c in estimated if not c.verdict], list(losses)))
        rejected = sorted((c for c in estimated if c.verdict), key=lambda c: c.peak)
        for i, candidate in enumerate(ordered):
            plan = compile_plan(candidate)
            if plan.fits:
                chosen = dataclasses.replace(candidate, verdict="chosen")
                others = [dataclasses.replace(c, verdict="not preferred") for c in ordered[i + 1 :]]
                return Fit(chosen, plan, (*tried, *ordered[:i], chosen, *others, *rejected))
            verdict = f"does not fit: {format_bytes(plan.peak)}, compiled"
            ordered[i] = dataclasses.replace(candidate, peak=plan.peak, verdict=verdict)
        tried += [*ordered, *rejected]
    raise ValueError(nothing_fits(tried, space, counts))


def by_preference(estimated: Sequence[Candidate], losses: Sequence[str]) -> Iterator[Candidate]:
    """Yield the cheapest first. At equal cost: no offload, low stage, shards over all, early loss, small batch."""
    rest = sorted(estimated, key=lambda c: c.seconds)
    within = lambda c: bool(c.shard_axis) + 2 * bool(c.params_axis)
    simplest = lambda c: (c.offload is not None, c.stage, within(c), losses.index(c.loss), c.rows)
    while rest:
        equal = [c for c in rest if c.seconds <= (1 + COST_RESOLUTION) * rest[0].seconds]
        yield from sorted(equal, key=simplest)
        rest = rest[len(equal) :]


def nothing_fits(tried: Sequence[Candidate], space: SearchSpace, counts: Sequence[int]) -> str:
    """Return the message of the error that nothing fits."""
    among = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if not tried:
        return (
            f"No candidate for {among} {space.gpu}: no number of devices divides rows={space.rows}, or no stage of "
            f"{tuple(space.stages)} supports offload=. Give rows that are a multiple of the devices, or other stages."
        )
    nearest = min(tried, key=lambda c: c.peak / space.usable(c.devices))
    return (
        f"Nothing fits {among} {space.gpu}. The nearest is {nearest}, on {nearest.devices}: it needs "
        f"{format_bytes(nearest.peak)} per device, and {format_bytes(space.usable(nearest.devices))} may be used. "
        f"Give more devices, a loss with remat, fewer rows, or an offload= that offloads more."
    )
