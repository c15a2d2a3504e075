"""`Plan`, what a compiled step would do on absent GPUs: memory by part, collectives, the least time; and its tables."""

import dataclasses
from typing import Any

from zerojax.inspect.collectives import Collectives
from zerojax.inspect.overlap import Overlap
from zerojax.inspect.roofline import Roofline
from zerojax.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step, compiled for absent GPUs.

    Attributes:
        topology: The GPUs, as `"h200:8"`.
        devices: Number of them.
        batch: Rows of the global batch; None if the leaves of a function's batch differ.
        memory: Bytes per device by part; `peak` is their sum. `temporary` are activations,
            gradients and gathered parameters; `results` are those that do not alias donated
            arguments.
        capacity: Bytes of a device's memory.
        usable: Of these, bytes that the program may take.
        overlap: Every collective, with the matrix products that hide it.
        roofline: The least time of a step, by its parts.
        sent_formula: Bytes a device sends in a step by the stage's formula; None if it is
            no step of zerojax, or the mesh has other axes.
        host: Bytes per device that are offloaded to host memory, by the estimate.
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
        """Most bytes on a device in a step."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within a device's usable memory."""
        return self.peak <= self.usable

    @property
    def collectives(self) -> Collectives:
        """Every collective of the program."""
        return Collectives(f.collective for f in self.overlap.in_flight)

    @property
    def sent(self) -> int:
        """Bytes a device sends in a step, over rings; a loop of unknown trip count counts as one iteration."""
        return self.collectives.moved(unknown_once=True).sent

    @property
    def exposed(self) -> int:
        """Of these, bytes that no matrix product hides."""
        return Collectives(f.collective for f in self.overlap.exposed).moved(unknown_once=True).sent

    @property
    def hidden(self) -> float:
        """Share of the collectives' bytes that matrix products hide."""
        return self.overlap.hidden_share

    @property
    def seconds(self) -> float:
        """Least time of a step, by the roofline."""
        return self.roofline.seconds

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON; without the program's text."""
        fields = dataclasses.asdict(dataclasses.replace(self, text="", overlap=Overlap(())))
        derived = {name: getattr(self, name) for name in ("peak", "fits", "sent", "exposed", "hidden", "seconds")}
        columns = ("kind", "dtype", "bytes", "sent", "group_size", "times", "op_name")
        listed = [
            {**{name: getattr(f.collective, name) for name in columns}, "products": f.products}
            for f in self.overlap.in_flight
        ]
        del fields["text"], fields["overlap"]
        return fields | derived | {"collectives": listed}

    def __str__(self) -> str:
        """Tables: memory, what is sent, time; then notes."""
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
        lines += ["time, at least", *(line(name, format_seconds(time)) for name, time in self._times().items())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _kinds(self) -> list[tuple[str, ...]]:
        """Collectives by kind and type: how often, how much, how much of it hidden."""
        rows = []
        for kind, dtype in dict.fromkeys((c.kind, c.dtype) for c in self.collectives):
            group = Overlap(tuple(f for f in self.overlap.of(kind).in_flight if f.collective.dtype == dtype))
            which = Collectives(f.collective for f in group.in_flight)
            times, sent = sum(c.times_if_once for c in which), which.moved(unknown_once=True).sent
            rows.append((f"{kind} {dtype}", f"{times:,}", format_bytes(sent), f"{group.hidden_share:.0%}"))
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
