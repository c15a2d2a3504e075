"""Simulate when a compiled program computes and communicates, at a device's peak or achievable rates.

Order and overlap come from the program, and durations from the roofline. Kernels run in order on one stream, and
collectives in order on another. The compute stream waits if the program reads the result of an incomplete collective.
If the device has a slowdown, matrix products run slower while a collective runs, because both use the same processors.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zerojax.gpus.devices import Device
from zerojax.inspect.compiled_collectives import Collective, CompiledCollectives, cause_of
from zerojax.inspect.hlo import HloCall, Instruction, Module, read
from zerojax.inspect.roofline import (
    FUSIONS,
    Kernel,
    Roofline,
    collective_seconds,
    is_kernel,
    kernels,
    overlap,
    roofline,
)

LANES = {"all-gather": "gather", "reduce-scatter": "reduce-scatter"}


@dataclass
class Span:
    """One kernel, collective or stall. Times are in seconds from the start of the program."""

    lane: str  # `"compute"`, `"gather"`, `"reduce-scatter"`, or `"other"` for other collectives
    # In the compute lane `"forward"` or `"backward"` for a kernel with matrix products, `"kernel"` for another kernel,
    # and `"waiting"` for a stall. In the other lanes `"hidden"` or `"exposed"`; see `Collective.products`.
    kind: str
    begin: float
    end: float
    done: float  # when the program reads the result of a collective; for kernels and stalls, `end`
    name: str  # the name of the HLO instruction


class LoopSpan(NamedTuple):
    """A loop of several iterations. One iteration is simulated, from `begin` to `end` in seconds."""

    begin: float
    end: float
    trip_count: int | None  # None if the program does not fix it


@dataclass(frozen=True)
class Expected:
    """The simulated run of a program at achievable rates."""

    roofline: Roofline  # the times of kernels and collectives, if none waited for or slowed another
    waits: float  # seconds that kernels wait for collectives
    slowed: float  # seconds by which matrix products take longer because collectives run

    @property
    def exposed(self) -> float:
        return self.waits + self.slowed

    @property
    def seconds(self) -> float:
        return self.roofline.kernels + self.exposed

    @classmethod
    def of(cls, module: Module, moved: CompiledCollectives, device: Device) -> "Expected":
        simulated = simulate(module, device)
        return cls(roofline(module, moved, device), sum(simulated.waits.values()), simulated.slowed)


def simulate(compiled: Any, device: Device) -> "Timeline":
    """Run a simulation of a compiled program on a device.

    Of a conditional, the longest branch is simulated, and of a loop, one iteration. If a collective starts before a
    loop and ends after it, the collective progresses during all iterations, but slows no product of the loop.
    """
    module = read(compiled)
    listed = {(c.computation, c.name): c for c in overlap(module)}
    timeline = Timeline(module, device, listed, {kernel.name: kernel for kernel in kernels(module)})
    for entry in module.entries:
        timeline.computation(entry)
    return timeline


@dataclass
class Timeline:
    """The simulated run of one program on a device, which has two streams."""

    module: Module
    device: Device
    collectives: dict[tuple[str, str], Collective]  # by computation and name
    kernels: dict[str, Kernel]
    spans: list[Span] = field(default_factory=list)  # kernels, stalls and collectives, in schedule order
    loops: list[LoopSpan] = field(default_factory=list)
    # Seconds over all iterations of loops (one if the trip count is unknown). `waits`: how long kernels wait, by leaf
    # or line of the awaited collective. `slowed`: how much longer products take because collectives run.
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    slowed: float = 0.0
    times: int = 1  # how often the computation that is simulated runs
    now: float = 0.0  # the time that the compute stream has reached
    link_free: float = 0.0  # when the last collective completes
    unslowed: float = 0.0  # the time until which collectives slow no product, because they began before a loop

    @property
    def seconds(self) -> float:
        return max((span.done for span in self.spans), default=0.0)

    def computation(self, name: str) -> None:
        pending: dict[str, tuple[Span, Collective]] = {}
        for i in self.module.computations[name].instructions:
            called = list(self.module.calls_of(i))
            if i.opcode.endswith(("-update", "-done")):
                awaited = pending.pop(i.operands[0], None)
                if awaited and i.opcode.endswith("-done"):
                    self.wait(*awaited)
                elif awaited:
                    pending[i.name] = awaited
            elif started := self.collective(name, i, called):
                span = self.start(started, i.name)
                if i.is_synchronous:
                    self.wait(span, started)
                else:
                    pending[i.name] = span, started
            elif i.opcode == "while":
                self.loop(i, called, [span for span, _ in pending.values()])
            elif i.opcode in ("call", "conditional"):
                length = lambda call: len(self.module.computations[call.callee].instructions)
                self.computation(max(called, key=length).callee)
            elif is_kernel(self.module, i):
                self.run(i)
        for span, _ in pending.values():
            span.done = max(self.now, span.end)

    def collective(self, computation: str, i: Instruction, called: list[HloCall]) -> Collective | None:
        """Return the collective that `i` starts. If `i` is a wrapper, the collective is in the called computation."""
        keys = [(computation, i.name)]
        if i.opcode == "async-start" or i.opcode in FUSIONS:
            keys += [(call.callee, inner) for call in called for inner in self.module.computations[call.callee].by_name]
        return next((self.collectives[key] for key in keys if key in self.collectives), None)

    def start(self, c: Collective, name: str) -> Span:
        begin = max(self.now, self.link_free)
        self.link_free = begin + collective_seconds(replace(c, times_if_once=1), self.device)
        kind = "hidden" if c.products else "exposed"
        self.spans.append(Span(LANES.get(c.kind, "other"), kind, begin, self.link_free, self.link_free, name))
        return self.spans[-1]

    def wait(self, span: Span, collective: Collective) -> None:
        if span.end > self.now:
            self.waits[cause_of(collective)] += (span.end - self.now) * self.times
            self.compute("waiting", span.end - self.now, span.name)
        span.done = self.now

    def run(self, i: Instruction) -> None:
        kernel = self.kernels[i.name]
        kind = "kernel" if not kernel.operations else "backward" if "transpose(" in i.op_name else "forward"
        seconds, slowdown = kernel.seconds(self.device), self.device.slowdown if kernel.operations else 0.0
        # A collective begins when it is issued, or when the previous one ends. So the link is busy until `link_free`.
        begin = max(self.now, self.unslowed)
        busy, work = max(0.0, self.link_free - begin), max(0.0, seconds - (begin - self.now))
        slowed = slowdown * min(work, busy / (1 + slowdown))
        self.slowed += slowed * self.times
        self.compute(kind, seconds + slowed, i.name)

    def compute(self, kind: str, seconds: float, name: str) -> None:
        begin, self.now = self.now, self.now + seconds
        self.spans.append(Span("compute", kind, begin, self.now, self.now, name))

    def loop(self, i: Instruction, called: list[HloCall], pending: Iterable[Span]) -> None:
        """Run one iteration of a loop. Collectives that began earlier also progress in the iterations not simulated."""
        body = next(call for call in called if call.callee == dict(i.callees)["body"])
        begin, unslowed, times = self.now, self.unslowed, self.times
        self.unslowed, self.times = max(unslowed, self.link_free), times * body.trips
        self.computation(body.callee)
        self.unslowed, self.times = unslowed, times
        if body.trip_count != 1:
            self.loops.append(LoopSpan(begin, self.now, body.trip_count))
        skipped = (body.trips - 1) * (self.now - begin)
        earlier = lambda time: min(time, max(self.now, time - skipped))
        for span in pending:
            span.begin, span.end = earlier(span.begin), earlier(span.end)
        self.link_free = earlier(self.link_free)
