"""GPUs that are not there: a mesh to compile for on a machine without any.

Needs the extra `aot`: the CUDA compiler plugin, of jaxlib's version, and no driver.
"""

import dataclasses
import functools
import importlib.resources
import importlib.util
import math
import re

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

KINDS = ("a100-80", "b200", "h100", "h200")
IN_A_HOST = 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """Absent GPUs: `hosts` machines of `devices` each.

    Attributes:
        kind: One of `KINDS`.
        hosts: Number of machines.
        devices: GPUs in each.
    """

    kind: str
    hosts: int
    devices: int

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Read `"h200:8"` (one machine of eight), `"h200:64"` or `"h200:8x8"` (eight machines of eight).

        A machine has eight, so a multiple of eight is as many machines; any other number is one machine.

        Args:
            text: The GPU's name, a colon, and how many; hosts before devices.

        Returns:
            The topology.

        Raises:
            ValueError: If the text is not of this form or the GPU is unknown.
        """
        found = re.fullmatch(r"([\w\-]+):(?:(\d+)x)?(\d+)", text)
        if not found or found.group(1) not in KINDS or 0 in (int(n) for n in found.groups()[1:] if n):
            raise ValueError(
                f"Unknown topology {text!r}. Give a GPU and how many, like 'h200:8' for one machine, 'h200:64' or "
                f"'h200:8x8' for eight machines of eight; the GPUs known are {', '.join(KINDS)}."
            )
        kind, hosts, devices = found.group(1), found.group(2), int(found.group(3))
        if hosts is None and devices % IN_A_HOST == 0:
            hosts, devices = devices // IN_A_HOST, IN_A_HOST
        return cls(kind, int(hosts or 1), devices)

    @property
    def size(self) -> int:
        """GPUs in all."""
        return self.hosts * self.devices


def absent_mesh(topology: str, *, axes: tuple[str, ...] = ("data",)) -> Mesh:
    """A mesh of absent GPUs, to lower and compile for.

    Args:
        topology: As `Topology.parse` reads it.
        axes: One axis for all GPUs, or two: the machines, and the GPUs of a machine.

    Returns:
        A mesh with Auto axes. Programs can be compiled for it, not run.

    Raises:
        ValueError: If the topology is unknown, or more axes are named than it has levels.
        ModuleNotFoundError: If the extra `aot` is not installed.
    """
    parsed = Topology.parse(topology)
    if not installed():
        raise ModuleNotFoundError(
            "Compiling for absent GPUs needs the CUDA compiler plugin, of the same version as jaxlib. "
            'Install it with pip install "zerojax[aot]"; no driver and no other CUDA package is needed.'
        )
    if len(axes) > 2:
        raise ValueError(f"{topology!r} has two levels, machines and GPUs, and the axes are {axes}. Name one or two.")
    shape = (parsed.size,) if len(axes) == 1 else (parsed.hosts, parsed.devices)
    return Mesh(np.array(_devices(parsed)).reshape(shape), axes)


def absent_like(mesh: Mesh, topology: str, *, axes: tuple[str, ...]) -> Mesh:
    """A mesh of absent GPUs with the axes of another mesh.

    Args:
        mesh: Whose axes, and types of axes, are wanted.
        topology: As `Topology.parse` reads it.
        axes: The data axes, of which the first grows or shrinks to the number of GPUs; the
            others keep their sizes. Empty: none does.

    Raises:
        ValueError: If the topology is unknown, or the axes do not multiply to its GPUs.
        ModuleNotFoundError: If the extra `aot` is not installed.
    """
    devices = absent_mesh(topology).devices.flatten()
    sizes = dict(mesh.shape)
    if axes:
        fixed = mesh.size // sizes[axes[0]]
        sizes[axes[0]] = max(1, devices.size // fixed)
    if math.prod(sizes.values()) != devices.size:
        grows = f"axis {axes[0]!r} can grow, the others stay" if axes else "no axis is known to grow"
        raise ValueError(
            f"The mesh {dict(mesh.shape)} does not fit {topology!r}, which has {devices.size} devices: {grows}. "
            f"Give as many devices as the axes multiply to."
        )
    return Mesh(devices.reshape(tuple(sizes.values())), mesh.axis_names, axis_types=mesh.axis_types)


def installed() -> bool:
    """Whether the compiler plugin is there."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (13, 12)
    )


def target(kind: str) -> str:
    """XLA's description of a GPU, as text."""
    return importlib.resources.files("zerojax.gpus").joinpath("targets", f"{kind}.txtpb").read_text()


@functools.cache
def _devices(topology: Topology) -> list:
    """Descriptions of the devices; making them twice would make them differ."""
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology.kind,
        topology=f"1x{topology.hosts}x{topology.devices}",
        target_config=target(topology.kind),
    )
    return list(described.devices)
