"""Place parameters by a layout, whatever they are and wherever they are; shapes are placed as shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax import compat
from zerojax.comm.mesh import replicated
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.offload.host import KINDS, check_host_memory, to_device
from zerojax.placement.storage import cast, named, storage_leaves

if TYPE_CHECKING:
    from jaxtyping import PyTree


def storage_of(params: PyTree, layout: Layout) -> list:
    """Return `storage_leaves` of arrays or of shapes, in storage shape."""
    if are_shapes(params):
        return [jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype) for leaf in layout.params]
    return storage_leaves(params, layout.params)


def are_shapes(params: PyTree) -> bool:
    """Return whether a tree has shapes and not arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def place_params(config: Config, layout: Layout, params: PyTree) -> list:
    """Copy the parameters into their layout, in the types they have, in storage shape.

    Raises:
        MemoryError: If some are for host memory, and there is not enough of it.
    """
    if not are_shapes(params):
        check_host_room(config, layout)
    stored = storage_of(params, layout)
    return [place_array(x, named(config, leaf)) for x, leaf in zip(stored, layout.params, strict=True)]


def place_replicated(mesh: Mesh, tree: PyTree, *, shapes: bool) -> PyTree:
    """Return a replicated copy of a tree of arrays and numbers, or its shapes and shardings if `shapes`."""
    sharding = replicated(mesh)

    def one(x):
        if shapes:
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)
        return place_array(x if isinstance(x, jax.Array) else np.asarray(x, jnp.result_type(x)), sharding)

    return jax.tree.map(one, tree)


def check_host_room(config: Config, layout: Layout) -> None:
    """Refuse to put parameters into host memory that has no room for them.

    Raises:
        MemoryError: Saying how much is needed, and how much there is.
    """
    if needed := sum(leaf.local_bytes for leaf in layout.params if leaf.host):
        check_host_memory(config.mesh, needed, "Offload(params=)")


def place_array(x: Any, sharding: NamedSharding) -> Any:
    """Copy one array into a sharding, so that donating the copy leaves the caller's array alone."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding.memory_kind in KINDS:
        return copy_to_host(x, sharding)
    x = to_device(x) if isinstance(x, jax.Array) else x
    if isinstance(x, jax.core.Tracer) or compat.is_tracing():  # a program's constants are replicated, placed or not
        return jax.lax.with_sharding_constraint(x, sharding)
    # device_put may share a shard with the array it is given, even when told not to (seen on jax 0.10.2)
    return jax.device_put(jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, sharding)


def copy_to_host(x: Any, sharding: NamedSharding) -> Any:
    """Copy one array to host memory. Blocks until done, so that the device never holds two leaves."""
    # By way of the device, or an array that is on the host already would share its shards with the copy.
    copy = jax.device_put(to_device(x) if isinstance(x, jax.Array) else x, sharding)
    return copy if isinstance(copy, jax.core.Tracer) else jax.block_until_ready(copy)


def cast_params(config: Config, layout: Layout, arrays: list, like: Sequence[Leaf]) -> list:
    """Return placed parameters in the types of `like`."""
    types = [leaf.dtype for leaf in like]
    if all(x.dtype == dtype for x, dtype in zip(arrays, types, strict=True)):
        return arrays
    shardings = [named(config, leaf) for leaf in layout.params]
    # Parameters in host memory are cast leaf by leaf: one program would hold all of them on the device.
    on_device = [i for i, leaf in enumerate(layout.params) if not leaf.host]
    program = jax.jit(cast, static_argnums=1, out_shardings=[shardings[i] for i in on_device])
    results = program([arrays[i] for i in on_device], tuple(types[i] for i in on_device))
    done = dict(zip(on_device, results, strict=True))
    return [done[i] if i in done else cast_on_host(x, types[i], shardings[i]) for i, x in enumerate(arrays)]


def cast_on_host(x: Any, dtype: Any, sharding: NamedSharding) -> Any:
    """Cast an array of host memory by way of the device, because nothing is computed in host memory."""
    return x if x.dtype == dtype else copy_to_host(to_device(x).astype(dtype), sharding)
