"""Choose and check the mesh, and make the shardings that depend only on the mesh and a leaf."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zerojax.comm.buckets import flatten
from zerojax.config import DataMesh
from zerojax.config.data_mesh import in_words, spec_entry
from zerojax.layout.leaf import Leaf, pad


def resolve_mesh(mesh: Mesh | None, axes: tuple[str, ...]) -> Mesh:
    """Check the given mesh, which may have GPUs that this machine does not have. None: all devices on one axis."""
    if mesh is None:
        if len(axes) > 1:
            raise ValueError(
                f"axis={axes!r} names several axes, and no mesh says how the devices are divided over them. "
                f"Pass mesh=jax.make_mesh(sizes, {axes!r})."
            )
        return jax.make_mesh((jax.device_count(),), axes, axis_types=(AxisType.Auto,))
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh= must be a jax.sharding.Mesh, not {type(mesh).__name__}. Build one with jax.make_mesh.")
    if missing := tuple(axis for axis in axes if axis not in mesh.axis_names):
        raise ValueError(
            f"The mesh has no {in_words(missing)}: its axes are {mesh.axis_names}. Name the data axis with axis=, "
            f"or build the mesh with an axis called {missing[0]!r}."
        )
    if mesh.manual_axes:
        raise ValueError(
            f"The mesh has Manual axes: {', '.join(map(repr, mesh.manual_axes))}, as inside of shard_map. zerojax "
            f"writes its own shard_map: give the mesh from outside, whose axes are Auto or Explicit."
        )
    return mesh


def constrain(mesh: Mesh, stored: jax.Array, leaf: Leaf) -> jax.Array:
    spec = leaf.spec
    if len(mesh.axis_names) > 1 and not leaf.others:  # the compiler chooses the sharding over the other axes
        free = PartitionSpec.UNCONSTRAINED
        spec = PartitionSpec(*(s or free for s in (*spec, *[None] * (stored.ndim - len(spec)))))
    return jax.lax.with_sharding_constraint(stored, NamedSharding(mesh, spec))


def in_storage_shape(value: jax.Array, leaf: Leaf) -> jax.Array:
    """Pad or flatten a logical array as its layout says. A flat array that is already in storage shape is unchanged."""
    if leaf.kind == "flat":
        return flatten(value, leaf)
    return value if leaf.dim is None else pad(value, leaf.dim, leaf.storage_shape[leaf.dim])


def to_storage(mesh: Mesh, value: jax.Array, leaf: Leaf) -> jax.Array:
    return constrain(mesh, in_storage_shape(value, leaf), leaf)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, data: DataMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(spec_entry(data.batch)))


def owned(x: Any) -> Any:
    """Return a copy of a NumPy array, and any other value unchanged.

    `jax.device_put` may share the memory of a NumPy array, even with `may_alias=False`, or read it after the call. So
    a caller that then writes to its array would change values that were placed before.
    """
    return np.array(x) if isinstance(x, np.ndarray) else x


def row_shardings(mesh: Mesh, data: DataMesh, tree: Any, batch: Any) -> Any:
    """Return shardings for `tree`. Arrays with as many rows as the batch are sharded like it, others replicated."""
    counts = {x.shape[0] for x in jax.tree.leaves(batch)}
    one = lambda x: batch_sharding(mesh, data) if set(x.shape[:1]) & counts else replicated(mesh)
    return jax.tree.map(one, tree)


def wait_if_simulated(mesh: Mesh, arrays: Any) -> Any:
    """Return `arrays`. If the devices of `mesh` are simulated on a CPU, first wait until the arrays are computed.

    Simulated devices share one pool of threads. If two programs run at the same time, their collectives block each
    other until XLA aborts.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(arrays)
    return arrays
