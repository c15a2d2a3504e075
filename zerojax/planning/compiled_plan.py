"""What a compiled step would do on a GPU: memory by part, collectives and what hides them, time at least."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zerojax.gpus.devices import USABLE, Device
from zerojax.gpus.topology import IN_A_HOST, Topology
from zerojax.inspect.collectives import Collectives, arrays_of
from zerojax.inspect.hlo import Module, read
from zerojax.inspect.overlap import Overlap, overlap
from zerojax.inspect.roofline import Roofline, roofline
from zerojax.planning.activations import memory_of
from zerojax.planning.estimate import in_words

# Whatever is an argument of the program, by the name its parameter has there.
STATE_PARTS = {
    "state.params": "parameters",
    "state.opt_state.master": "master weights",
    "state.opt_state": "optimizer state",
    "state": "other state",
}
TEMPORARY, RESULTS = "temporary", "results"
PATIENCE = 8  # peaks after which a straight line is given up for halving


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step, compiled for GPUs that are not there.

    Attributes:
        topology: The GPUs, as `"h200:8"`.
        devices: How many.
        batch: Rows of the global batch; None if its leaves differ.
        memory: Bytes per device by part; together they are `peak`. `temporary` are
            activations, gradients and gathered parameters; `results` is what the program
            returns beside what it writes over its arguments.
        capacity: Bytes of a device's memory.
        usable: Of these, what the program may take.
        overlap: Every collective, with the matrix products that hide it.
        roofline: How long a step takes at least, and why.
        sent_formula: Bytes a device sends in a step by the stage's formula; None if it is
            no step of zerojax, or the mesh has other axes.
        host: Bytes that wait in host memory, for each device, by the estimate.
        disk: The same, on disk.
        largest_batch: Rows of the largest global batch that fits, 0 if none does; None if it was not asked for.
        notes: What these figures do not show, in sentences.
        text: The compiled program; HLO.
    """

    topology: str
    devices: int
    batch: int | None
    memory: dict[str, int]
    capacity: int
    usable: int
    overlap: Overlap
    roofline: Roofline
    sent_formula: float | None = None
    host: int = 0
    disk: int = 0
    largest_batch: int | None = None
    notes: tuple[str, ...] = ()
    text: str = dataclasses.field(default="", repr=False)

    @property
    def peak(self) -> int:
        """Bytes a device needs at most."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a device's usable memory suffices."""
        return self.peak <= self.usable

    @property
    def collectives(self) -> Collectives:
        """Every collective of the program."""
        return Collectives(flight.collective for flight in self.overlap.flights)

    @property
    def sent(self) -> int:
        """Bytes a device sends in a step, over rings; a loop of unknown turns counts as one."""
        return self.collectives.moved(unknown_once=True).sent

    @property
    def exposed(self) -> int:
        """Of these, bytes with no matrix product in flight."""
        return Collectives(flight.collective for flight in self.overlap.exposed).moved(unknown_once=True).sent

    @property
    def hidden(self) -> float:
        """Share of the collectives' bytes with a matrix product in flight."""
        return self.overlap.hidden_share

    @property
    def seconds(self) -> float:
        """How long a step takes at least, by the roofline."""
        return self.roofline.seconds

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON; without the program's text."""
        fields = dataclasses.asdict(dataclasses.replace(self, text="", overlap=Overlap(())))
        found = {name: getattr(self, name) for name in ("peak", "fits", "sent", "exposed", "hidden", "seconds")}
        said = ("kind", "dtype", "bytes", "sent", "group_size", "times", "op_name")
        moves = [
            {**{name: getattr(flight.collective, name) for name in said}, "products": flight.products}
            for flight in self.overlap.flights
        ]
        del fields["text"], fields["overlap"]
        return fields | found | {"collectives": moves}

    def __str__(self) -> str:
        """Tables: memory, what is sent, time; then notes."""
        line = lambda name, *words: f"  {name:24s}" + "".join(f"{word:>12s}" for word in words)
        verdict = f"  of {in_words(self.usable)} usable: {'fits' if self.fits else 'does not fit'}"
        rows = "" if self.batch is None else f", {self.batch:,} rows"
        lines = [f"{self.topology}: {self.devices} devices{rows}", "memory, per device"]
        lines += [line(part, in_words(size)) for part, size in self.memory.items() if size]
        lines.append(line("peak", in_words(self.peak)) + verdict)
        is_on_host = {"waits on the host": self.host, "waits on disk": self.disk}
        lines += [line(name, in_words(size)) for name, size in is_on_host.items() if size]
        if self.largest_batch is not None:
            lines.append(line("largest batch", f"{self.largest_batch:,}") + "  rows")
        if self.collectives:
            formula = "" if self.sent_formula is None else f"  formula {in_words(self.sent_formula)}"
            lines += ["sent, per device and step", line("", "times", "sent", "hidden")]
            lines += [line(*row) for row in self._kinds()]
            lines.append(line("all", "", in_words(self.sent), f"{self.hidden:.0%}") + formula)
        lines += ["time, at least", *(line(name, duration(at)) for name, at in self._times().items())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _kinds(self) -> list[tuple[str, ...]]:
        """Collectives by kind and type: how often, how much, how much of it hidden."""
        rows = []
        for kind, dtype in dict.fromkeys((c.kind, c.dtype) for c in self.collectives):
            group = Overlap(tuple(f for f in self.overlap.of(kind).flights if f.collective.dtype == dtype))
            which = Collectives(f.collective for f in group.flights)
            times, sent = sum(c.times_if_once for c in which), which.moved(unknown_once=True).sent
            rows.append((f"{kind} {dtype}", f"{times:,}", in_words(sent), f"{group.hidden_share:.0%}"))
        return rows

    def _times(self) -> dict[str, float]:
        r = self.roofline
        return {
            "matrix products": r.products,
            "memory traffic": r.memory,
            "kernels": r.kernels,
            "communication": r.communication,
            "of which exposed": r.exposed,
            "step": r.seconds,
        }


def duration(seconds: float) -> str:
    """A time in three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def planned(
    compiled: Any,
    topology: str,
    device: Device,
    *,
    memory: float | None = None,
    parts: Mapping[str, str] = MappingProxyType({}),
    notes: Sequence[str] = (),
    **known: Any,
) -> Plan:
    """Read a plan off a compiled program.

    Args:
        compiled: What `jax.jit(f).lower(...).compile()` gives.
        topology: As `Topology.parse` reads it.
        device: One of its GPUs.
        memory: Bytes of a device that the program may take. Default: 95% of what there is.
        parts: Names for arguments by how their names in the program begin, of which the
            longest decides; the others are called as the function calls them.
        notes: What the figures do not show, beside what is seen here.
        **known: Fields of `Plan` that the program does not say.

    Returns:
        The plan.
    """
    module = read(compiled)
    flights = overlap(module.text)
    found = roofline(module, flights, device)
    return Plan(
        topology=topology,
        devices=Topology.parse(topology).size,
        memory=memory_parts(module, memory_of(compiled), parts),
        capacity=device.memory,
        usable=int(USABLE * device.memory if memory is None else memory),
        overlap=flights,
        roofline=found,
        notes=(*notes, *unseen(module, found, flights, Topology.parse(topology))),
        text=module.text,
        **known,
    )


def unseen(module: Module, found: Roofline, flights: Overlap, topology: Topology) -> Iterator[str]:
    """What the figures of a program do not show."""
    moves = [flight.collective for flight in flights.flights]
    if found.unknown:
        yield f"The operations of {', '.join(found.unknown)} are not counted."
    if topology.hosts > 1 and any(1 < c.group_size <= topology.devices for c in moves):
        yield f"Collectives of at most {topology.devices} devices are taken to stay within a machine."
    if topology.devices > IN_A_HOST:
        yield (
            f"{topology.devices} devices are taken to be one machine, though machines have {IN_A_HOST}: between two "
            f"the links are slower. Give machines x devices, such as {topology.kind}:2x{-(-topology.devices // 2)}."
        )
    if any(count.conditional for count in module.executions.values()):
        yield "Of a conditional every branch is counted as executed."
    if not all(count.known for count in module.executions.values()):
        yield "A loop whose number of turns the program does not fix is counted as one turn."


def peak_of(compiled: Any) -> int:
    """Bytes a device needs: arguments, results that are not written over them, and what is temporary."""
    found = memory_of(compiled)
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + results + found.temp_size_in_bytes


def memory_parts(module: Module, found: Any, parts: Mapping[str, str]) -> dict[str, int]:
    """Bytes by part; they add up to `peak_of`."""
    sizes = Counter[str]()
    entry = module.computations[module.entries[0]].instructions
    for i in sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.literal)):
        name = re.search(r'op_name="([^"]*)"', i.rest)
        sizes[part_of(name[1] if name else "", parts)] += sum(array.bytes for array in arrays_of(i.shape))
    sizes["other arguments"] += found.argument_size_in_bytes - sizes.total()  # the compiler's own, and alignment
    order = dict.fromkeys([*parts.values(), *(part for part in sizes if part not in (TEMPORARY, RESULTS))])
    ordered = {part: sizes[part] for part in order if sizes[part]}
    # An argument may be called like one of these.
    sizes[TEMPORARY] += found.temp_size_in_bytes
    sizes[RESULTS] += found.output_size_in_bytes - found.alias_size_in_bytes
    return {**ordered, TEMPORARY: sizes[TEMPORARY], RESULTS: sizes[RESULTS]}


def part_of(name: str, parts: Mapping[str, str]) -> str:
    """What an argument is called: by the longest beginning of its name that has one, else as the function calls it."""
    for start in sorted(parts, key=len, reverse=True):
        if re.match(rf"{re.escape(start)}(?![\w])", name):
            return parts[start]
    return re.match(r"\w*", name)[0] or "other arguments"  # pyright: ignore[reportOptionalSubscript]


def largest_that_fits(peak: Callable[[int], float], usable: float, *, start: int) -> int:
    """The largest round count whose peak is at most `usable`.

    Peaks grow almost in a straight line over round counts; over others they jump, as the
    compiler pads. So the next guess is where the line through the two peaks nearest to
    the limit meets it. It ends at two neighbours of which one fits and one does not, both
    of them asked for.

    Args:
        peak: Bytes for a count of at least 1; costs a compilation.
        usable: Bytes.
        start: The first guess; at least 1, need not be round.

    Returns:
        The count; 0 if even 1 does not fit.
    """
    known: dict[int, float] = {}
    below, above, guess = 0, None, start
    while above is None or above > after(below):
        known[guess] = peak(guess)
        below, above = (guess, above) if known[guess] <= usable else (below, guess)
        guess = next_guess(known, usable, below, above)
    return below


def next_guess(known: dict[int, float], usable: float, below: int, above: int | None) -> int:
    """A round count between one that fits and one that does not, or is not known."""
    guess = 8 * below if above is None else (below + above) // 2
    if 2 <= len(known) <= PATIENCE:
        (a, x), (b, y) = sorted(sorted(known.items(), key=lambda item: abs(item[1] - usable))[:2])
        guess = int(a + (usable - x) * (b - a) / (y - x)) if y > x else guess
    most = rounded(64 * below if above is None else above - 1)
    return min(max(rounded(max(guess, 0)), after(below)), max(most, 1))


def rounded(count: int) -> int:
    """The largest round count that is not above a count: round are those of five binary digits and zeros."""
    tail = max(0, count.bit_length() - 5)
    return count >> tail << tail


def after(count: int) -> int:
    """The round count that follows."""
    return rounded(count) + (1 << max(0, count.bit_length() - 5))
