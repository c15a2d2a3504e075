"""The cheapest way to train that fits: candidates are estimated, put in order, and compiled until one fits.

What a step costs is a sum of lower bounds: the kernels of the plain gradient on one
device's rows (what is recomputed is in them), what is sent, the update's memory traffic,
and what is offloaded going to the device and back. Stage 3 sends while it computes, so
the slower of the two counts; the others send when the gradients are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zerojax.config import Config, Offload
from zerojax.gpus.devices import USABLE, Device
from zerojax.gpus.topology import Topology
from zerojax.layout.tree import Layout
from zerojax.optim.plan import make_plan
from zerojax.planning.activations import PlainGradient
from zerojax.planning.compiled_plan import Plan, duration
from zerojax.planning.estimate import Estimate, StageEstimate, abstract_mesh, in_words, stage_estimate

# Estimated peaks of unlike layers are up to this share too high: what exceeds the memory by no more is compiled to see.
MARGIN = 0.25
# Costs closer than this are equal: estimates are no finer.
ALIKE = 0.02
MOST_ROWS = 1024  # a device
MOST_DEVICES = 1024
# Bytes per second each way between a GPU and its host: 80% of PCIe 4.0 and 5.0 with 16 lanes.
HOST_LINKS = {"a100-80": 25e9, "b200": 50e9, "h100": 50e9, "h200": 50e9}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train, and what is estimated of it.

    Attributes:
        devices: How many GPUs.
        stage: ZeRO stage.
        remat: Which of the loss functions.
        offload: What waits in host memory or on disk.
        rows: Of the global batch.
        peak: Bytes on a device at most; of what cannot fit whatever the batch, at least.
        waits: Bytes in host memory and on disk, for each device.
        seconds: For one row of the global batch, at least; infinite where `peak` is a lower bound.
        verdict: What became of it.
    """

    devices: int
    stage: int
    remat: str
    offload: Offload | None
    rows: int
    peak: int
    is_on_host: int
    seconds: float
    verdict: str = ""

    @property
    def where(self) -> str:
        """Where the optimizer's state lies, in a word or two."""
        if self.offload is None:
            return "device"
        return " + ".join([str(self.offload.optimizer), *(["params"] if self.offload.params else [])])

    @property
    def group(self) -> tuple:
        """All that was chosen, but for the batch."""
        return self.devices, self.stage, self.remat, self.offload

    def __str__(self) -> str:
        """The choice, in words."""
        return f"stage {self.stage}, loss {self.remat!r}, state on the {self.where}, {self.rows:,} rows"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The cheapest way to train that fits, and the others.

    Attributes:
        chosen: The first in order whose compiled step fits.
        plan: Its compiled step.
        tried: All candidates in order of preference, the fewest devices first, each with its verdict.
    """

    chosen: Candidate
    plan: Plan
    tried: tuple[Candidate, ...]

    def __str__(self) -> str:
        """The choice, then a table: of each stage, loss and offload the batch that came furthest."""
        seen: dict[tuple, Candidate] = {}
        for candidate in self.tried:
            if candidate.group not in seen or candidate == self.chosen:
                seen[candidate.group] = candidate
        width = max(len(name) for name in ("loss", *(c.remat for c in seen.values()))) + 2
        lines = [
            f"{self.chosen} on {self.plan.topology}",
            f"  compiled: {in_words(self.plan.peak)} of {in_words(self.plan.usable)} usable per device",
            f"devices  stage  {'loss':{width}s}{'state':16s}{'rows':>8s}{'peak':>10s}{'a row':>10s}",
        ]
        lines += [
            f"{c.devices:7d}  {c.stage:5d}  {c.remat:{width}s}{c.where:16s}{c.rows:8,d}{in_words(c.peak):>10s}"
            f"{'' if c.seconds == float('inf') else duration(c.seconds):>10s}  {c.verdict}"
            for c in seen.values()
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is searched, and in what it has to fit.

    Attributes:
        gpu: Kind of GPU.
        stages: ZeRO stages.
        offloads: What may wait elsewhere; None: nothing.
        rows: Of the global batch; None: doubled as long as that is worth it.
        memory: Bytes of a device that may be taken; None: 95% of what there is.
        link: As for `plan`.
        network: As for `plan`.
        host_link: Bytes per second each way between a GPU and its host; None: PCIe's.
    """

    gpu: str
    stages: Sequence[int]
    offloads: Sequence[Offload | None]
    rows: Sequence[int] | None
    memory: float | None
    link: float | None
    network: float | None
    host_link: float | None

    def __post_init__(self):
        """Refuse what no GPU has.

        Raises:
            ValueError: If the memory or the speed of the host link is not above 0.
        """
        for name, given, unit in (("memory", self.memory, ""), ("host_link", self.host_link, " per second")):
            if given is not None and not given > 0:
                raise ValueError(f"{name} is a GPU's, in bytes{unit}, and must be above 0, not {given}.")

    def device(self, count: int) -> Device:
        """One of `count` GPUs."""
        return Device.of(Topology.parse(f"{self.gpu}:{count}"), link=self.link, network=self.network)

    def usable(self, count: int) -> float:
        """Bytes of one of `count` GPUs that may be taken."""
        return USABLE * self.device(count).memory if self.memory is None else self.memory

    @property
    def ways(self) -> list[tuple[int, Offload | None]]:
        """Stages with what they may offload: nothing at stage 0, parameters at stage 3 alone."""
        return [
            (stage, offload)
            for stage in self.stages
            for offload in self.offloads
            if offload is None or stage == 3 or (stage > 0 and offload.params is None)
        ]


class Way(NamedTuple):
    """A stage and an offload on a number of devices, laid out: all that does not depend on loss and batch."""

    config: Config
    layout: Layout
    row: StageEstimate


def search(
    config: Config,
    losses: Mapping[str, PlainGradient],
    params: Any,
    batch: Any,
    *,
    limits: Limits,
    counts: Sequence[int],
    check: Callable[[Candidate], Plan],
) -> Fit:
    """Find the cheapest candidate that fits on the first number of devices on which one does.

    Args:
        config: Transformation, axis and types; stage, mesh and offload are replaced.
        losses: The loss by name, those of equal cost in order of preference.
        params: Shapes of the parameters.
        batch: Shapes of a batch; dim 0 is replaced.
        limits: What is searched, and in what it has to fit.
        counts: Numbers of devices, in order.
        check: Compiles a candidate's step.

    Raises:
        ValueError: If nothing fits.
    """
    tried: list[Candidate] = []
    for count in counts:
        usable = limits.usable(count)
        found = list(candidates(config, losses, params, batch, limits, count))
        judged = [dataclasses.replace(c, verdict=verdict(c, usable)) for c in found]
        ordered = list(in_order([c for c in judged if not c.verdict], list(losses)))
        left_out = sorted((c for c in judged if c.verdict), key=lambda c: c.peak)
        for place, candidate in enumerate(ordered):
            plan = check(candidate)
            if plan.fits:
                chosen = dataclasses.replace(candidate, verdict="chosen")
                dearer = [dataclasses.replace(c, verdict="not preferred") for c in ordered[place + 1 :]]
                return Fit(chosen, plan, (*tried, *ordered[:place], chosen, *dearer, *left_out))
            ordered[place] = dataclasses.replace(
                candidate, peak=plan.peak, verdict=f"does not fit: {in_words(plan.peak)}, compiled"
            )
        tried += [*ordered, *left_out]
    raise ValueError(nothing_fits(tried, limits, counts))


def verdict(candidate: Candidate, usable: float) -> str:
    """Why a candidate is not worth compiling; empty if it is."""
    if candidate.peak <= (1 + MARGIN) * usable:
        return ""
    least = "at least " if candidate.seconds == float("inf") else ""
    return f"does not fit: {least}{in_words(candidate.peak)}, estimated"


def nothing_fits(tried: Sequence[Candidate], limits: Limits, counts: Sequence[int]) -> str:
    """What to say when nothing fits."""
    among = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    if not tried:
        return (
            f"No candidate for {among} {limits.gpu}: no number of devices divides rows={limits.rows}, or no stage of "
            f"{tuple(limits.stages)} can offload as offload= says. Give rows that are a multiple of the devices."
        )
    nearest = min(tried, key=lambda c: c.peak / limits.usable(c.devices))
    return (
        f"Nothing fits {among} {limits.gpu}. The nearest is {nearest}, on {nearest.devices}: it needs "
        f"{in_words(nearest.peak)} a device, of which {in_words(limits.usable(nearest.devices))} may be taken. Give "
        f"more devices, a loss with remat, fewer rows, or offload= with more that waits elsewhere."
    )


def in_order(found: Sequence[Candidate], losses: Sequence[str]) -> Iterator[Candidate]:
    """The cheapest first; of those that cost the same, what is simplest: no offload, a low stage, a small batch."""
    rest = sorted(found, key=lambda c: c.seconds)
    simplest = lambda c: (c.offload is not None, c.stage, losses.index(c.remat), c.rows)
    while rest:
        alike = [c for c in rest if c.seconds <= (1 + ALIKE) * rest[0].seconds]
        yield from sorted(alike, key=simplest)
        rest = rest[len(alike) :]


def candidates(
    config: Config, losses: Mapping[str, PlainGradient], params: Any, batch: Any, limits: Limits, count: int
) -> Iterator[Candidate]:
    """Every way to train on a number of devices, estimated."""
    ways = [laid_out(config, params, stage, offload, count) for stage, offload in limits.ways]
    estimated = lambda name, way, rows: estimate_one(losses[name], name, way, batch, limits, count, rows)
    for name in losses:
        if limits.rows is not None:
            yield from (estimated(name, way, rows) for rows in limits.rows if rows % count == 0 for way in ways)
            continue
        least: dict[tuple, float] = {}
        worth, rows = True, count
        while worth and rows <= MOST_ROWS * count:
            worth = False
            for way in ways:
                candidate = estimated(name, way, rows)
                yield candidate
                # A batch twice as large that makes a row no cheaper, or does not fit, ends the doubling.
                gains = candidate.seconds < (1 - ALIKE) * least.get(candidate.group, float("inf"))
                worth |= gains and not verdict(candidate, limits.usable(count))
                least[candidate.group] = candidate.seconds
            rows *= 2


def laid_out(config: Config, params: Any, stage: int, offload: Offload | None, count: int) -> Way:
    """A stage and an offload on a number of devices."""
    config = dataclasses.replace(config, stage=stage, offload=offload, mesh=abstract_mesh(count, config.axis))
    plan = make_plan(config, params)
    return Way(config, plan.layout, stage_estimate(config, plan.layout, plan, 1))


def estimate_one(
    loss: PlainGradient, name: str, way: Way, batch: Any, limits: Limits, count: int, rows: int
) -> Candidate:
    """One candidate; what cannot fit whatever the batch is not compiled for."""
    config, layout, row = way
    is_on_host = row.host + row.disk
    least = row.lasting + row.update // 2  # what lives, and the gradients as the optimizer sees them
    candidate = Candidate(count, config.stage, name, config.offload, rows, least, is_on_host, float("inf"))
    if verdict(candidate, limits.usable(count)):
        return candidate
    share = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows // count, *x.shape[1:]), x.dtype), batch)
    seen = loss.seen(config, layout, share)
    row = dataclasses.replace(row, activations=seen.activations, gathered=seen.gathered)
    assert row.peak is not None
    seconds = step_seconds(row, seen.seconds(limits.device(count)), limits)
    return dataclasses.replace(candidate, peak=row.peak, seconds=seconds / rows)


def step_seconds(row: StageEstimate, kernels: float, limits: Limits) -> float:
    """How long a step takes at least.

    Args:
        row: The estimate of its stage.
        kernels: Seconds of the plain gradient on one device's rows.
        limits: GPU and links.
    """
    device = limits.device(row.devices)
    sending = row.sent / device.sends(row.devices)
    passes = max(kernels, sending) if row.stage == 3 else kernels + sending
    updating = 2 * row.lasting / device.bandwidth
    link = limits.host_link or HOST_LINKS[limits.gpu]
    return passes + updating + Estimate(0, 0, (row,)).offload_seconds(row.stage, link=link)
