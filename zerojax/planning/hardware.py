"""Describe the memory and the rates of one GPU, where the caller's figures replace the usual figures."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

from zerojax.gpus.devices import HOST_LINKS, SCHEDULED, USABLE, Device, Rates
from zerojax.gpus.topology import Topology
from zerojax.units import parse_bytes


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Memory and bandwidths of one GPU. None means the usual figure of the GPU."""

    memory: Any = None  # bytes that a program may use: a number, or text such as `"72 GB"`, which becomes a number
    link: float | None = None  # bytes per second that the GPU sends within its host
    network: float | None = None  # bytes per second that the GPU sends to other hosts
    host_link: float | None = None  # bytes per second in each direction between the GPU and its host
    disk: float | None = None  # bytes per second that this GPU's share of the disk reads and writes, together
    rates: Any = None  # measured rates in a form that `Rates.parse` reads, which become `Rates`

    def __post_init__(self):
        object.__setattr__(self, "rates", Rates.parse(self.rates))
        if isinstance(self.memory, str):
            object.__setattr__(self, "memory", parse_bytes("memory=", self.memory, least=1))
        for name, unit in (("memory", ""), ("host_link", " per second"), ("disk", " per second")):
            given = getattr(self, name)
            if given is not None and not given > 0:
                raise ValueError(f"{name}= is in bytes{unit} of one GPU and must be above 0, not {given}.")

    def device(self, topology: str) -> Device:
        return Device.of(Topology.parse(topology), link=self.link, network=self.network)

    def achievable(self, topology: str) -> Device:
        return self.rates.of(self.device(topology), Topology.parse(topology).kind)

    def usable(self, device: Device) -> float:
        return USABLE * device.memory if self.memory is None else self.memory

    def fitted(self, device: Device) -> float:
        """Return the bytes into which a step with `memory="auto"` is fitted; see `SCHEDULED`."""
        return min(self.usable(device), USABLE * SCHEDULED * device.memory)

    def to_host(self, topology: str) -> float:
        return self.host_link or self.rates.host_link or HOST_LINKS[Topology.parse(topology).kind]


class HardwareOptions(TypedDict, total=False):
    """Options that become the fields of `Hardware`."""

    memory: float | str | None
    link: float | None
    network: float | None
    host_link: float | None
    disk: float | None
    rates: Any
