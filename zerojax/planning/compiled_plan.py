"""Read the memory, collectives and least time of a compiled step into a `Plan`, whose text begins with a verdict."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from zerojax.budget.blocks import BlockMemory, table_lines
from zerojax.gpus.devices import GPUS_PER_HOST, SCHEDULED, USABLE, Device, Rates, Topology
from zerojax.inspect.compiled_collectives import Collective, CompiledCollectives
from zerojax.inspect.hlo import Module, memory_analysis, peak_bytes, read
from zerojax.inspect.roofline import Roofline, overlap, roofline
from zerojax.inspect.timeline import Expected, simulate
from zerojax.planning.stage_bytes import StageEstimate
from zerojax.streaming.stores import IN_FLIGHT, chunk_bytes
from zerojax.streaming.stream import StreamedUpdate
from zerojax.units import format_bytes, format_seconds

DERIVED = "verdict peak fits sent across_hosts exposed hidden waiting seconds expected_seconds".split()
EXPECTED = ("seconds", "exposed", "waits", "slowed")
MOST_WAITS = 3
USUAL = Rates()
TIMES = {"matrix products": "products", "memory traffic": "memory", "kernels": "kernels"}
TIMES |= {"communication": "communication", "of which exposed": "exposed"}
# The part of memory that an argument of a step belongs to, by prefix of the argument's name in the program.
STATE_PARTS = {
    "state.params": "parameters",
    "state.opt_state.master": "master weights",
    "state.opt_state": "optimizer state",
    "state": "other state",
}
TEMPORARY, RESULTS, OTHER = "temporary", "results", "other arguments"
KEPT = "offloaded state kept"
# A plan has a note if the temporary memory exceeds this share of the limit of XLA's scheduler.
NEAR = 0.9


@dataclasses.dataclass(frozen=True)
class Plan:
    """The figures of a step that was compiled for GPUs, which this machine need not have.

    Attributes:
        topology: The GPUs, such as `"h200:8"`.
        devices: Number of GPUs.
        stage: ZeRO stage. None for a function.
        batch: Rows of the global batch. None if the leaves of a function's batch have different numbers of rows.
        memory: Bytes per device by part. `peak` is the sum of all parts. `temporary` has activations, gradients and
            gathered parameters. `results` has the results that do not reuse the memory of donated arguments.
        capacity: Bytes of a device's memory.
        usable: Bytes of a device's memory that the program may take.
        collectives: Every collective, with the number of matrix products that run during the collective.
        roofline: The least time of a step at peak rates, and its parts.
        expected: The expected time of a step, which is simulated at achievable rates, and its parts. Its `exposed` is
            the time by which collectives lengthen the step.
        rates: A sentence that says which rates count as achievable.
        waits: Seconds that kernels wait for collectives in a step, by the collective's leaf and line, the longest
            first. The waits are simulated at peak rates.
        sent_formula: Bytes that a device sends per step by the stage's formula. None if the program is not a step of
            zerojax, or the mesh has axes that do not divide the batch.
        host: Bytes per device in host memory, as `estimate` computes them.
        disk: Bytes per device on disk, as `estimate` computes them.
        update: Seconds per step, after the gradients, in which offloaded state is copied to the device, updated and
            copied back. They follow from the state's bytes and the rates `host_link` (in each direction) and `disk` (if
            given). 0 if all state stays on the device, or if the host updates the state.
        largest_batch: Rows of the largest global batch that fits; 0 if no batch fits. None without a search.
        blocks: What each block of the loss saves, offloads and recomputes. A block is a scan, a function marked with
            `zerojax.block`, or a call of a `jax.checkpoint` or `zerojax.remat_within`. Empty for a function.
        notes: Sentences about effects that the figures of this plan leave out, and advice.
        updates: One line per group of offloaded state, and per set of matrices that owners update.
        compiler_options: The options of XLA with which the step was compiled, by name: the user's, or else the default
            options for the mesh.
        text: The compiled program, as HLO text.
    """

    topology: str
    devices: int
    batch: int | None
    memory: dict[str, int]
    capacity: int
    usable: int
    collectives: CompiledCollectives
    roofline: Roofline
    expected: Expected
    stage: int | None = None
    rates: str = ""
    waits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sent_formula: float | None = None
    host: int = 0
    disk: int = 0
    update: float = 0.0
    largest_batch: int | None = None
    blocks: tuple[BlockMemory, ...] = ()
    notes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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
    def sent(self) -> int:
        """Return the bytes that a device sends per step in rings. A loop of unknown length counts as one iteration."""
        return self.collectives.moved(unknown_once=True).sent

    @property
    def exposed(self) -> int:
        """Return the part of `sent` that no matrix product hides."""
        return self.collectives.exposed.moved(unknown_once=True).sent

    @property
    def across_hosts(self) -> int:
        """Return the part of `sent` in collectives whose groups have devices of several hosts."""
        per_host = Topology.parse(self.topology).per_host
        across = CompiledCollectives(c for c in self.collectives if _spans_hosts(c, per_host))
        return across.moved(unknown_once=True).sent

    @property
    def hidden(self) -> float:
        """Return the share of the collectives' bytes that matrix products hide."""
        return self.collectives.hidden_share

    @property
    def waiting(self) -> float:
        """Return the share of the step, simulated at peak rates, in which kernels wait for collectives."""
        waits = sum(self.waits.values())
        return waits / (self.roofline.kernels + waits) if waits else 0.0

    @property
    def seconds(self) -> float:
        """Return the least time of a step: the roofline's time plus `update`."""
        return self.roofline.seconds + self.update

    @property
    def expected_seconds(self) -> float:
        """Return the expected time of a step: the simulated time plus `update`."""
        return self.expected.seconds + self.update

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as values for JSON, without the program's text."""
        fields = dataclasses.asdict(dataclasses.replace(self, text="", collectives=CompiledCollectives()))
        derived = {name: getattr(self, name) for name in DERIVED}
        columns = ("kind", "dtype", "bytes", "sent", "group_size", "times", "op_name", "products")
        listed = [{name: getattr(c, name) for name in columns} for c in self.collectives]
        del fields["text"]
        fields["expected"] = {name: getattr(self.expected, name) for name in EXPECTED} | fields["expected"]
        return fields | derived | {"collectives": listed}

    @property
    def verdict(self) -> str:
        """Return one sentence: whether the step fits, and its time or, if it does not fit, what to change."""
        memory = f"{format_bytes(self.peak)} of {format_bytes(self.usable)} per GPU"
        if not self.fits:
            return f"does not fit: {memory}. Use {self._remedies()}"
        per_host = Topology.parse(self.topology).per_host
        for place, size in {"memory": self.host * per_host, "disk": self.disk * per_host}.items():
            memory += f" and {format_bytes(size)} of {place} per host" * (size > 0)
        parts = [f"fits: {memory}"]
        if self.collectives:
            parts.append(f"{self.hidden:.0%} of the communication is hidden")
        limit = f", most of it for copies to and from {'disk' if self.disk else 'host memory'}"
        parts.append(f"{format_seconds(self.seconds)} or more per step" + limit * (2 * self.update > self.seconds))
        return "; ".join(parts)

    def _remedies(self) -> str:
        """Return what reduces the largest part of the memory, or of a too large state, the cheapest first."""
        if self.stage is None:
            return "jax.checkpoint or fewer rows or more GPUs"
        state, found = sum(self.memory.get(part, 0) for part in STATE_PARTS.values()), list[str]()
        needs_less_state = 2 * state > self.peak or state > self.usable  # in the second case, no batch is small enough
        if not needs_less_state:
            if not self.blocks or any(block.share < 1 for block in self.blocks):
                found.append("zerojax.block around each layer and " * (not self.blocks) + 'train_step(memory="auto")')
            found.append("accumulate=")
        if self.stage < 3:
            found.append("stage 3")
        if needs_less_state and not (self.host or self.disk):
            found.append('Offload(optimizer="host")')
        return " or ".join([*found, "more GPUs"])

    def __str__(self) -> str:
        """Return the verdict, the memory and the time of a step. `details` has all tables."""
        times = {"time, at least": self.seconds, "time, expected": self.expected_seconds}
        lines = [*self._memory(), "per step", _line("sent by a GPU", format_bytes(self.sent))]
        lines += [_line(name, format_seconds(time)) for name, time in times.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    @property
    def details(self) -> str:
        """Return all figures as tables, including blocks, kinds of collectives, kernels and rates."""
        lines = [*self._memory()]
        lines += ["blocks, per call and GPU"] * bool(self.blocks) + [_line(*row) for row in table_lines(self.blocks)]
        if self.collectives:
            formula = "" if self.sent_formula is None else f"  formula {format_bytes(self.sent_formula)}"
            lines += ["sent, per GPU and step", _line("", "times", "sent", "hidden")]
            lines += [_line(*row) for row in self._kinds()]
            lines.append(_line("all", "", format_bytes(self.sent), f"{self.hidden:.0%}") + formula)
        return "\n".join([*lines, *self._times(), *self.updates, *(f"note: {note}" for note in self.notes)])

    def _memory(self) -> Iterator[str]:
        rows = "" if self.batch is None else f", {self.batch:,} rows"
        yield from (self.verdict, f"{self.topology}: {self.devices} GPUs{rows}", "memory, per GPU")
        yield from (_line(part, format_bytes(size)) for part, size in self.memory.items() if size)
        yield _line("peak", format_bytes(self.peak)) + f"  of {format_bytes(self.usable)} usable"
        offloaded = {"in host memory": self.host, "on disk": self.disk}
        yield from (_line(name, format_bytes(size)) for name, size in offloaded.items() if size)
        if self.largest_batch is not None:
            yield _line("largest batch", f"{self.largest_batch:,}") + "  rows"

    def _times(self) -> Iterator[str]:
        """Yield table rows with times at peak and at achievable rates."""
        peak, expected = self.roofline, self.expected
        yield "time" + _line("", "peak", "achievable")[4:]
        for name, part in TIMES.items():
            yield _line(name, *(format_seconds(getattr(at, part)) for at in (peak, expected.roofline)))
        if self.collectives:
            waits = ", ".join(f"{cause} {format_seconds(time)}" for cause, time in [*self.waits.items()][:MOST_WAITS])
            cells = format_seconds(sum(self.waits.values())), format_seconds(expected.waits)
            yield _line("kernels wait", *cells) + (f"  {self.waiting:.1%}: {waits}" if waits else "")
            yield _line("products slowed", format_seconds(0.0), format_seconds(expected.slowed))
        if self.update:
            yield _line("offloaded update", format_seconds(self.update), format_seconds(self.update))
        yield _line("step", format_seconds(self.seconds), format_seconds(self.expected_seconds))
        yield f"  {self.rates}"

    def _kinds(self) -> Iterator[tuple[str, ...]]:
        """Yield a table row (count, bytes, hidden share) per kind and type of collective, in a host or across hosts."""
        per_host, groups = Topology.parse(self.topology).per_host, dict[tuple, list]()
        for c in self.collectives:
            groups.setdefault((c.kind, c.dtype, _spans_hosts(c, per_host)), []).append(c)
        for (kind, dtype, between), members in groups.items():
            group = CompiledCollectives(members)
            times, sent = sum(c.times_if_once for c in group), group.moved(unknown_once=True).sent
            name = f"{kind} {dtype}" + ", hosts" * between
            yield name, f"{times:,}", format_bytes(sent), f"{group.hidden_share:.0%}"


def _line(name: str, *cells: str) -> str:
    return f"  {name:24s}" + "".join(f"{cell:>12s}" for cell in cells)


def _spans_hosts(c: Collective, per_host: int) -> bool:
    return len({device // per_host for device in c.group}) > 1


class CompiledStep(NamedTuple):
    """The compiled program of a step, and figures that the program does not show."""

    program: Any
    sent_formula: float | None = None  # as in `Plan`
    estimate: StageEstimate | None = None  # the estimate of the step's bytes; None for a function
    notes: tuple[str, ...] = ()  # sentences for the plan
    updates: tuple[str, ...] = ()  # as in `Plan`
    blocks: tuple[BlockMemory, ...] = ()  # what each block of the loss saves and recomputes
    options: Mapping[str, Any] = MappingProxyType({})  # the compiler options of the program
    kept: int = 0  # bytes per device of offloaded state that stays on the device, but is no argument of the program
    update: StreamedUpdate | None = None  # the update of offloaded state, if the device updates it

    @property
    def peak(self) -> int:
        return peak_bytes(self.program) + self.kept


def read_plan(
    step: CompiledStep,
    topology: str,
    *,
    memory: int | None = None,
    rates: Rates = USUAL,
    batch: int | None,
    largest_batch: int | None = None,
) -> Plan:
    gpus = Topology.parse(topology)
    device = Device.of(gpus)
    module, analysis = read(step.program), memory_analysis(step.program)
    moved = overlap(module)
    figures = roofline(module, moved, device)
    kept = {KEPT: step.kept} if step.kept else {}
    usable, achievable = device.usable(memory), rates.of(gpus)
    update, saving = of_update(step, achievable, usable)
    notes = (
        *step.notes,
        *saving,
        *limitations(module, figures.unknown, gpus),
        *near_limit(analysis, device, step.options),
    )
    return Plan(
        topology=topology,
        devices=gpus.size,
        batch=batch,
        memory=kept | memory_by_part(module, analysis, STATE_PARTS if step.estimate else {}),
        capacity=device.memory,
        usable=usable,
        collectives=moved,
        roofline=figures,
        expected=Expected.of(module, moved, achievable),
        stage=step.estimate.stage if step.estimate else None,
        rates=rates.described(gpus.kind),
        waits=dict(sorted(simulate(module, device).waits.items(), key=lambda item: -item[1])),
        sent_formula=step.sent_formula,
        host=step.estimate.host if step.estimate else 0,
        disk=step.estimate.disk if step.estimate else 0,
        update=update,
        largest_batch=largest_batch,
        blocks=step.blocks,
        notes=tuple(dict.fromkeys(notes)),
        updates=step.updates,
        compiler_options=dict(step.options),
        text=module.text,
    )


def of_update(step: CompiledStep, achievable: Device, usable: int) -> tuple[float, tuple[str, ...]]:
    """Return the seconds in which a step updates offloaded state, and, if the step could be faster, a note on how.

    State crosses the link to the host in both directions at once. Chunks that stay on the device are only read from and
    written to its memory. The note says how many more bytes could stay there. Without offloaded state: `(0.0, ())`.
    """
    if (update := step.update) is None or step.estimate is None:
        return 0.0, ()
    sharding, groups, link = update.plan, update.partition.groups, achievable.host_link
    chunks = [sum(chunk_bytes(sharding, k, n) for k in x.state) for x in groups for n in range(len(x.chunks))]
    kept, offload = step.kept, update.config.offload
    streamed = (sum(chunks) - kept) / link + 2 * kept / achievable.bandwidth
    seconds = max(streamed, (step.estimate.read + step.estimate.written) / achievable.disk)
    if offload is None or offload.optimizer != "host":
        return seconds, ()
    # Subtract the chunks in flight, too. This is more than needed: activations are freed before the update runs.
    more = min(usable - step.peak - IN_FLIGHT * max(chunks), sum(chunks) - kept)
    if more < min(chunks):
        return seconds, ()
    return seconds, (
        f"{format_bytes(more)} more of the offloaded state fits on the device. With "
        f'Offload(update="device", device_bytes={kept + more}), a step takes {format_seconds(more / link)} less.',
    )


def memory_by_part(module: Module, analysis: Any, parts: Mapping[str, str]) -> dict[str, int]:
    """Return bytes per device by part, with the sum `peak_bytes`. `parts` maps prefixes of argument names to parts."""
    sizes = Counter[str](dict.fromkeys(parts.values(), 0))
    entry = module.computations[module.entries[0]].instructions
    for i in sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.literal)):
        sizes[part_of_argument(i.op_name, parts)] += i.bytes
    sizes[OTHER] += analysis.argument_size_in_bytes - sizes.total()  # arguments that the compiler adds, and alignment
    # These bytes are added, not set, because an argument may be called "temporary" or "results".
    sizes[TEMPORARY] += analysis.temp_size_in_bytes
    sizes[RESULTS] += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {part: size for part, size in sizes.items() if size or part in (TEMPORARY, RESULTS)}


def part_of_argument(argument: str, parts: Mapping[str, str]) -> str:
    """Return the part for the longest prefix of `argument` in `parts`. If none matches, return the argument's name."""
    for prefix in sorted(parts, key=len, reverse=True):
        if re.match(rf"{re.escape(prefix)}(?![\w])", argument):
            return parts[prefix]
    return re.match(r"\w*", argument)[0] or OTHER  # pyright: ignore[reportOptionalSubscript]


def limitations(module: Module, unknown: tuple[str, ...], gpus: Topology) -> Iterator[str]:
    if unknown:
        yield f"The FLOPs of {', '.join(unknown)} are not counted."
    if gpus.per_host > GPUS_PER_HOST:
        yield (
            f"{gpus.per_host} devices count as one host, as in a rack whose GPUs NVLink connects. Usual hosts have "
            f"{GPUS_PER_HOST}, and links between hosts are slower: give hosts x devices, such as "
            f"{gpus.kind}:2x{-(-gpus.per_host // 2)}."
        )
    if any(count.conditional for count in module.executions.values()):
        yield "Of a conditional, every branch is counted as executed."
    if not all(count.known for count in module.executions.values()):
        yield "A loop of unknown trip count is counted as one iteration."


def near_limit(analysis: Any, device: Device, options: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """Yield a sentence if the temporary memory is near or above the limit of XLA's scheduler; see `SCHEDULED`."""
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    share = float(options.get("xla_gpu_memory_limit_slop_factor", 100 * USABLE)) / 100
    limit, temporary = share * (SCHEDULED * device.memory - held), analysis.temp_size_in_bytes
    if temporary > NEAR * limit:
        yield (
            f"The limit of XLA's scheduler is {format_bytes(max(limit, 0))} of temporary memory, and this program has "
            f"{format_bytes(temporary)}. Above the limit XLA recomputes values on its own and hides fewer collectives; "
            f"the figures above include this."
        )
