"""A mesh in a form that can be pickled, which the pickle of a transformation contains."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def described(mesh: Mesh) -> tuple:
    """Return the arguments with which `rebuilt` makes an equal mesh."""
    devices = list(mesh.devices.flat)
    ids = tuple(device.id for device in devices)
    return mesh.devices.shape, mesh.axis_names, tuple(mesh.axis_types), devices[0].platform, ids


def rebuilt(
    shape: tuple[int, ...], names: tuple[str, ...], types: tuple[AxisType, ...], platform: str, ids: tuple[int, ...]
) -> Mesh:
    """Rebuild a mesh from the devices of this process. Raise a ValueError if a device is missing."""
    try:
        devices = {device.id: device for device in jax.devices(platform)}
    except RuntimeError:  # this process has no such platform
        devices = {}
    if missing := [i for i in ids if i not in devices]:
        axes = dict(zip(names, shape, strict=True))
        raise ValueError(
            f"A pickled transformation has a mesh {axes} with the {platform} devices {list(ids)}, "
            f"and this process has no device {missing[0]}, only {sorted(devices) or 'devices of other platforms'}. "
            f"A mesh is rebuilt from device ids: load the transformation where JAX sees the same devices (after "
            f"jax.distributed.initialize), or make it there with zero_shard."
        )
    found = np.array([devices[i] for i in ids]).reshape(shape)
    return Mesh(found, names, axis_types=types)
