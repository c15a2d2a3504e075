"""A mesh in a form that can be pickled, which the pickle of a transformation contains."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


@dataclasses.dataclass(frozen=True)
class MeshRecord:
    """A mesh without its devices. `device_ids` are in the mesh's order."""

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    axis_types: tuple[AxisType, ...]
    platform: str
    device_ids: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> MeshRecord:
        devices = list(mesh.devices.flat)
        ids = tuple(device.id for device in devices)
        return cls(mesh.devices.shape, mesh.axis_names, tuple(mesh.axis_types), devices[0].platform, ids)

    def mesh(self) -> Mesh:
        """Rebuild the mesh from the devices of this process. Raise a ValueError if a device is missing."""
        try:
            devices = {device.id: device for device in jax.devices(self.platform)}
        except RuntimeError:  # this process has no such platform
            devices = {}
        if missing := [i for i in self.device_ids if i not in devices]:
            axes = dict(zip(self.axis_names, self.shape, strict=True))
            raise ValueError(
                f"A pickled transformation has a mesh {axes} with the {self.platform} devices {list(self.device_ids)}, "
                f"and this process has no device {missing[0]}, only {sorted(devices) or 'devices of other platforms'}. "
                f"A mesh is rebuilt from device ids: load the transformation where JAX sees the same devices (after "
                f"jax.distributed.initialize), or make it there with zero_shard."
            )
        found = np.array([devices[i] for i in self.device_ids]).reshape(self.shape)
        return Mesh(found, self.axis_names, axis_types=self.axis_types)
