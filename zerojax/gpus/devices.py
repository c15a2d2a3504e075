"""What a GPU can do, in figures: of its memory and arithmetic from XLA's description, of its links from here."""

import dataclasses
import re
from typing import NamedTuple

from zerojax.gpus.topology import Topology, target

# XLA's numbers of element types (xla_data.proto) that matrix units have rates for.
TYPES = {"2": "s8", "6": "u8", "10": "f16", "11": "f32", "12": "f64", "16": "bf16", "19": "f8e5m2", "20": "f8e4m3fn"}
# As in XLA (xla_gpu_memory_limit_slop_factor): the CUDA context, NCCL and fragmentation take the rest.
USABLE = 0.95


class Links(NamedTuple):
    """Bytes per second that one GPU sends, each way, at most.

    Attributes:
        link: To the GPUs of its machine.
        network: To other machines: its share of the machine's adapters.
    """

    link: float
    network: float


# NVLink: the data sheets' figure, which counts both ways, halved. Network: DGX A100 (8 x 200 Gbit/s), and
# DGX H100, H200 and B200 (8 x 400 Gbit/s), one adapter a GPU.
LINKS = {
    "a100-80": Links(300e9, 25e9),
    "b200": Links(900e9, 50e9),
    "h100": Links(450e9, 50e9),
    "h200": Links(450e9, 50e9),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU of a topology.

    Attributes:
        memory: Bytes.
        bandwidth: Bytes per second of its memory.
        rates: Dense operations per second of its matrix units by the HLO type of the
            operands; `"f32"` is TF32, which XLA uses unless the precision is `HIGHEST`.
        scalar: Operations per second in float32 without matrix units.
        links: How fast it sends.
        in_a_host: GPUs in its machine.
    """

    memory: int
    bandwidth: float
    rates: dict[str, float]
    scalar: float
    links: Links
    in_a_host: int

    @classmethod
    def of(cls, topology: Topology, *, link: float | None = None, network: float | None = None) -> "Device":
        """The GPU of a topology; `link` and `network` in place of the table's, in bytes per second.

        Raises:
            ValueError: If one of these is not above 0.
        """
        for name, given in (("link", link), ("network", network)):
            if given is not None and not given > 0:
                raise ValueError(f"{name} is what a GPU sends, in bytes per second, and must be above 0, not {given}.")
        text, usual = target(topology.kind), LINKS[topology.kind]
        figure = lambda name: float(re.search(rf"\b{name}: ([\d.]+)", text)[1])  # pyright: ignore[reportOptionalSubscript]
        cores = figure("core_count")
        units = text[text.index("matrix_unit_description") :]
        rate = r"key: (\d+) value \{ clock_rate_ghz: ([\d.]+) units_per_core: (\d+) ops_per_clock: (\d+)"
        return cls(
            memory=int(figure("device_memory_size")),
            bandwidth=figure("memory_bandwidth"),
            rates={  # one unit's operation is a multiplication and an addition
                TYPES[key]: 2e9 * float(clock) * int(per_core) * int(per_clock) * cores
                for key, clock, per_core, per_clock in re.findall(rate, units)
                if key in TYPES
            },
            scalar=2e9 * figure("clock_rate_ghz") * figure("fpus_per_core") * cores,
            links=Links(link or usual.link, network or usual.network),
            in_a_host=topology.devices,
        )

    def rate(self, dtype: str) -> float:
        """Operations per second of a product of operands of an HLO type, in float32 for a type it has no units for."""
        return self.rates.get(dtype, self.scalar)

    def sends(self, group: int) -> float:
        """Bytes per second that each of a group sends over a ring.

        The ring enters and leaves each machine once for every adapter, so that all of its
        adapters are used. A group no larger than a machine is taken to lie in one.
        """
        if group <= self.in_a_host:
            return self.links.link
        return min(self.links.link, self.links.network * self.in_a_host)
