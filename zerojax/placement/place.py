"""Copy parameters into a layout, or initialise them there. Given shapes, the functions return shapes with shardings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax import compat
from zerojax.comm.explicit import auto_context, to_auto
from zerojax.comm.mesh import owned, replicated
from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.offload.host import KINDS, check_host_memory, to_device
from zerojax.placement.storage import cast, named, storage_leaves

if TYPE_CHECKING:
    from jaxtyping import PyTree

MOST_PROGRAMS = 8


def storage_of(params: PyTree, layout: Layout) -> list:
    """Return `params` in storage shape, like `storage_leaves`. If `params` are shapes, return the storage shapes."""
    if are_shapes(params):
        return [jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype) for leaf in layout.params]
    return storage_leaves(params, layout.params)


def are_shapes(params: PyTree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))


def place_params(config: Config, layout: Layout, params: PyTree) -> list:
    """Copy parameters into their layout, and return them in storage shape. Do not cast them."""
    if not are_shapes(params):
        check_host_room(config, layout)
    stored = storage_of(params, layout)
    return [place_array(x, named(config, leaf)) for x, leaf in zip(stored, layout.params, strict=True)]


def place_replicated(mesh: Mesh, tree: PyTree, *, shapes: bool) -> PyTree:
    """Return a replicated copy of a tree of arrays and numbers. With `shapes`, return shapes with shardings."""
    sharding = replicated(mesh)

    def one(x):
        if shapes:
            return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)
        return place_array(x if isinstance(x, jax.Array) else np.asarray(x, jnp.result_type(x)), sharding)

    return jax.tree.map(one, tree)


def check_host_room(config: Config, layout: Layout) -> None:
    """Raise a `MemoryError` if the parameters that are kept in host memory do not fit there."""
    if needed := sum(leaf.local_bytes for leaf in layout.params if leaf.host):
        check_host_memory(config.mesh, needed, "Offload(params=)")


def place_array(x: Any, sharding: NamedSharding) -> Any:
    """Return a copy of `x` with this `sharding`. Donating the copy does not delete the caller's array."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding.memory_kind in KINDS:
        return copy_to_host(x, sharding)
    x = to_device(x) if isinstance(x, jax.Array) else x
    if isinstance(x, jax.core.Tracer) or compat.is_tracing():  # device_put would replicate constants of a program
        return jax.lax.with_sharding_constraint(x, sharding)
    # device_put may share a shard with its argument, even with may_alias=False (seen on jax 0.10.2)
    return jax.device_put(jnp.array(x, copy=True) if isinstance(x, jax.Array) else owned(x), sharding)


def copy_to_host(x: Any, sharding: NamedSharding) -> Any:
    """Copy one array to host memory. Wait for the copy, so that the device never holds two leaves at once."""
    # Copy through the device. Otherwise, the copy of an array in host memory would share the array's shards.
    copy = jax.device_put(to_device(x) if isinstance(x, jax.Array) else owned(x), sharding)
    return copy if isinstance(copy, jax.core.Tracer) else jax.block_until_ready(copy)


def cast_params(config: Config, layout: Layout, arrays: list, like: Sequence[Leaf]) -> list:
    """Cast `arrays`, which are parameters in `layout`, to the types of `like`."""
    types = [leaf.dtype for leaf in like]
    if all(x.dtype == dtype for x, dtype in zip(arrays, types, strict=True)):
        return arrays
    shardings = [named(config, leaf) for leaf in layout.params]
    # Cast parameters in host memory one by one, because one program would hold all of them on the device.
    on_device = [i for i, leaf in enumerate(layout.params) if not leaf.host]
    program = jax.jit(cast, static_argnums=1, out_shardings=[shardings[i] for i in on_device])
    results = program([arrays[i] for i in on_device], tuple(types[i] for i in on_device))
    done = dict(zip(on_device, results, strict=True))
    for i, x in enumerate(arrays):
        if i not in done:  # cast on the device, because JAX cannot cast in host memory
            done[i] = x if x.dtype == types[i] else copy_to_host(to_device(x).astype(types[i]), shardings[i])
    return [done[i] for i in range(len(arrays))]


def init_programs(
    config: Config, layout: Layout, init_fn: Callable, args: tuple, *, most: int = MOST_PROGRAMS
) -> list[Any]:
    """Return jitted functions of `args`. Each function initialises some parameters, and returns them in storage shape.

    A single program would hold the intermediate values of all leaves at once, which are several times the size of the
    leaves (seen on CPU, where jax 0.10 drops the barriers that would order the leaves).
    """
    jaxpr, consts = compat.opened(jax.make_jaxpr(init_fn)(*args))

    def some(indices, *args):
        leaves = jax.core.eval_jaxpr(jaxpr, consts, *jax.tree.leaves(args))
        with auto_context(config.user_mesh):
            return [x for i, x in enumerate(storage_leaves(to_auto(leaves), layout.params)) if i in indices]

    return [
        jax.jit(functools.partial(some, group), out_shardings=[named(config, layout.params[i]) for i in group])
        for group in groups(layout.params, most)
    ]


def groups(leaves: tuple[Leaf, ...], most: int = MOST_PROGRAMS) -> Iterator[tuple[int, ...]]:
    """Yield groups of consecutive leaf indices. The shards of several leaves in one group have limited bytes in total.

    The limit is half of the largest full leaf, or 1/`most` of all shards, whichever is larger.
    """
    local = [leaf.local_bytes for leaf in leaves]
    largest = max((leaf.bytes for leaf in leaves), default=0)
    budget = max(largest // 2, sum(local) // most)
    group: list[int] = []
    for i, size in enumerate(local):
        if group and sum(local[j] for j in group) + size > budget:
            yield tuple(group)
            group = []
        group.append(i)
    if group:
        yield tuple(group)
