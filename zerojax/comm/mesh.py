"""The mesh: the default one, and what a given one must be."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def resolve_mesh(mesh: Mesh | None, axis: str) -> Mesh:
    """The mesh to use: the one given, checked, or all devices on one axis.

    Args:
        mesh: A mesh with Auto axes, of real or absent devices; None for all devices.
        axis: The axis that parameters, gradients and optimizer state are divided over.

    Returns:
        A mesh that has `axis`.

    Raises:
        TypeError: If `mesh` is no `jax.sharding.Mesh`.
        ValueError: If the mesh does not have `axis`, or has Explicit or Manual axes.
    """
    if mesh is None:
        return jax.make_mesh((jax.device_count(),), (axis,), axis_types=(AxisType.Auto,))
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh= must be a jax.sharding.Mesh, not {type(mesh).__name__}. Build one with jax.make_mesh.")
    if axis not in mesh.axis_names:
        raise ValueError(
            f"The mesh has no axis {axis!r}: its axes are {mesh.axis_names}. Name the data axis with axis=, "
            f"or build the mesh with an axis called {axis!r}."
        )
    other = {name: kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto}
    if other:
        raise ValueError(
            f"The mesh has axes that are not Auto: {', '.join(f'{n!r} is {k.name}' for n, k in other.items())}. "
            f"zerojax leaves other axes to the compiler, which needs Auto axes: "
            f"jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * {len(mesh.axis_names)})."
        )
    return mesh


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh, axis: str) -> NamedSharding:
    """Dim 0 divided over the data axis: how a batch lies."""
    return NamedSharding(mesh, PartitionSpec(axis))
