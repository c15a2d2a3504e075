"""GPUs that are not there: a mesh to compile for on a machine without any.

Needs the extra `aot`: the CUDA compiler plugin, of jaxlib's version, and no driver.
"""

import dataclasses
import functools
import importlib.resources
import importlib.util
import re

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

KINDS = ("h100", "h200")


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
        """Read `"h200:8"` (one machine of eight) or `"h200:8x8"` (eight machines of eight).

        Args:
            text: The GPU's name, a colon, and how many; hosts before devices.

        Returns:
            The topology.

        Raises:
            ValueError: If the text is not of this form or the GPU is unknown.
        """
        found = re.fullmatch(r"([\w\-]+):(?:(\d+)x)?(\d+)", text)
        if not found or found.group(1) not in KINDS or "0" in (found.group(2), found.group(3)):
            raise ValueError(
                f"Unknown topology {text!r}. Give a GPU and how many, like 'h200:8' for one machine or 'h200:8x8' for "
                f"eight machines of eight; the GPUs known are {', '.join(KINDS)}."
            )
        return cls(found.group(1), int(found.group(2) or 1), int(found.group(3)))


def absent_mesh(topology: str, *, axis: str = "data") -> Mesh:
    """A mesh of absent GPUs on one axis, to lower and compile for.

    Args:
        topology: As `Topology.parse` reads it.
        axis: Name of the axis.

    Returns:
        A mesh with Auto axes. Programs can be compiled for it, not run.

    Raises:
        ValueError: If the topology is unknown.
        ModuleNotFoundError: If the extra `aot` is not installed.
    """
    parsed = Topology.parse(topology)
    if not installed():
        raise ModuleNotFoundError(
            "Compiling for absent GPUs needs the CUDA compiler plugin, of the same version as jaxlib. "
            'Install it with pip install "zerojax[aot]"; no driver and no other CUDA package is needed.'
        )
    return Mesh(np.array(_devices(parsed)), (axis,))


def installed() -> bool:
    """Whether the compiler plugin is there."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (13, 12)
    )


@functools.cache
def _devices(topology: Topology) -> list:
    """Descriptions of the devices; making them twice would make them differ."""
    figures = importlib.resources.files("zerojax.planning").joinpath("targets", f"{topology.kind}.txtpb").read_text()
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=topology.kind,
        topology=f"1x{topology.hosts}x{topology.devices}",
        target_config=figures,
    )
    return list(described.devices)
