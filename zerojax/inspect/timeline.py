"""A compiled program's schedule, played: what computes and what moves when, at a device's peak rates.

The order of the work, and what overlaps what, are the program's own; the durations are a
roofline's. Kernels run one after another, collectives one after another beside them, and the
kernels wait where the program needs what has not moved yet.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from zerojax.gpus.devices import Device
from zerojax.inspect.hlo import Call, Instruction, Module, read
from zerojax.inspect.overlap import Flight, overlap
from zerojax.inspect.roofline import FUSIONS, Kernel, kernels, launches, sending_seconds

LANES = {"all-gather": "gather", "reduce-scatter": "reduce-scatter"}


@dataclass
class Span:
    """One piece of work; times in seconds from the start of the program.

    Attributes:
        lane: `"compute"`, `"gather"`, `"reduce-scatter"`, or `"other"` for other collectives.
        kind: In the compute lane `"forward"` and `"backward"` for kernels with matrix products,
            `"kernel"` for those without, `"waiting"` for none; else `"hidden"` for a collective
            with a product between its start and its done, `"exposed"` for one without.
        begin: When it begins.
        end: When it ends.
        done: Of a collective, when the program takes its result: from `end` on it was free to.
        name: Its HLO instruction.
    """

    lane: str
    kind: str
    begin: float
    end: float
    done: float
    name: str


@dataclass(frozen=True)
class Loop:
    """A loop, played for one turn.

    Attributes:
        begin: When its turn begins, in seconds.
        end: When it ends.
        turns: How many there are; None if the program does not fix it.
        depth: How many loops are around it.
    """

    begin: float
    end: float
    turns: int | None
    depth: int


@dataclass(frozen=True)
class Timeline:
    """One program on a device.

    Attributes:
        spans: Kernels, waiting and collectives, in schedule order.
        loops: Those of more than one turn.
        hidden_share: Of the bytes of all collectives and turns, those with a product in flight.
    """

    spans: tuple[Span, ...]
    loops: tuple[Loop, ...]
    hidden_share: float

    @property
    def seconds(self) -> float:
        """When the last piece of work ends, with one turn of each loop."""
        return max((span.done for span in self.spans), default=0.0)


def play(compiled: Any, device: Device) -> Timeline:
    """Play a compiled program on two queues, one for kernels and one for collectives.

    Of a conditional the branch of most lines is played, of a loop one turn. What is in flight around
    a loop moves during all of its turns.

    Args:
        compiled: What `jax.jit(f).lower(...).compile()` gives, or its HLO text.
        device: What it would run on.

    Returns:
        The pieces of work.

    Raises:
        TypeError: If `compiled` is no compiled program.
        ValueError: If the text is not HLO, is cut, or is not scheduled.
    """
    module, found = read(compiled), overlap(compiled)
    flights = {(f.collective.computation, f.collective.name): f for f in found.flights}
    player = _Player(module, device, flights, {kernel.name: kernel for kernel in kernels(module)})
    for entry in module.entries:
        player.play(entry, depth=0)
    return Timeline(tuple(player.spans), tuple(player.loops), found.hidden_share)


def coarser(spans: Iterable[Span], finest: float) -> list[Span]:
    """What can be seen of one lane: pieces of work too short for it put together with those that follow.

    Args:
        spans: Of one lane, in order.
        finest: The shortest time that can be seen, in seconds.

    Returns:
        Spans of at least that; of what is put together, the kind that takes most of the time names it.
    """
    seen, few = [], list[Span]()
    for span in [*spans, None]:
        apart = span is None or span.end - span.begin >= finest or (few and span.begin - few[-1].end >= finest)
        if few and (apart or few[-1].end - few[0].begin >= finest):
            times: dict[str, float] = {}
            for short in few:
                times[short.kind] = times.get(short.kind, 0.0) + short.end - short.begin
            end = max(few[-1].end, few[0].begin + finest)
            seen.append(replace(few[0], kind=max(times, key=times.__getitem__), end=end, done=max(end, few[-1].done)))
            few = []
        if span is not None and span.end - span.begin >= finest:
            seen.append(span)
        elif span is not None:
            few.append(span)
    return seen


@dataclass
class _Player:
    """The two queues: `now` is how far the kernels are, `moved` when the last collective will have moved."""

    module: Module
    device: Device
    flights: dict[tuple[str, str], Flight]
    kernels: dict[str, Kernel]
    spans: list[Span] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    now: float = 0.0
    moved: float = 0.0

    def play(self, computation: str, *, depth: int) -> None:
        """Play one computation from its first line to its last."""
        calls: dict[str, list[Call]] = {}
        for call in self.module.calls[computation]:
            calls.setdefault(call.instruction.name, []).append(call)
        flying: dict[str, Span] = {}
        for i in self.module.computations[computation].instructions:
            called = calls.get(i.name, [])
            if i.opcode.endswith(("-update", "-done")):
                span = flying.pop(i.operands[0], None)
                if span and i.opcode.endswith("-done"):
                    self.wait(span)
                elif span:
                    flying[i.name] = span
            elif flight := self.flight(computation, i, called):
                span = self.send(flight, i.name)
                if i.synchronous:
                    self.wait(span)
                else:
                    flying[i.name] = span
            elif i.opcode == "while":
                self.loop(i, called, flying.values(), depth)
            elif i.opcode in ("call", "conditional"):
                length = lambda call: len(self.module.computations[call.callee].instructions)
                self.play(max(called, key=length).callee, depth=depth)
            elif launches(self.module, i):
                self.run(i)
        for span in flying.values():
            span.done = max(self.now, span.end)

    def flight(self, computation: str, i: Instruction, called: list[Call]) -> Flight | None:
        """The collective that an instruction is or, as an asynchronous start or a fusion, wraps."""
        keys = [(computation, i.name)]
        if i.opcode == "async-start" or i.opcode in FUSIONS:
            keys += [(call.callee, inner) for call in called for inner in self.module.computations[call.callee].by_name]
        return next((self.flights[key] for key in keys if key in self.flights), None)

    def send(self, flight: Flight, name: str) -> Span:
        """Put a collective at the end of the link's queue."""
        begin, c = max(self.now, self.moved), flight.collective
        self.moved = begin + sending_seconds(replace(c, times_if_once=1), self.device)
        kind = "hidden" if flight.products else "exposed"
        self.spans.append(Span(LANES.get(c.kind, "other"), kind, begin, self.moved, self.moved, name))
        return self.spans[-1]

    def wait(self, span: Span) -> None:
        """Go on when a collective has moved."""
        if span.end > self.now:
            self.compute("waiting", span.end - self.now, span.name)
        span.done = self.now

    def run(self, i: Instruction) -> None:
        """Run a kernel."""
        kernel = self.kernels[i.name]
        backward = re.search(r'op_name="[^"]*transpose\(', i.rest)
        kind = "kernel" if not kernel.operations else "backward" if backward else "forward"
        self.compute(kind, kernel.seconds(self.device), i.name)

    def compute(self, kind: str, seconds: float, name: str) -> None:
        """Spend time in the compute lane."""
        begin, self.now = self.now, self.now + seconds
        self.spans.append(Span("compute", kind, begin, self.now, self.now, name))

    def loop(self, i: Instruction, called: list[Call], flying: Iterable[Span], depth: int) -> None:
        """Play one turn; what is in flight around the loop moves during the others, too."""
        found = re.search(r"\bbody=%?([\w.\-]+)", i.attributes)
        body = next(call for call in called if found and call.callee == found[1])
        begin = self.now
        self.play(body.callee, depth=depth + 1)
        if body.turns != 1:
            self.loops.append(Loop(begin, self.now, body.turns, depth))
        others = ((body.turns or 1) - 1) * (self.now - begin)
        after = lambda time: min(time, max(self.now, time - others))
        for span in flying:
            span.begin, span.end = after(span.begin), after(span.end)
        self.moved = after(self.moved)
