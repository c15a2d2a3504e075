"""Compile a loss that names the caller's devices, in a `jax.shard_map` or in shardings, for other devices.

A step gets a mesh of the other devices from its configuration. A loss names meshes by itself: a closure of the loss
holds `tx.config.mesh`, or the mesh that the caller made. Only JAX sees these meshes, when it traces the loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from jax.sharding import AbstractMesh, Mesh

from zerojax.planning import compat


@dataclasses.dataclass(frozen=True)
class MovedMeshes:
    """Replaces the meshes that a loss names. The step's mesh becomes a mesh of other devices with the same axes."""

    given: Mesh  # the mesh of the step
    target: Mesh  # the mesh of the devices to compile for, with the axes of `given` in other sizes, perhaps

    def __call__(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        target = self.target
        if mesh.empty or is_made_of(target, mesh, unlike=self.given):
            return mesh
        same_axes = set(mesh.axis_names) == set(target.axis_names)
        if isinstance(mesh, AbstractMesh):
            if not same_axes or dict(mesh.shape) != dict(self.given.shape):
                return mesh
            sizes, kind = tuple(target.shape[axis] for axis in mesh.axis_names), target.abstract_mesh.abstract_device
            return mesh.update(axis_sizes=sizes, abstract_device=kind)
        if not same_axes:
            raise ValueError(
                f"The loss names a mesh {dict(mesh.shape)}, and the step's mesh is {dict(self.given.shape)}. Only the "
                f"step's mesh is known to become {dict(target.shape)}. Name the axes of the step's mesh in the loss."
            )
        devices = target.devices.transpose([target.axis_names.index(axis) for axis in mesh.axis_names])
        return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """Replaces the meshes that a loss names by meshes of one device for its own rows, in which each axis has size 1."""

    target: Mesh  # a mesh of one device
    data_axes: tuple[str, ...]  # the axes that divide the rows

    def __call__(self, mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        if mesh.size <= 1 and (isinstance(mesh, AbstractMesh) or is_made_of(self.target, mesh)):
            return mesh
        divided = [axis for axis, size in mesh.shape.items() if size > 1]
        if len(divided) > 1 and not set(divided) <= set(self.data_axes):
            raise ValueError(
                f"The loss names a mesh {dict(mesh.shape)}, and its cost is computed for one device, which has a share "
                f"of the rows and the whole model. Compile the step for all devices: zerojax.plan(step, state, batch, "
                f"topology=...)."
            )
        ones = (1,) * len(mesh.axis_names)
        if isinstance(mesh, AbstractMesh):
            return mesh.update(axis_sizes=ones, abstract_device=self.target.abstract_mesh.abstract_device)
        return Mesh(self.target.devices.reshape(ones), mesh.axis_names, axis_types=mesh.axis_types)


def is_made_of(target: Mesh, mesh: Mesh | AbstractMesh, *, unlike: Mesh | None = None) -> bool:
    """Return whether a mesh consists of devices of `target`, and does not have the same devices as `unlike`."""
    if isinstance(mesh, AbstractMesh):
        device = target.abstract_mesh.abstract_device
        return mesh.abstract_device == device and (unlike is None or unlike.abstract_mesh.abstract_device != device)
    devices = set(mesh.devices.flat)
    return devices <= set(target.devices.flat) and (unlike is None or devices != set(unlike.devices.flat))


@contextlib.contextmanager
def in_force(move: MovedMeshes | OnOneDevice) -> Iterator[dict[str, None]]:
    """Enter a context in which JAX traces, lowers and compiles functions as if they named the meshes of `move`."""
    notes: dict[str, None] = {}  # on meshes whose sizes were changed, as keys

    def replace(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
        moved = move(mesh)
        if dict(moved.shape) != dict(mesh.shape):
            notes[
                f"The loss names a mesh {dict(mesh.shape)}, which is planned as {dict(moved.shape)}. What Python "
                f"computes from its sizes keeps the value: in a shard_map, use jax.lax.axis_size instead."
            ] = None
        return moved

    with compat.kernels_for(move.target), compat.meshes_replaced(replace, key=move):
        yield notes
