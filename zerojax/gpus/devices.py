"""Describe GPUs that this machine need not have: their memory, their peak and achieved rates, and meshes of them.

Compiling for absent GPUs needs the extra `aot`, which installs the CUDA compiler plugin of jaxlib's version. No driver
is needed.

Peak rates are from XLA's description, and link bandwidths from data sheets. Achieved rates are measured, or the usual
shares of the peak rates.

References:
    Products: the largest rates found by mamf-finder, github.com/stas00/ml-engineering, compute/accelerator.
    Links: github.com/NVIDIA/nccl-tests/issues/212 and github.com/NVIDIA/nccl/issues/1281, without SHARP: NCCL's
    protocol takes a fifth of NVLink's bandwidth. Network: github.com/NVIDIA/nccl/issues/1229.
    Slowdown: arXiv 2507.03114, which measures 19% on average and 40% at most; large models are near the upper end.
"""

import dataclasses
import functools
import importlib.resources
import importlib.util
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

KINDS = ("a100-80", "b200", "h100", "h200")
GPUS_PER_HOST = 8
# Element types for which matrix units have rates, by their numbers in XLA (xla_data.proto).
TYPES = {"2": "s8", "6": "u8", "10": "f16", "11": "f32", "12": "f64", "16": "bf16", "19": "f8e5m2", "20": "f8e4m3fn"}
# The share of memory that programs may use, as in XLA (xla_gpu_memory_limit_slop_factor). The CUDA context, NCCL and
# fragmentation take the remaining memory.
USABLE = 0.95
# XLA's scheduler limits temporary memory. The limit is 95% of the bytes that remain if arguments and results are
# subtracted from this share of the device's memory. Above the limit, XLA recomputes values and hides fewer collectives.
SCHEDULED = 0.8
# Peak rates of links by the fields of `Device`. NVLink: half of the figure in the data sheets, which counts both
# directions. Network: one adapter per GPU, as in DGX A100 (8 x 200 Gbit/s), and in DGX H100, H200 and B200
# (8 x 400 Gbit/s). To the host: 80% of PCIe 4.0 and 5.0 with 16 lanes.
LINKS = {
    "a100-80": {"link": 300e9, "network": 25e9, "host_link": 25e9},
    "b200": {"link": 900e9, "network": 50e9, "host_link": 50e9},
    "h100": {"link": 450e9, "network": 50e9, "host_link": 50e9},
    "h200": {"link": 450e9, "network": 50e9, "host_link": 50e9},
}
# Achieved FLOP/s of bfloat16 products as a share of the peak rate. The same share is assumed for other types.
PRODUCTS = {"a100-80": 271.2 / 312, "b200": 1745 / 2250, "h100": 794.5 / 989, "h200": 794.5 / 989}
LINK_SHARE = 0.8
SLOWDOWN = 0.35
EXCESS = 1.05  # a measurement may exceed the peak by this factor, because clocks may exceed the data sheet's
MEASURE = "Write the file with `zerojax doctor --json` on a machine with the GPUs"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts with equally many GPUs of one of `KINDS`. This machine need not have these GPUs."""

    kind: str
    hosts: int
    per_host: int

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Parse `"h200:8"` (one host of eight GPUs), `"h200:64"` or `"h200:8x8"` (eight hosts of eight GPUs).

        A multiple of eight means hosts of eight GPUs. Any other number means one host.
        """
        match = re.fullmatch(r"([\w\-]+):(?:(\d+)x)?(\d+)", text)
        if not match or match.group(1) not in KINDS or 0 in (int(n) for n in match.groups()[1:] if n):
            raise ValueError(
                f"Unknown topology {text!r}. Give a GPU and how many, like 'h200:8' for one host, 'h200:64' or "
                f"'h200:8x8' for eight hosts of eight; the GPUs known are {', '.join(KINDS)}."
            )
        kind, hosts, devices = match.group(1), match.group(2), int(match.group(3))
        if hosts is None and devices % GPUS_PER_HOST == 0:
            hosts, devices = devices // GPUS_PER_HOST, GPUS_PER_HOST
        return cls(kind, int(hosts or 1), devices)

    @property
    def size(self) -> int:
        return self.hosts * self.per_host


def absent_mesh(topology: str, *, axes: tuple[str, ...] = ("data",)) -> Mesh:
    """Return a mesh of GPUs that this machine does not have. Programs can be compiled for it, but cannot run.

    A single name in `axes` is the axis of all GPUs. Two names are the axis of the hosts and the axis of a host's GPUs.
    """
    parsed = Topology.parse(topology)
    if not installed():
        raise ModuleNotFoundError(
            "Compiling for absent GPUs needs the CUDA compiler plugin, of the same version as jaxlib. "
            'Install it with pip install "zerojax[aot]"; no driver and no other CUDA package is needed.'
        )
    if len(axes) > 2:
        raise ValueError(f"{topology!r} has two levels, hosts and GPUs, and the axes are {axes}. Name one or two.")
    shape = (parsed.size,) if len(axes) == 1 else (parsed.hosts, parsed.per_host)
    return Mesh(np.array(_devices(parsed)).reshape(shape), axes)


def absent_mesh_like(mesh: Mesh | AbstractMesh, topology: str, *, axes: tuple[str, ...]) -> Mesh:
    """Return a mesh of GPUs that this machine does not have, with the axes of `mesh`.

    `axes` has the names of the axes that divide the batch. If there are two, the size of the first becomes the number
    of hosts, and that of the second the GPUs per host, divided by the sizes of all axes that are not in `axes`.
    Otherwise, only the first is resized, so that the mesh has all GPUs. All other axes keep their sizes.
    """
    devices = absent_mesh(topology).devices.flatten()
    sizes, resized = dict(mesh.shape), axes if len(axes) == 2 else axes[:1]
    fixed = math.prod(size for name, size in sizes.items() if name not in resized)
    if len(resized) == 2:
        parsed = Topology.parse(topology)
        sizes |= {resized[0]: parsed.hosts, resized[1]: max(1, parsed.per_host // fixed)}
    else:
        sizes[resized[0]] = max(1, devices.size // fixed)
    if math.prod(sizes.values()) != devices.size:
        raise ValueError(
            f"The mesh {dict(mesh.shape)} does not fit {topology!r}, which has {devices.size} devices: only "
            f"{' and '.join(map(repr, resized))} can grow. Give as many devices as the axes multiply to."
        )
    return Mesh(devices.reshape(tuple(sizes.values())), mesh.axis_names, axis_types=mesh.axis_types)


def abstract_mesh(count: int, axes: tuple[str, ...] = ("data",), *, hosts: int = 1) -> Any:
    """Return a mesh of `count` absent devices, to compute layouts. The first of several axes has size `hosts`."""
    sizes = (count,) if len(axes) == 1 else (hosts, *(1,) * (len(axes) - 2), count // hosts)
    return AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes))


def installed() -> bool:
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (13, 12)
    )


def target_config(kind: str) -> str:
    return importlib.resources.files("zerojax.gpus").joinpath("targets", f"{kind}.txtpb").read_text()


@functools.cache
def _devices(topology: Topology) -> list:
    """Return descriptions of the topology's devices. Cached, because JAX returns unequal ones at each call."""
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=topology.kind,
            topology=f"1x{topology.hosts}x{topology.per_host}",
            target_config=target_config(topology.kind),
        )
    except NotImplementedError as error:  # the plugin did not start, because it found no GPU
        raise RuntimeError(
            f"JAX cannot describe GPUs that are absent ({error}), because its plugin for GPUs looked for a GPU and "
            f"found none. On a machine without a GPU, set JAX_PLATFORMS=cpu, or call "
            f'jax.config.update("jax_platforms", "cpu") right after importing jax.'
        ) from error
    return list(description.devices)


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
    link: float  # bytes per second that the GPU sends to GPUs of its host
    network: float  # bytes per second that the GPU sends to other hosts, over its share of its host's network adapters
    per_host: int  # the number of GPUs in a host
    host_link: float  # bytes per second in each direction between the GPU and its host
    disk: float = math.inf  # bytes per second that the GPU's share of the disk reads and writes, together
    slowdown: float = 0.0  # by what share of its time a product takes longer during a collective; 0 at peak rates

    @classmethod
    def of(cls, topology: Topology) -> "Device":
        """Return the GPU of a topology, at peak rates."""
        text = target_config(topology.kind)
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
            per_host=topology.per_host,
            **LINKS[topology.kind],
        )

    def usable(self, memory: int | None) -> int:
        """Return the bytes that a program may use: `memory`, or the share `USABLE` of the GPU if `memory` is None."""
        return int(USABLE * self.memory) if memory is None else memory

    def fitted(self, memory: int | None) -> int:
        """Return the bytes for a step with `memory="auto"`: `usable(memory)`, or fewer to keep collectives hidden."""
        return min(self.usable(memory), int(USABLE * SCHEDULED * self.memory))

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s of products of an HLO type, or the scalar rate if no matrix unit supports the type."""
        return self.rates.get(dtype, self.scalar)

    def ring_bandwidth(self, group: Sequence[int]) -> float:
        """Return the bytes per second that each device of a group sends over a ring.

        Between hosts, the data is spread over the network adapters of the group's devices in a host. So the host with
        the fewest of these devices is the slowest. `group` has the devices' numbers in the mesh, where the devices of
        one host have adjacent numbers.
        """
        in_host = Counter(device // self.per_host for device in group)
        if len(in_host) <= 1:
            return self.link
        return min(self.link, self.network * min(in_host.values()))


@dataclasses.dataclass(frozen=True)
class Rates:
    """The achievable rates of one GPU. A rate of None stands for the usual share of the peak rate."""

    device: str = ""  # the GPU, as JAX calls it, such as `"NVIDIA H200"`; empty: the GPU of the topology
    # FLOP/s of matrix products, by the HLO type of the operands, such as `"bf16"`
    products: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory: float | None = None  # bytes per second that memory reads and writes
    link: float | None = None  # bytes per second that a GPU sends in a collective within its host
    network: float | None = None  # bytes per second that a GPU sends in a collective between hosts
    host_link: float | None = None  # bytes per second in each direction between the GPU and its host
    disk: float | None = None  # bytes per second that the GPU's share of the disk reads and writes, together
    # by what share of its time a product takes longer while a collective runs, such as 0.35
    slowdown: float | None = None

    @classmethod
    def parse(cls, given: Any) -> "Rates":
        """Read rates from a mapping of the attributes, or from a file of `zerojax doctor --json`. None: usual rates."""
        if isinstance(given, Rates):
            return given
        where, values = "rates=", given
        if isinstance(given, str | Path):
            where, values = f"rates={str(given)!r}", _read_rates(Path(given))
        if not isinstance(values, Mapping | None):
            raise ValueError(f"{where} must be a path or a dict of measured rates, not a {type(values).__name__}.")
        values = dict(values or {})
        if unknown := [str(name) for name in values if name not in cls.__annotations__]:
            known = ", ".join(cls.__annotations__)
            raise ValueError(f"{where} has an unknown rate: {', '.join(unknown)}. Known are {known}.")
        number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
        positive = lambda x: number(x) and x > 0, "a number above 0, per second"
        checks = {
            "device": (lambda x: isinstance(x, str), "a name such as 'NVIDIA H200'"),
            "products": (lambda x: isinstance(x, Mapping), "FLOP/s by type, such as {'bf16': 7.9e14}"),
            "slowdown": (lambda x: number(x) and 0 <= x < 10, "a share of a product's time, such as 0.35"),
        }
        values = {name: x for name, x in values.items() if x is not None}
        products = values.get("products")
        by_type = {f"products {dtype}": x for dtype, x in products.items()} if isinstance(products, Mapping) else {}
        for name, x in (values | by_type).items():
            is_valid, what = checks.get(name, positive)
            if not is_valid(x):
                raise ValueError(f"{where}: {name} must be {what}, not {x!r}.")
        return cls(**values)

    def of(self, topology: Topology) -> Device:
        """Return the GPU of a topology, at achievable rates."""
        device, kind = Device.of(topology), topology.kind
        if self.device and kind_of(self.device) != kind:
            raise ValueError(f"The rates were measured on {self.device!r}, and this plan is for {kind}. {MEASURE}.")
        if unknown := [dtype for dtype in self.products if dtype not in device.rates]:
            raise ValueError(
                f"The rates of products name {', '.join(unknown)}, a type without matrix units on {kind}. Known are "
                f"{', '.join(device.rates)}."
            )
        share = PRODUCTS[kind]
        pairs = {f"products {dtype}": (rate, device.rate(dtype)) for dtype, rate in self.products.items()}
        pairs |= {"memory": (self.memory, device.bandwidth), "link": (self.link, device.link)}
        for name, (measured, peak) in pairs.items():  # without `network`: a host's adapters may be faster than usual
            if measured is not None and measured > EXCESS * peak:
                raise ValueError(
                    f"The rates were not measured on {kind}: {name} is {measured:.3g} per second, and the peak rate of "
                    f"{kind} is {peak:.3g}."
                )
        return dataclasses.replace(
            device,
            bandwidth=self.memory or device.bandwidth,
            rates={dtype: share * rate for dtype, rate in device.rates.items()} | dict(self.products),
            scalar=share * device.scalar,
            link=self.link or LINK_SHARE * device.link,
            network=self.network or LINK_SHARE * device.network,
            host_link=self.host_link or device.host_link,
            disk=self.disk or math.inf,
            slowdown=SLOWDOWN if self.slowdown is None else self.slowdown,
        )

    def described(self, kind: str) -> str:
        """Return a sentence that says which rates count as achievable."""
        usual = {
            "products": f"products {PRODUCTS[kind]:.0%} of peak",
            "memory": "memory peak",
            "link": f"link {LINK_SHARE:.0%} of peak",
            "network": f"network {LINK_SHARE:.0%} of peak",
            "slowdown": f"products {SLOWDOWN:.0%} slower during collectives",
        }
        measured = [name for name in usual if getattr(self, name) not in (None, {})]
        assumed = ", ".join(text for name, text in usual.items() if name not in measured)
        if not measured:
            return f"Achievable rates are the usual rates of {kind}: {assumed}."
        rest = f" Usual: {assumed}." if assumed else ""
        origin = f"were measured on {self.device}" if self.device else "are given"
        return f"Achievable rates {origin}: {', '.join(measured)}.{rest}"


def _read_rates(path: Path) -> dict[str, Any]:
    """Return the measured rates in the findings that `zerojax doctor --json` wrote to the file at `path`."""
    try:
        findings = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"rates={str(path)!r} cannot be read: {error.strerror or error}. {MEASURE}.") from None
    except ValueError as error:
        raise ValueError(f"rates={str(path)!r} is not JSON: {error}. {MEASURE}.") from None
    values: dict[str, Any] = {}
    for finding in findings if isinstance(findings, list) else ():
        if isinstance(finding, dict) and isinstance(found := finding.get("measured"), dict):
            values |= found
    if set(values) <= {"device"}:
        raise ValueError(f"rates={str(path)!r} has no measured rates. {MEASURE}.")
    if not values.get("device"):
        raise ValueError(f"rates={str(path)!r} does not name the device on which it was measured. {MEASURE}.")
    return values
