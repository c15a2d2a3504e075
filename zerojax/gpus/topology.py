"""Make meshes of GPUs that this machine does not have, so that it can compile programs for them.

This needs the extra `aot`, which installs the CUDA compiler plugin of jaxlib's version. It needs no driver.
"""

import dataclasses
import functools
import importlib.resources
import importlib.util
import math
import re
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

KINDS = ("a100-80", "b200", "h100", "h200")
GPUS_PER_HOST = 8


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

        Raises:
            ValueError: If the text has another form, or the GPU is unknown.
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

    One name in `axes` is for all GPUs. Two names are for the hosts, and for the GPUs of a host.
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
    """Return a mesh of GPUs that this machine does not have, with the axes of `mesh`, of which `axes` divide the batch.

    If `axes` are two, the first is resized to the number of hosts, and the second to the GPUs left in a host. Otherwise
    the first is resized to fit all GPUs. All other axes keep their sizes.
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
    """Return a mesh without devices, for computing layouts. If there are several axes, the first has size `hosts`."""
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
    """Return descriptions of the topology's devices. Cache them, because JAX returns unequal devices in each call."""
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
