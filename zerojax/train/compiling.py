"""Choose compiler options for a step, by comparing the programs that XLA compiles with and without them.

XLA's scheduler runs collectives one after another. With hybrid sharding, or a second mesh axis for the model, a step
has collectives over NVLink and over the network, which can run at the same time. `OVERLAP` allows this. The step keeps
an option only if the compiled program shows that nothing else gets worse.

`xla_gpu_memory_limit_slop_factor` is not tried. A lower limit saves memory, but XLA keeps to it by repeating matrix
products, and not by another schedule.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.comm.events import is_of_all
from zerojax.comm.processes import Processes
from zerojax.config import Config
from zerojax.gpus.devices import Device, kind_of
from zerojax.gpus.topology import GPUS_PER_HOST, Topology
from zerojax.inspect.hlo import read
from zerojax.inspect.memory import peak_bytes
from zerojax.inspect.overlap import overlap
from zerojax.inspect.roofline import roofline
from zerojax.inspect.timeline import simulate
from zerojax.train.determinism import SENTENCE
from zerojax.train.jitted_step import JittedStep
from zerojax.train.same_run import placed_signature_of
from zerojax.train.state import ZeroState
from zerojax.units import format_bytes

OVERLAP = "xla_gpu_experimental_parallel_collective_overlap_limit"
CANDIDATE: Mapping[str, Any] = MappingProxyType({OVERLAP: 2})
# The simulated step must become shorter by this share, because the simulation is not more precise.
_GAIN = 1e-3
# Sums of bytes and times in two schedules of the same work may differ by this share.
_EQUAL = 1e-3


@dataclasses.dataclass(frozen=True)
class CompilerOptions:
    """The compiler options of a step for one set of argument shapes.

    Attributes:
        options: The options, by name. Empty if the compiler's defaults are kept.
        note: A sentence about the comparison. Empty if there was none.
        file: The file from which the executable was loaded. Empty if it was compiled.
        deterministic: Whether runs of the step agree bit for bit.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    file: str = ""
    deterministic: bool = False

    @property
    def in_words(self) -> tuple[str, ...]:
        """Return sentences for a plan and a report. There are none if the compiler's defaults were not compared."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        if self.file or not self.note:
            compiled = f"Compiled with the options {given}." if given else ""
            if self.file:
                compiled = f"Loaded from {self.file!r}{f', compiled with the options {given}' if given else ''}."
            return tuple(filter(None, (compiled, SENTENCE if self.deterministic else "")))
        return (f"The step chose {f'the compiler options {given}' if given else 'no compiler options'}. {self.note}",)


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one compiled program.

    Attributes:
        peak: Peak bytes per device.
        hidden: The share of the collectives' bytes that matrix products hide.
        products: The FLOPs of the matrix products.
        kernels: Seconds of all kernels, at the device's peak rates.
        waits: Seconds that kernels wait for collectives, in a simulation at the device's peak rates.
        groups: The number of different groups of devices that exchange data.
    """

    peak: int
    hidden: float
    products: int
    kernels: float
    waits: float
    groups: int

    @classmethod
    def of(cls, compiled: Any, device: Device) -> Figures:
        """Read the figures of a compiled program for a device."""
        module, moved = read(compiled), overlap(compiled)
        least = roofline(module, moved, device)
        return cls(
            peak=peak_bytes(compiled),
            hidden=moved.hidden_share,
            products=sum(least.operations.values()),
            kernels=least.kernels,
            waits=sum(simulate(compiled, device).waits.values()),
            groups=len({tuple(sorted(one.collective.group)) for one in moved.in_flight}),
        )

    def is_better(self, other: Figures, memory: float) -> bool:
        """Return whether this program waits less than `other`, fits into `memory`, and is not worse otherwise."""
        more = 1 + _EQUAL
        return (
            self.kernels + self.waits < (1 - _GAIN) * (other.kernels + other.waits)
            and self.hidden >= other.hidden - _EQUAL
            and self.products <= more * other.products
            and self.kernels <= more * other.kernels
            and self.peak <= max(memory, other.peak)
        )


class OptionChoice:
    """The compiler options of one step, for each set of argument shapes."""

    def __init__(self, config: Config):
        """Keep the configuration. Its mesh is not needed yet, because a pickled step may come before its devices."""
        self._config, self._found = config, dict[Any, tuple[JittedStep, CompilerOptions]]()

    @functools.cached_property
    def _device(self) -> Device | None:
        """Return the description of a GPU of the mesh, or None if options cannot matter."""
        config, flags = self._config, os.environ.get("XLA_FLAGS", "")
        several = [size for size in config.mesh.shape.values() if size > 1]
        matters = config.stage > 0 and len(several) > 1 and OVERLAP not in flags and not config.params_on_disk
        return gpu_of(config.mesh) if matters else None

    @property
    def found(self) -> list[CompilerOptions]:
        """Return the options for all sets of argument shapes so far."""
        return [options for _, options in self._found.values()]

    def best(
        self, jitted: JittedStep, state: ZeroState, rows: Any, args: tuple, memory: int | None
    ) -> tuple[JittedStep, CompilerOptions]:
        """Return the functions of the step with the chosen options, and these options.

        The first call with new shapes compiles the step, and at most once more. A changed program may take at most
        `memory` bytes per device, or as many as without options if they are more. If `memory` is None, it may take the
        bytes that the device has for programs.
        """
        if self._device is None:
            return jitted, CompilerOptions()
        given = state, rows, args
        key = id(jitted), placed_signature_of(given)
        if key not in self._found:
            limit = memory_of(self._config.mesh, self._device) if memory is None else memory
            changed, note = self._compare(jitted, given, self._device, limit)
            # The step keeps `jitted`, so no other object gets its `id`.
            self._found[key] = changed or jitted, CompilerOptions(CANDIDATE if changed else {}, note)
        return self._found[key]

    def _compare(self, jitted: JittedStep, given: tuple, device: Device, memory: int) -> tuple[JittedStep | None, str]:
        """Return the functions with options if their program is better, and a sentence about the comparison."""
        before = Figures.of(jitted.trace(*given).lower().compile(), device)
        if before.groups < 2:
            return None, ""
        changed, after, why = jitted.with_options(CANDIDATE), None, ""
        try:
            after = Figures.of(changed.trace(*given).lower().compile(), device)
        except jax.errors.JaxRuntimeError as error:
            why = f"This XLA does not compile the step with {OVERLAP}: {str(error).splitlines()[0]}"
        # A process whose compilation failed answers, too. Otherwise the others would wait for it.
        is_better = self._agreed(is_better=after is not None and after.is_better(before, memory))
        if after is None:
            return None, why
        found = (
            f"Kernels would wait for collectives for {after.waits / (after.kernels + after.waits):.1%} of the step "
            f"instead of {before.waits / (before.kernels + before.waits):.1%}, in {format_bytes(after.peak)} instead "
            f"of {format_bytes(before.peak)}."
        )
        return (changed if is_better else None), found

    def _agreed(self, *, is_better: bool) -> bool:
        """Return whether the changed program is better on all processes, which must run the same program."""
        if not is_of_all(self._config.mesh):
            return is_better
        return set(Processes("options").exchange("choose compiler options", str(is_better))) == {"True"}


def memory_of(mesh: Mesh, device: Device) -> int:
    """Return the bytes that programs may use on a device of the mesh. `device` describes its kind.

    A kind may have cards with less memory, and other programs may use a part of it. So a GPU that is there is asked.
    """
    members = set(mesh.devices.flat)
    found = [stats for one in jax.local_devices() if one in members and (stats := one.memory_stats())]
    return min([device.memory, *(stats["bytes_limit"] for stats in found if "bytes_limit" in stats)])


def gpu_of(mesh: Mesh) -> Device | None:
    """Return the description of a GPU of the mesh. Return None if its kind is unknown, or it is no GPU."""
    first = mesh.devices.flat[0]
    kind = kind_of(first.device_kind)
    if kind is None or first.platform not in ("cuda", "gpu"):
        return None
    in_process = collections.Counter(device.process_index for device in mesh.devices.flat)
    hosts, per_host = len(in_process), min(in_process.values())
    if per_host == 1:  # one process per GPU
        per_host = min(mesh.size, GPUS_PER_HOST)
        hosts = -(-mesh.size // per_host)
    return Device.of(Topology(kind, hosts, per_host))
