"""Compute the expected time of a compiled program: a simulation at the rates that a device achieves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from zerojax.gpus.devices import Device
from zerojax.inspect.hlo import Module
from zerojax.inspect.overlap import Overlap
from zerojax.inspect.roofline import Roofline, roofline, total
from zerojax.inspect.timeline import simulate


@dataclasses.dataclass(frozen=True)
class Expected:
    """The simulated run of a program at achievable rates."""

    roofline: Roofline  # the times of kernels and collectives, if none waited for or slowed another
    waits: float  # seconds that kernels wait for collectives
    slowed: float  # seconds by which matrix products take longer because collectives run

    @property
    def exposed(self) -> float:
        return self.waits + self.slowed

    @property
    def seconds(self) -> float:
        return self.roofline.kernels + self.exposed

    @classmethod
    def of(cls, module: Module, moved: Overlap, device: Device) -> Expected:
        """Return the simulated run of a program on a device at achievable rates. `moved` has its collectives."""
        simulated = simulate(module, device)
        return cls(roofline(module, moved, device), sum(simulated.waits.values()), simulated.slowed)

    @classmethod
    def total(cls, parts: Iterable[tuple[Expected, int]]) -> Expected:
        parts = list(parts)
        sums = {name: sum(getattr(one, name) * times for one, times in parts) for name in ("waits", "slowed")}
        return cls(total((one.roofline, times) for one, times in parts), **sums)
