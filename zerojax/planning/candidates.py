"""Ways to train a model, and what each is estimated to need and to cost.

The time of a step is a sum of lower bounds: the kernels of the plain gradient on one
device's rows (recomputation included), communication, the update's memory traffic, and the
transfers of offloaded state. Stage 3 communicates during the passes, so the slower of the two
counts; the other stages communicate after the backward pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.config import Config, Offload, check_count
from zerojax.gpus.devices import USABLE, Device
from zerojax.gpus.topology import Topology, abstract_mesh
from zerojax.layout.tree import Layout
from zerojax.optim.plan import make_plan
from zerojax.planning.activations import PlainGradient
from zerojax.planning.estimate_table import Estimate, StageEstimate
from zerojax.planning.shapes import abstract, with_rows
from zerojax.planning.stage_bytes import estimate_stage
from zerojax.units import format_bytes

# Estimated peaks of unlike layers are up to this share too high: what exceeds the memory by no more is compiled.
PEAK_MARGIN = 0.25
# Costs closer than this are equal: estimates are no finer.
COST_RESOLUTION = 0.02
MOST_ROWS = 1024  # a device
# Bytes per second each way between a GPU and its host: 80% of PCIe 4.0 and 5.0 with 16 lanes.
HOST_LINKS = {"a100-80": 25e9, "b200": 50e9, "h100": 50e9, "h200": 50e9}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train, and what is estimated of it.

    Attributes:
        devices: Number of GPUs.
        stage: ZeRO stage.
        loss: Name of the loss function.
        offload: What is offloaded to host memory or disk.
        rows: Of the global batch.
        peak: Most bytes on a device; a lower bound if it does not fit whatever the batch.
        offloaded: Bytes in host memory and on disk, per device.
        seconds: Least time of one row of the global batch; infinite where `peak` is a lower bound.
        verdict: Whether it was chosen, or why not.
    """

    devices: int
    stage: int
    loss: str
    offload: Offload | None
    rows: int
    peak: int
    offloaded: int
    seconds: float = math.inf
    verdict: str = ""

    @property
    def placement(self) -> str:
        """The memory of the optimizer state, and `params` if parameters are offloaded."""
        if self.offload is None:
            return "device"
        return " + ".join([str(self.offload.optimizer), *(["params"] if self.offload.params else [])])

    @property
    def variant(self) -> tuple:
        """All that was chosen but the batch."""
        return self.devices, self.stage, self.loss, self.offload

    def __str__(self) -> str:
        """The choice, in one line."""
        return f"stage {self.stage}, loss {self.loss!r}, state on the {self.placement}, {self.rows:,} rows"


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """What is searched, and the GPUs it has to fit.

    Attributes:
        gpu: Kind of GPU.
        stages: ZeRO stages.
        offloads: What may be offloaded; None: nothing.
        rows: Of the global batch; None: doubled as long as a row gets cheaper.
        memory: Bytes of a device that may be used; None: 95% of its memory.
        link: As for `plan`.
        network: As for `plan`.
        host_link: Bytes per second each way between a GPU and its host; None: PCIe's.

    Raises:
        TypeError: If a number of rows is no integer.
        ValueError: If a number of rows is below 1, or the memory or the host link not above 0.
    """

    gpu: str
    stages: Sequence[int]
    offloads: Sequence[Offload | None]
    rows: Sequence[int] | None
    memory: float | None = None
    link: float | None = None
    network: float | None = None
    host_link: float | None = None

    def __post_init__(self):
        """Check rows, memory and host link; `Device` checks the other links."""
        for count in self.rows or ():
            check_count("rows", count, "rows of the global batch", least=1)
        for name, given, unit in (("memory", self.memory, ""), ("host_link", self.host_link, " per second")):
            if given is not None and not given > 0:
                raise ValueError(f"{name} is a GPU's, in bytes{unit}, and must be above 0, not {given}.")

    def device(self, count: int) -> Device:
        """One of `count` GPUs."""
        return Device.of(Topology.parse(f"{self.gpu}:{count}"), link=self.link, network=self.network)

    def usable(self, count: int) -> float:
        """Bytes of one of `count` GPUs that may be used."""
        return USABLE * self.device(count).memory if self.memory is None else self.memory

    @property
    def combinations(self) -> list[tuple[int, Offload | None]]:
        """Stages with what they can offload: nothing at stage 0, parameters at stage 3 alone."""
        return [
            (stage, offload)
            for stage in self.stages
            for offload in self.offloads
            if offload is None or stage == 3 or (stage > 0 and offload.params is None)
        ]


class Setup(NamedTuple):
    """A stage and an offload on a number of devices: all that depends neither on loss nor on batch."""

    config: Config
    layout: Layout
    row: StageEstimate

    @classmethod
    def of(cls, config: Config, params: Any, stage: int, offload: Offload | None, count: int) -> Setup:
        """Lay out shapes of parameters; stage, offload and mesh of the configuration are replaced."""
        config = dataclasses.replace(config, stage=stage, offload=offload, user_mesh=abstract_mesh(count, config.axis))
        plan = make_plan(config, params)
        return cls(config, plan.layout, estimate_stage(config, plan, accumulate=1))


def candidates(
    config: Config, losses: Mapping[str, PlainGradient], params: Any, batch: Any, space: SearchSpace, count: int
) -> Iterator[Candidate]:
    """Every way to train on a number of devices, estimated."""
    setups = [Setup.of(config, params, stage, offload, count) for stage, offload in space.combinations]
    for name, loss in losses.items():
        estimated = lambda setup, rows: estimate_candidate(name, loss, setup, batch, space, rows)  # noqa: B023
        if space.rows is not None:
            yield from (estimated(setup, rows) for rows in space.rows if rows % count == 0 for setup in setups)
            continue
        least: dict[tuple, float] = {}
        improves, rows = True, count
        while improves and rows <= MOST_ROWS * count:
            improves = False
            for setup in setups:
                candidate = estimated(setup, rows)
                yield candidate
                # Doubling ends with a batch that makes a row no cheaper, or does not fit.
                is_cheaper = candidate.seconds < (1 - COST_RESOLUTION) * least.get(candidate.variant, math.inf)
                improves |= is_cheaper and not rejection(candidate, space.usable(count))
                least[candidate.variant] = candidate.seconds
            rows *= 2


def estimate_candidate(
    name: str, loss: PlainGradient, setup: Setup, batch: Any, space: SearchSpace, rows: int
) -> Candidate:
    """One candidate; the loss is not compiled for one that does not fit whatever the batch."""
    config, layout, row = setup
    least = row.resident + row.update // 2  # the state, and the gradients as the optimizer sees them
    candidate = Candidate(row.devices, row.stage, name, config.offload, rows, least, row.host + row.disk)
    if rejection(candidate, space.usable(row.devices)):
        return candidate
    cost = loss.cost(config, layout, abstract(with_rows(batch, rows // row.devices)))
    row = dataclasses.replace(row, activations=cost.activations, gathered=cost.gathered)
    assert row.peak is not None
    seconds = step_seconds(row, cost.seconds(space.device(row.devices)), space)
    return dataclasses.replace(candidate, peak=row.peak, seconds=seconds / rows)


def rejection(candidate: Candidate, usable: float) -> str:
    """Why a candidate is not worth compiling; empty if it is."""
    if candidate.peak <= (1 + PEAK_MARGIN) * usable:
        return ""
    least = "at least " if candidate.seconds == math.inf else ""
    return f"does not fit: {least}{format_bytes(candidate.peak)}, estimated"


def step_seconds(row: StageEstimate, kernels: float, space: SearchSpace) -> float:
    """Least time of a step.

    Args:
        row: The estimate of its stage.
        kernels: Seconds of the plain gradient on one device's rows.
        space: GPU and links.
    """
    device = space.device(row.devices)
    communication = row.sent / device.ring_bandwidth(range(row.devices))
    passes = max(kernels, communication) if row.stage == 3 else kernels + communication
    update = 2 * row.resident / device.bandwidth
    link = space.host_link or HOST_LINKS[space.gpu]
    return passes + update + Estimate(0, 0, (row,)).offload_seconds(row.stage, link=link)
