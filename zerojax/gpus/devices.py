"""Describe a GPU: memory and peak rates from XLA's description, and link bandwidths from data sheets."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zerojax.gpus.topology import KINDS, Topology, target_config

# Element types for which matrix units have rates, by their numbers in XLA (xla_data.proto).
TYPES = {"2": "s8", "6": "u8", "10": "f16", "11": "f32", "12": "f64", "16": "bf16", "19": "f8e5m2", "20": "f8e4m3fn"}
# The share of memory that programs may use, as in XLA (xla_gpu_memory_limit_slop_factor). The CUDA context, NCCL and
# fragmentation take the remaining memory.
USABLE = 0.95
# XLA's scheduler limits temporary memory. The limit is 95% of the bytes that remain if arguments and results are
# subtracted from this share of the device's memory. Above it, XLA recomputes values and hides fewer collectives.
SCHEDULED = 0.8


class Links(NamedTuple):
    """Peak bytes per second that one GPU sends to GPUs of its host (`link`) and to other hosts (`network`).

    `network` is the GPU's share of its host's network adapters.
    """

    link: float
    network: float


# NVLink: half of the figure in the data sheets, which counts both directions. Network: one adapter per GPU, as in DGX
# A100 (8 x 200 Gbit/s), and in DGX H100, H200 and B200 (8 x 400 Gbit/s).
LINKS = {
    "a100-80": Links(300e9, 25e9),
    "b200": Links(900e9, 50e9),
    "h100": Links(450e9, 50e9),
    "h200": Links(450e9, 50e9),
}
# Bytes per second in each direction between a GPU and its host: 80% of PCIe 4.0 and 5.0 with 16 lanes.
HOST_LINKS = {"a100-80": 25e9, "b200": 50e9, "h100": 50e9, "h200": 50e9}


def kind_of(device_kind: str) -> str | None:
    """Return the known GPU that JAX calls `device_kind`, such as `"NVIDIA H100 80GB HBM3"`. Return None for others."""
    return next((kind for kind in KINDS if kind.partition("-")[0] in device_kind.lower()), None)


@dataclasses.dataclass(frozen=True)
class Device:
    """One GPU of a topology."""

    memory: int  # bytes of memory
    bandwidth: float  # bytes per second that memory reads and writes
    rates: dict[str, float]  # dense FLOP/s of matrix units, by HLO type; `"f32"` is TF32, the default of XLA
    scalar: float  # FLOP/s in float32 outside the matrix units
    links: Links  # link bandwidths
    per_host: int  # the number of GPUs in a host
    slowdown: float = 0.0  # the share of its time by which a product slows during a collective; 0 at peak rates

    @classmethod
    def of(cls, topology: Topology, *, link: float | None = None, network: float | None = None) -> "Device":
        """Return the GPU of a topology. `link` and `network`, in bytes per second, replace the figures of `LINKS`."""
        for name, given in (("link", link), ("network", network)):
            if given is not None and not given > 0:
                raise ValueError(f"{name} is what a GPU sends, in bytes per second, and must be above 0, not {given}.")
        text, usual = target_config(topology.kind), LINKS[topology.kind]
        figure = lambda name: float(re.search(rf"\b{name}: ([\d.]+)", text)[1])  # pyright: ignore[reportOptionalSubscript]
        cores = figure("core_count")
        units = text[text.index("matrix_unit_description") :]
        rate = r"key: (\d+) value \{ clock_rate_ghz: ([\d.]+) units_per_core: (\d+) ops_per_clock: (\d+)"
        return cls(
            memory=int(figure("device_memory_size")),
            bandwidth=figure("memory_bandwidth"),
            rates={  # an operation of a unit is a fused multiply-add: two FLOPs
                TYPES[key]: 2e9 * float(clock) * int(per_core) * int(per_clock) * cores
                for key, clock, per_core, per_clock in re.findall(rate, units)
                if key in TYPES
            },
            scalar=2e9 * figure("clock_rate_ghz") * figure("fpus_per_core") * cores,
            links=Links(link or usual.link, network or usual.network),
            per_host=topology.per_host,
        )

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of products of an HLO type, or the scalar rate if no matrix unit supports the type."""
        return self.rates.get(dtype, self.scalar)

    def ring_bandwidth(self, group: Sequence[int]) -> float:
        """Return the bytes per second that each device of a group sends over a ring.

        The ring enters and leaves a host once for each device of the group in that host, through this device's network
        adapter. `group` has the devices' numbers in the mesh, where the devices of one host have adjacent numbers.
        """
        in_host = Counter(device // self.per_host for device in group)
        if len(in_host) <= 1:
            return self.links.link
        return min(self.links.link, self.links.network * min(in_host.values()))
