"""Read the figures of a plan from a compiled program."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from zerojax.gpus.devices import USABLE, Device
from zerojax.gpus.topology import GPUS_PER_HOST, Topology
from zerojax.inspect.collectives import arrays_of, cause_of
from zerojax.inspect.hlo import Module, read
from zerojax.inspect.memory import memory_analysis
from zerojax.inspect.overlap import overlap
from zerojax.inspect.roofline import roofline
from zerojax.inspect.timeline import simulate
from zerojax.planning.compiled_plan import Plan

# Names of a step's arguments, by prefix of their names in the program.
STATE_PARTS = {
    "state.params": "parameters",
    "state.opt_state.master": "master weights",
    "state.opt_state": "optimizer state",
    "state.rounding_errors": "rounding errors",
    "state": "other state",
}
TEMPORARY, RESULTS, OTHER = "temporary", "results", "other arguments"


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Facts about a step that its compiled program does not have. See `Plan` for most attributes.

    `parts` has names of arguments, by prefix of their names in the program. The longest prefix decides.
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
    module = read(compiled)
    gpus, hiding = Topology.parse(topology), overlap(module.text)
    figures = roofline(module, hiding, device)
    return Plan(
        topology=topology,
        devices=gpus.size,
        batch=batch,
        memory=memory_by_part(module, memory_analysis(compiled), facts.parts),
        capacity=device.memory,
        usable=int(USABLE * device.memory if usable is None else usable),
        overlap=hiding,
        roofline=figures,
        waits=waits_by_cause(module, device),
        sent_formula=facts.sent_formula,
        host=facts.host,
        disk=facts.disk,
        largest_batch=largest_batch,
        notes=(*facts.notes, *limitations(module, figures.unknown, gpus)),
        text=module.text,
    )


def waits_by_cause(module: Module, device: Device) -> dict[str, float]:
    """Return seconds that kernels wait for collectives in one step, by cause, the longest first."""
    waits = Counter[str]()
    for collective, seconds in simulate(module.text, device).waits.items():
        waits[cause_of(collective)] += seconds  # pyright: ignore[reportArgumentType]
    return dict(waits.most_common())


def limitations(module: Module, unknown: tuple[str, ...], gpus: Topology) -> Iterator[str]:
    """Yield sentences about what the figures of a program leave out."""
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


def memory_by_part(module: Module, analysis: Any, parts: Mapping[str, str]) -> dict[str, int]:
    """Return bytes by part. Their sum is `peak_bytes`."""
    sizes = Counter[str]()
    entry = module.computations[module.entries[0]].instructions
    for i in sorted((i for i in entry if i.opcode == "parameter"), key=lambda i: int(i.literal)):
        name = re.search(r'op_name="([^"]*)"', i.rest)
        sizes[part_of(name[1] if name else "", parts)] += sum(array.bytes for array in arrays_of(i.shape))
    sizes[OTHER] += analysis.argument_size_in_bytes - sizes.total()  # arguments that the compiler adds, and alignment
    order = dict.fromkeys([*parts.values(), *(part for part in sizes if part not in (TEMPORARY, RESULTS))])
    ordered = {part: sizes[part] for part in order if sizes[part]}
    # An argument may be called "temporary" or "results", so these bytes are added.
    sizes[TEMPORARY] += analysis.temp_size_in_bytes
    sizes[RESULTS] += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {**ordered, TEMPORARY: sizes[TEMPORARY], RESULTS: sizes[RESULTS]}


def part_of(argument: str, parts: Mapping[str, str]) -> str:
    """Return the part of an argument: that of its longest known prefix, otherwise its own name."""
    for prefix in sorted(parts, key=len, reverse=True):
        if re.match(rf"{re.escape(prefix)}(?![\w])", argument):
            return parts[prefix]
    return re.match(r"\w*", argument)[0] or OTHER  # pyright: ignore[reportOptionalSubscript]
