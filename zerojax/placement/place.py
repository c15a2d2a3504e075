"""Bring parameters, whatever they are and wherever they lie, to where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.offload.host import KINDS, check_host_memory, to_device
from zerojax.placement.storage import cast, named, read

if TYPE_CHECKING:
    from jaxtyping import PyTree


def as_stored(params: PyTree, layout: Layout) -> list:
    """`read` for arrays and shapes alike; storage shape."""
    if are_shapes(params):
        return [jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype) for leaf in layout.params]
    return read(params, layout.params)


def are_shapes(params: PyTree) -> bool:
    """Whether a tree is of shapes, not of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def placed(config: Config, layout: Layout, params: PyTree) -> list:
    """A copy of the parameters where they are stored, in the types they have; storage shape.

    Raises:
        MemoryError: If some are to wait in host memory, and there is not enough of it.
    """
    if not are_shapes(params):
        check_host_room(config, layout)
    return [place(x, named(config, leaf)) for x, leaf in zip(as_stored(params, layout), layout.params, strict=True)]


def check_host_room(config: Config, layout: Layout) -> None:
    """Refuse to put parameters into host memory that has no room for them.

    Raises:
        MemoryError: Saying how much is needed, and how much there is.
    """
    if held := sum(leaf.local_bytes for leaf in layout.params if leaf.host):
        check_host_memory(config.mesh, held, "What waits of the parameters")


def place(x: Any, sharding: NamedSharding) -> Any:
    """Lay a copy of one array out, so that donating it spares the caller's."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding.memory_kind in KINDS:
        return away(x, sharding)
    x = to_device(x) if isinstance(x, jax.Array) else x
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    # device_put may share a shard with the array it is given, even when told not to (seen on jax 0.10.2)
    return jax.device_put(jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, sharding)


def away(x: Any, sharding: NamedSharding) -> Any:
    """A copy of one array in host memory, where it is when this returns: so the device never holds two leaves."""
    # By way of the device, or an array that is on the host already would share its shards with the copy.
    there = jax.device_put(to_device(x) if isinstance(x, jax.Array) else x, sharding)
    return there if isinstance(there, jax.core.Tracer) else jax.block_until_ready(there)


def cast_placed(config: Config, layout: Layout, arrays: list, like: Sequence[Leaf]) -> list:
    """Placed parameters in the types of `like`."""
    types = [leaf.dtype for leaf in like]
    if all(x.dtype == dtype for x, dtype in zip(arrays, types, strict=True)):
        return arrays
    where = [named(config, leaf) for leaf in layout.params]
    # What waits in host memory is converted leaf by leaf, as one program would hold all of it on the device.
    near = [i for i, leaf in enumerate(layout.params) if not leaf.host]
    some = jax.jit(cast, static_argnums=1, out_shardings=[where[i] for i in near])
    done = dict(zip(near, some([arrays[i] for i in near], tuple(types[i] for i in near)), strict=True))
    return [done[i] if i in done else recast(x, types[i], where[i]) for i, x in enumerate(arrays)]


def recast(x: Any, dtype: Any, sharding: NamedSharding) -> Any:
    """An array of host memory in another type; nothing can be converted where it waits."""
    return x if x.dtype == dtype else away(to_device(x).astype(dtype), sharding)
