"""Read the memory, collectives and least time of a compiled step into a `Plan`, which prints as tables."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from zerojax.gpus.devices import SCHEDULED, USABLE, Device
from zerojax.gpus.topology import GPUS_PER_HOST, Topology
from zerojax.inspect.collectives import Collective, CompiledCollectives, arrays_of, cause_of
from zerojax.inspect.hlo import Module, read
from zerojax.inspect.memory import memory_analysis
from zerojax.inspect.overlap import Overlap, overlap
from zerojax.inspect.roofline import Roofline, roofline
from zerojax.inspect.timeline import simulate
from zerojax.units import format_bytes, format_seconds

DERIVED = ("peak", "fits", "sent", "across_hosts", "exposed", "hidden", "waiting", "seconds")
MOST_WAITS = 3
# The share of the limit of XLA's scheduler from which a plan warns.
NEAR = 0.9
TIMES = {"matrix products": "products", "memory traffic": "memory", "kernels": "kernels"}
TIMES |= {"communication": "communication", "of which exposed": "exposed", "step": "seconds"}
# The part of memory that an argument of a step belongs to, by prefix of the argument's name in the program.
STATE_PARTS = {
    "state.params": "parameters",
    "state.opt_state.master": "master weights",
    "state.opt_state": "optimizer state",
    "state.rounding_errors": "rounding errors",
    "state": "other state",
}
TEMPORARY, RESULTS, OTHER = "temporary", "results", "other arguments"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The figures of a step that was compiled for GPUs, which this machine need not have.

    Attributes:
        topology: The GPUs, such as `"h200:8"`.
        devices: Number of GPUs.
        batch: Rows of the global batch. None if the leaves of a function's batch have different numbers of rows.
        memory: Bytes per device by part. `peak` is the sum of all parts. `temporary` has activations, gradients and
            gathered parameters. `results` has the results that do not reuse the memory of donated arguments.
        capacity: Bytes of a device's memory.
        usable: Bytes of a device's memory that the program may take.
        overlap: Every collective, with the number of matrix products that run during the collective.
        roofline: The least time of a step, and its parts.
        waits: Seconds that kernels wait for collectives in a step, by the collective's leaf and line, the longest
            first. The waits are simulated with the speeds of `roofline`.
        sent_formula: Bytes that a device sends per step by the stage's formula. None if the program is not a step of
            zerojax, or the mesh has axes that do not divide the batch.
        host: Bytes per device in host memory, as `estimate` computes them.
        disk: Bytes per device on disk, as `estimate` computes them.
        largest_batch: Rows of the largest global batch that fits; 0 if no batch fits. None without a search.
        notes: Sentences about effects that these figures leave out.
        text: The compiled program, as HLO text.
    """

    topology: str
    devices: int
    batch: int | None
    memory: dict[str, int]
    capacity: int
    usable: int
    overlap: Overlap
    roofline: Roofline
    waits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sent_formula: float | None = None
    host: int = 0
    disk: int = 0
    largest_batch: int | None = None
    notes: tuple[str, ...] = ()
    text: str = dataclasses.field(default="", repr=False)

    @property
    def peak(self) -> int:
        """Return the peak bytes per device in a step."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Return whether the peak is within a device's usable memory."""
        return self.peak <= self.usable

    @property
    def collectives(self) -> CompiledCollectives:
        """Return every collective of the program."""
        return CompiledCollectives(f.collective for f in self.overlap.in_flight)

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends per step in rings. A loop of unknown length counts as one iteration."""
        return self.collectives.moved(unknown_once=True).sent

    @property
    def exposed(self) -> int:
        """Return the part of `sent` that no matrix product hides."""
        return CompiledCollectives(f.collective for f in self.overlap.exposed).moved(unknown_once=True).sent

    @property
    def across_hosts(self) -> int:
        """Return the part of `sent` in collectives whose groups have devices of several hosts."""
        per_host = Topology.parse(self.topology).per_host
        across = CompiledCollectives(c for c in self.collectives if _spans_hosts(c, per_host))
        return across.moved(unknown_once=True).sent

    @property
    def hidden(self) -> float:
        """Return the share of the collectives' bytes that matrix products hide."""
        return self.overlap.hidden_share

    @property
    def waiting(self) -> float:
        """Return the share of the simulated step in which kernels wait for collectives."""
        waits = sum(self.waits.values())
        return waits / (self.roofline.kernels + waits) if waits else 0.0

    @property
    def seconds(self) -> float:
        """Return the least time of a step, by the roofline."""
        return self.roofline.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as values for JSON, without the program's text."""
        fields = dataclasses.asdict(dataclasses.replace(self, text="", overlap=Overlap(())))
        derived = {name: getattr(self, name) for name in DERIVED}
        columns = ("kind", "dtype", "bytes", "sent", "group_size", "times", "op_name")
        listed = [
            {**{name: getattr(f.collective, name) for name in columns}, "products": f.products}
            for f in self.overlap.in_flight
        ]
        del fields["text"], fields["overlap"]
        return fields | derived | {"collectives": listed}

    def __str__(self) -> str:
        """Return tables of memory, bytes sent, and time, followed by the notes."""
        line = lambda name, *cells: f"  {name:24s}" + "".join(f"{cell:>12s}" for cell in cells)
        verdict = f"  of {format_bytes(self.usable)} usable: {'fits' if self.fits else 'does not fit'}"
        rows = "" if self.batch is None else f", {self.batch:,} rows"
        lines = [f"{self.topology}: {self.devices} devices{rows}", "memory, per device"]
        lines += [line(part, format_bytes(size)) for part, size in self.memory.items() if size]
        lines.append(line("peak", format_bytes(self.peak)) + verdict)
        offloaded = {"in host memory": self.host, "on disk": self.disk}
        lines += [line(name, format_bytes(size)) for name, size in offloaded.items() if size]
        if self.largest_batch is not None:
            lines.append(line("largest batch", f"{self.largest_batch:,}") + "  rows")
        if self.collectives:
            formula = "" if self.sent_formula is None else f"  formula {format_bytes(self.sent_formula)}"
            lines += ["sent, per device and step", line("", "times", "sent", "hidden")]
            lines += [line(*row) for row in self._kinds()]
            lines.append(line("all", "", format_bytes(self.sent), f"{self.hidden:.0%}") + formula)
        lines.append("time, at least")
        lines += [line(name, format_seconds(getattr(self.roofline, part))) for name, part in TIMES.items()]
        if self.waits:
            most = ", ".join(f"{cause} {format_seconds(time)}" for cause, time in list(self.waits.items())[:MOST_WAITS])
            waits = line("kernels wait", format_seconds(sum(self.waits.values())))
            lines.append(f"{waits}  {self.waiting:.1%}: {most}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _kinds(self) -> list[tuple[str, ...]]:
        """Return table rows with count, bytes and hidden share, by kind and type of collective, in and across hosts."""
        topology, groups = Topology.parse(self.topology), dict[tuple, list]()
        for f in self.overlap.in_flight:
            between = topology.hosts > 1 and _spans_hosts(f.collective, topology.per_host)
            groups.setdefault((f.collective.kind, f.collective.dtype, between), []).append(f)
        rows = []
        for (kind, dtype, between), members in groups.items():
            group, which = Overlap(tuple(members)), CompiledCollectives(f.collective for f in members)
            times, sent = sum(c.times_if_once for c in which), which.moved(unknown_once=True).sent
            name = f"{kind} {dtype}" + ", hosts" * between
            rows.append((name, f"{times:,}", format_bytes(sent), f"{group.hidden_share:.0%}"))
        return rows


def _spans_hosts(c: Collective, per_host: int) -> bool:
    """Return whether a collective's group has devices of several hosts."""
    return len({device // per_host for device in c.group}) > 1


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Facts about a step that cannot be read from its compiled program. See `Plan` for most attributes.

    `parts` maps a prefix of an argument's name in the program to a part of `Plan.memory`. The longest prefix decides.
    """

    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sent_formula: float | None = None
    host: int = 0
    disk: int = 0
    notes: tuple[str, ...] = ()


def read_plan(
    compiled: Any,
    topology: str,
    device: Device,
    facts: StepFacts = StepFacts(),
    *,
    batch: int | None,
    usable: float | None = None,
    largest_batch: int | None = None,
) -> Plan:
    """Read a plan from a compiled program. See `Plan` for the arguments.

    `device` is one GPU of the topology. By default, 95% of its memory is usable.
    """
    module, analysis = read(compiled), memory_analysis(compiled)
    gpus, hiding = Topology.parse(topology), overlap(module.text)
    figures = roofline(module, hiding, device)
    return Plan(
        topology=topology,
        devices=gpus.size,
        batch=batch,
        memory=memory_by_part(module, analysis, facts.parts),
        capacity=device.memory,
        usable=int(USABLE * device.memory if usable is None else usable),
        overlap=hiding,
        roofline=figures,
        waits=waits_by_cause(module, device),
        sent_formula=facts.sent_formula,
        host=facts.host,
        disk=facts.disk,
        largest_batch=largest_batch,
        notes=(*facts.notes, *limitations(module, figures.unknown, gpus), *near_limit(analysis, device)),
        text=module.text,
    )


def waits_by_cause(module: Module, device: Device) -> dict[str, float]:
    """Return the seconds per step that kernels wait for collectives, by cause of the collective, longest first."""
    waits = Counter[str]()
    for collective, seconds in simulate(module.text, device).waits.items():
        waits[cause_of(collective)] += seconds  # pyright: ignore[reportArgumentType]
    return dict(waits.most_common())


def limitations(module: Module, unknown: tuple[str, ...], gpus: Topology) -> Iterator[str]:
    """Yield sentences about effects that the figures of a program leave out."""
    if unknown:
        yield f"The FLOPs of {', '.join(unknown)} are not counted."
    if gpus.per_host > GPUS_PER_HOST:
        yield (
            f"{gpus.per_host} devices count as one host, although hosts have {GPUS_PER_HOST}, and links between hosts "
            f"are slower. Give hosts x devices, such as {gpus.kind}:2x{-(-gpus.per_host // 2)}."
        )
    if any(count.conditional for count in module.executions.values()):
        yield "Of a conditional, every branch is counted as executed."
    if not all(count.known for count in module.executions.values()):
        yield "A loop of unknown trip count is counted as one iteration."


def near_limit(analysis: Any, device: Device) -> Iterator[str]:
    """Yield a sentence if the temporary memory is near or above the limit of XLA's scheduler."""
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    limit, temporary = USABLE * (SCHEDULED * device.memory - held), analysis.temp_size_in_bytes
    if temporary > NEAR * limit:
        yield (
            f"The limit of XLA's scheduler is {format_bytes(max(limit, 0))} of temporary memory, and this program has "
            f"{format_bytes(temporary)}. Above the limit XLA recomputes values on its own and hides fewer collectives; "
            f"the figures above include this."
        )


def memory_by_part(module: Module, analysis: Any, parts: Mapping[str, str]) -> dict[str, int]:
    """Return bytes per device by part. Their sum equals `peak_bytes`."""
    sizes = Counter[str]()
    entry = module.computations[module.entries[0]].instructions
    for i in sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.literal)):
        name = re.search(r'op_name="([^"]*)"', i.rest)
        sizes[part_of(name[1] if name else "", parts)] += sum(array.bytes for array in arrays_of(i.shape))
    sizes[OTHER] += analysis.argument_size_in_bytes - sizes.total()  # arguments that the compiler adds, and alignment
    order = dict.fromkeys([*parts.values(), *(part for part in sizes if part not in (TEMPORARY, RESULTS))])
    ordered = {part: sizes[part] for part in order if sizes[part]}
    # These bytes are added, not set, because an argument may be called "temporary" or "results".
    sizes[TEMPORARY] += analysis.temp_size_in_bytes
    sizes[RESULTS] += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {**ordered, TEMPORARY: sizes[TEMPORARY], RESULTS: sizes[RESULTS]}


def part_of(argument: str, parts: Mapping[str, str]) -> str:
    """Return the part for the longest prefix of `argument` in `parts`. If none matches, return the argument's name."""
    for prefix in sorted(parts, key=len, reverse=True):
        if re.match(rf"{re.escape(prefix)}(?![\w])", argument):
            return parts[prefix]
    return re.match(r"\w*", argument)[0] or OTHER  # pyright: ignore[reportOptionalSubscript]
