"""Find the cheapest configuration that fits. Estimate candidates, sort them by cost, and compile until one fits.

The estimated time of a step is a sum of lower bounds: the kernels of the plain gradient on one device's rows (with
recomputation), communication, the update's memory traffic, and the transfers of offloaded state. At stage 3, kernels
and communication overlap, so only the slower of them counts. Other stages communicate after the backward pass.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax.budget.blocks import Blocks
from zerojax.config import Config, check_count
from zerojax.config.precision import Precision
from zerojax.gather.working_set import WorkingSet
from zerojax.gpus.devices import Device, Rates, Topology, absent_mesh, abstract_mesh
from zerojax.inspect.hlo import memory_analysis, read
from zerojax.inspect.roofline import Kernel, kernels, product_flops
from zerojax.layout.tree import Layout
from zerojax.offload.options import Offload
from zerojax.optim.sharding_plan import make_plan
from zerojax.planning.absent_program import (
    MANY_PROGRAMS,
    abstract,
    kernels_for,
    lowered,
    plain_gradient,
    program_of,
    with_rows,
)
from zerojax.planning.compiled_plan import Plan
from zerojax.planning.stage_bytes import StageEstimate, estimate_stage, sent_bytes
from zerojax.train.arguments import packed
from zerojax.train.fitting import DoesNotFit, largest_share
from zerojax.train.loss import Loss
from zerojax.units import format_bytes, format_seconds

# If the model's layers differ, an estimated peak is too high, but by at most this share. So a candidate is compiled
# unless its estimate exceeds the memory by more than this share.
PEAK_MARGIN = 0.25
# Costs that differ by less than this share count as equal, because the estimates are not more precise.
COST_RESOLUTION = 0.02
MOST_ROWS = 1024  # per device


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration to train with, and its estimated memory and time.

    Attributes:
        devices: Number of GPUs.
        stage: ZeRO stage.
        loss: Name of the loss function.
        offload: The offload, or None.
        rows: Rows of the global batch.
        peak: Peak bytes per device. It is only a lower bound if the model states alone do not fit.
        offloaded: Bytes in host memory and on disk, per device.
        seconds: Least seconds per row of the global batch. Infinite if `peak` is only a lower bound.
        verdict: Why the candidate was or was not chosen. Empty before the search.
        memory: As for `train_step`: `"auto"` if the layers save as many activations as fit, otherwise None.
        precision: As for `zero_shard`.
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
    memory: str | None = None
    precision: Precision | None = None

    @property
    def placement(self) -> str:
        """Return where the optimizer state is kept, followed by "+ params" if parameters are offloaded, too."""
        if self.offload is None:
            return "device"
        return " + ".join([str(self.offload.optimizer), *(["params"] if self.offload.params else [])])

    @property
    def variant(self) -> tuple:
        return self.devices, self.stage, self.loss, self.offload, self.precision

    def __str__(self) -> str:
        memory = f", memory={self.memory!r}" if self.memory else ""
        types = f", {self.precision.compute}" if self.precision else ""
        where = f"state on the {self.placement}"
        return f"stage {self.stage}, loss {self.loss!r}{memory}{types}, {where}, {self.rows:,} rows"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The cheapest configuration that fits, and all other candidates.

    Attributes:
        chosen: The first candidate, in order of preference, whose compiled step fits.
        plan: The plan of `chosen`.
        tried: All candidates in order of preference, the fewest devices first, each with its verdict.
    """

    chosen: Candidate
    plan: Plan
    tried: tuple[Candidate, ...]

    def __str__(self) -> str:
        """Return the choice, followed by a table with the preferred batch for each kind of step."""
        shown = {c.variant: c for c in reversed(self.tried)} | {self.chosen.variant: self.chosen}
        shown = {c.variant: shown[c.variant] for c in self.tried}
        loss = max(len(name) for name in ("loss", *(c.loss for c in shown.values()))) + 2
        lines = [
            f"{self.chosen} on {self.plan.topology}",
            f"  compiled: {format_bytes(self.plan.peak)} of {format_bytes(self.plan.usable)} usable per device",
            f"devices  stage  {'loss':{loss}s}{'types':10s}{'state':16s}{'rows':>8s}{'peak':>10s}{'per row':>10s}",
        ]
        lines += [
            f"{c.devices:7d}  {c.stage:5d}  {c.loss:{loss}s}{c.precision.compute if c.precision else 'as given'!s:10s}"
            f"{c.placement:16s}{c.rows:8,d}"
            f"{format_bytes(c.peak):>10s}{'' if c.seconds == math.inf else format_seconds(c.seconds):>10s}  {c.verdict}"
            for c in shown.values()
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The options of `plan.fit` to choose among, and the GPUs that the choice must fit."""

    gpu: str
    stages: Sequence[int]
    offloads: Sequence[Offload | None]
    rows: Sequence[int] | None
    memory: int | None
    rates: Rates
    precisions: Sequence[Precision | None] = (None,)
    recompute: bool = False
    progress: bool = False

    def __post_init__(self):
        for count in self.rows or ():
            check_count("rows", count, "rows of the global batch", least=1)
        for one in self.precisions:
            if not isinstance(one, Precision | None):
                raise TypeError(f"precision is a Precision, such as Precision.bf16(), or several, not {one!r}.")
        if any(offload is not None and offload.params == "disk" for offload in self.offloads):
            raise NotImplementedError(MANY_PROGRAMS)

    def device(self, count: int) -> Device:
        """Return one GPU of `count` GPUs, at the achievable rates that were given, or otherwise at peak rates."""
        topology = Topology.parse(self.topology(count))
        return Device.of(topology) if self.rates == Rates() else self.rates.of(topology)

    def topology(self, count: int) -> str:
        return f"{self.gpu}:{count}"

    def usable(self, count: int) -> float:
        device = self.device(count)
        return device.fitted(self.memory) if self.recompute else device.usable(self.memory)

    def batches(self, count: int) -> list[int]:
        """Return the batch sizes to try: the given ones that `count` divides, or 1, 2, 4, ... rows per GPU."""
        doubled = [count << i for i in range(MOST_ROWS.bit_length())]
        return doubled if self.rows is None else [rows for rows in self.rows if rows % count == 0]

    def say(self, text: str) -> None:
        if self.progress:
            print(f"plan.fit: {text}", file=sys.stderr, flush=True)

    @property
    def combinations(self) -> list[tuple[int, Offload | None, Precision | None]]:
        """Return the valid combinations. Stage 0 has no offload, and only stage 3 offloads parameters."""
        return [
            (stage, offload, precision)
            for stage in self.stages
            for offload in self.offloads
            if offload is None or stage == 3 or (stage > 0 and offload.params is None)
            for precision in self.precisions
        ]


@dataclasses.dataclass(frozen=True)
class GradientCost:
    """The cost of the plain gradient of a loss at a stage."""

    activations: int  # bytes of temporary memory and of one device's rows
    gathered: int  # bytes of parameters that are gathered at the same time
    kernels: tuple[Kernel, ...]
    blocks: Blocks | None = None  # with `recompute`, the blocks of the loss, which save as little as possible

    def seconds(self, device: Device) -> float:
        return sum(kernel.times * kernel.seconds(device) for kernel in self.kernels)

    def saved(self, room: float, device: Device) -> tuple[int, float]:
        """Return how many bytes of `room` the blocks fill with saved values, and the seconds that these values spare.

        The seconds are those of the FLOPs that the backward pass then does not repeat.
        """
        blocks = self.blocks
        assert blocks is not None, "the loss recomputes"
        more = lambda share: blocks.held_bytes(share) - blocks.held_bytes(0.0)
        repeated = lambda share: sum(block.calls * blocks.choice(block, share).flops for block in blocks.found)
        share, by_type = largest_share(0, more, room), product_flops(self.kernels)
        rate = device.rate(max(by_type, key=lambda dtype: by_type[dtype], default="f32"))
        return int(more(share)), (repeated(0.0) - repeated(share)) / rate


class PlainGradient:
    """The gradient of a loss by plain jit on one device, with full parameters and one device's rows.

    The temporary memory of this program is the memory of activations per device, on any number of devices. Remat and
    loops are taken into account. Gradients are not included, because they are results of the program. The program is
    smaller than a step. For each number of rows, it is compiled once for stages 0 to 2 and once for stage 3.
    """

    def __init__(self, loss: Loss, args: tuple, gpu: str | None, *, recompute: bool = False):
        """Compile for `gpu`, or, if it is None, the first local device. With `recompute`, blocks save the least."""
        self.loss, self._recompute = loss, recompute
        self.args = abstract(packed(args))
        self._mesh = Mesh(jax.devices()[:1], ("data",)) if gpu is None else absent_mesh(f"{gpu}:1")
        self._gathered: dict[Any, WorkingSet] = {}
        self._costs: dict[Any, GradientCost] = {}

    def cost(self, config: Config, layout: Layout, rows: Any) -> GradientCost:
        """Return the cost at the stage of `config`. `rows` has the shapes of the rows that one device has at a time.

        Configurations share a compiled program if they add up the same gradients over microbatches (`plain_gradient`).
        Configurations that shard the same dims share a trace of the loss.
        """
        types = tuple((x.shape, x.dtype) for x in jax.tree.leaves(rows))
        traced = layout.compute, layout.trained, tuple((leaf.kind, leaf.dim) for leaf in layout.params), types
        with kernels_for(self._mesh):
            if traced not in self._gathered:
                self._gathered[traced] = program_of(config, layout, self.loss, rows, self.args)
            gathered = self._gathered[traced]
            sharded = {i for i, leaf in enumerate(layout.params) if leaf.kind == "sharded"}
            accumulated = frozenset(sharded - gathered.stacks)
            key = layout.compute, layout.trained, accumulated, types
            if key not in self._costs:
                blocks = Blocks() if self._recompute else None
                fn = self.loss.fn if blocks is None else blocks.rematerialised(self.loss.fn, 0.0)
                loss = dataclasses.replace(self.loss, fn=fn)
                plain = plain_gradient(layout, loss, rows, self.args, mesh=self._mesh, accumulated=accumulated)
                compiled = lowered(plain, self._mesh).compile()
                row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in types)
                temporary = memory_analysis(compiled).temp_size_in_bytes
                self._costs[key] = GradientCost(temporary + row_bytes, 0, tuple(kernels(read(compiled))), blocks)
            return dataclasses.replace(self._costs[key], gathered=gathered.bytes)


def candidates(
    config: Config, losses: Mapping[str, PlainGradient], params: Any, batch: Any, space: SearchSpace, count: int
) -> Iterator[Candidate]:
    mesh = abstract_mesh(count, config.axis, hosts=Topology.parse(space.topology(count)).hosts)
    setups: list[tuple[Config, Layout, StageEstimate]] = []
    for stage, offload, precision in space.combinations:
        chosen = dataclasses.replace(config, user_mesh=mesh, stage=stage, offload=offload, precision=precision)
        sharding = make_plan(chosen, params)
        setups.append((chosen, sharding.layout, estimate_stage(chosen, sharding, accumulate=1)))
    for name, loss in losses.items():
        least: dict[tuple, float] = {}
        for rows in space.batches(count):
            improves = False
            for setup in setups:
                candidate = estimate_candidate(name, loss, batch, space, setup, rows)
                yield candidate
                # Double the rows again if this doubling made a row cheaper for at least one setup that still fits.
                is_cheaper = candidate.seconds < (1 - COST_RESOLUTION) * least.get(candidate.variant, math.inf)
                improves |= is_cheaper and not rejection(candidate, space.usable(count))
                least[candidate.variant] = candidate.seconds
            space.say(f"estimated loss {name!r} with {rows:,} rows on {space.topology(count)}")
            if space.rows is None and not improves:
                break


def estimate_candidate(
    name: str, loss: PlainGradient, batch: Any, space: SearchSpace, setup: tuple, rows: int
) -> Candidate:
    """Estimate one candidate. The loss is compiled only if the model states fit."""
    config, layout, estimate = setup
    least = estimate.resident + estimate.update // 2  # the state, and the gradients in the optimizer's type
    offloaded, count = estimate.host + estimate.disk, estimate.devices
    candidate = Candidate(count, config.stage, name, config.offload, rows, least, offloaded, precision=config.precision)
    if rejection(candidate, space.usable(count)):
        return candidate
    cost = loss.cost(config, layout, abstract(with_rows(batch, rows // count)))
    device, spared = space.device(count), 0.0
    peak = peak_of(estimate, cost.activations, cost.gathered)
    if space.recompute:
        candidate = dataclasses.replace(candidate, memory="auto")
        more, spared = cost.saved(space.usable(count) - peak, device)
        peak = peak_of(estimate, cost.activations + more, cost.gathered)
    kernels, sending = cost.seconds(device) - spared, sending_seconds(config, layout, device)
    passes = max(kernels, sending) if estimate.stage == 3 else kernels + sending
    update, transfers = 2 * estimate.resident / device.bandwidth, offloaded / device.host_link
    return dataclasses.replace(candidate, peak=peak, seconds=(passes + update + transfers) / rows)


def peak_of(estimate: StageEstimate, activations: int, gathered: int) -> int:
    """Return the peak bytes of a step: the model states, plus the backward pass or the update, whichever is larger.

    For unrolled layers at stages 1 and 2, this is an upper bound, because the layers' gradients may be reduced one by
    one. Chunks of an offloaded update are not included.
    """
    return estimate.resident + max(estimate.backward + activations + gathered, estimate.update)


def rejection(candidate: Candidate, usable: float) -> str:
    if candidate.peak <= (1 + PEAK_MARGIN) * usable:
        return ""
    least = "at least " if candidate.seconds == math.inf else ""
    return f"does not fit: {least}{format_bytes(candidate.peak)}, estimated"


def sending_seconds(config: Config, layout: Layout, device: Device) -> float:
    """Return the least total seconds of a step's collectives, which run one after the other over their links."""
    names, sizes = zip(*config.data.sizes, strict=True)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    # The first group of a collective has all devices along the collective's axes, at index 0 of every other axis.
    group = lambda axes: numbers[tuple(slice(None) if name in axes else 0 for name in names)].ravel().tolist()
    sent = sent_bytes(config, layout, 1, layout)
    return sum(count / device.ring_bandwidth(group(axes)) for axes, count in sent.items())


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
    """Find the cheapest candidate that fits. The numbers of devices in `counts` are tried in order until one fits."""
    tried: list[Candidate] = []
    for count in counts:
        topology, usable = space.topology(count), space.usable(count)
        most = len(losses) * len(space.combinations) * len(space.batches(count))
        space.say(f"estimating {'up to ' * (space.rows is None)}{most} candidates on {topology}")
        estimated = list(candidates(config, losses, params, batch, space, count))
        rejected = [dataclasses.replace(c, verdict=why) for c in estimated if (why := rejection(c, usable))]
        ordered = list(by_preference([c for c in estimated if not rejection(c, usable)], list(losses), space))
        space.say(f"{len(ordered)} of {len(estimated)} may fit. They are compiled, the fastest first, until one fits")
        begun = time.perf_counter()
        for i, candidate in enumerate(ordered):
            try:
                plan = compile_plan(candidate)
                peak = plan.peak
            except DoesNotFit as error:
                plan, peak = None, error.peak
            if plan is not None and plan.fits:
                space.say(f"{candidate}: fits, {format_bytes(peak)}")
                ordered[i] = chosen = dataclasses.replace(candidate, verdict="chosen")
                ordered[i + 1 :] = [dataclasses.replace(c, verdict="not preferred") for c in ordered[i + 1 :]]
                return Fit(chosen, plan, (*tried, *ordered, *sorted(rejected, key=lambda c: c.peak)))
            verdict = f"does not fit: {format_bytes(peak)}, compiled"
            ordered[i] = dataclasses.replace(candidate, peak=peak, verdict=verdict)
            left = len(ordered) - i - 1
            rest = format_seconds(left * (time.perf_counter() - begun) / (i + 1))
            space.say(f"{candidate}: {verdict}. {f'The other {left} take up to {rest}' if left else 'None is left'}")
        tried += [*ordered, *sorted(rejected, key=lambda c: c.peak)]
    raise ValueError(nothing_fits(tried, space, counts))


def by_preference(estimated: Sequence[Candidate], losses: Sequence[str], space: SearchSpace) -> Iterator[Candidate]:
    """Yield candidates by cost. At equal cost, prefer no offload, a low stage, the first options, few rows."""
    of_options = lambda c: (space.precisions.index(c.precision), losses.index(c.loss))
    rest = sorted(estimated, key=lambda c: c.seconds)
    while rest:
        equal = [c for c in rest if c.seconds <= (1 + COST_RESOLUTION) * rest[0].seconds]
        yield from sorted(equal, key=lambda c: (c.offload is not None, c.stage, *of_options(c), c.rows))
        rest = rest[len(equal) :]


def nothing_fits(tried: Sequence[Candidate], space: SearchSpace, counts: Sequence[int]) -> str:
    among = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    if not tried:
        return (
            f"No candidate for {among} {space.gpu}: no number of devices divides rows={space.rows}, or no stage of "
            f"{tuple(space.stages)} supports offload=. Give rows that are a multiple of the devices, or other stages."
        )
    remat = "" if space.recompute else "recompute=True or a loss with remat, "
    nearest = min(tried, key=lambda c: c.peak / space.usable(c.devices))
    return (
        f"Nothing fits {among} {space.gpu}. The nearest is {nearest}, on {nearest.devices}: it needs "
        f"{format_bytes(nearest.peak)} per device, and {format_bytes(space.usable(nearest.devices))} may be used. "
        f"Give more devices, {remat}fewer rows, or an offload= that offloads more. With parameters on disk, which "
        f"zerojax.estimate counts, a device holds a few layers."
    )
