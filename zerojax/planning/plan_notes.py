"""Write sentences about what the figures of a compiled program leave out."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from zerojax.gpus.devices import SCHEDULED, USABLE, Device
from zerojax.gpus.topology import GPUS_PER_HOST, Topology
from zerojax.inspect.hlo import Module
from zerojax.units import format_bytes

# A plan has a note if the temporary memory exceeds this share of the limit of XLA's scheduler.
NEAR = 0.9


def limitations(module: Module, unknown: tuple[str, ...], gpus: Topology) -> Iterator[str]:
    """Yield sentences about effects that the figures of a program leave out."""
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
