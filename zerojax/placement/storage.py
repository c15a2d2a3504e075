"""Place parameters, and convert trees of parameters between the caller's form and lists of stored arrays.

A tree in logical form has arrays of logical shape. A tree in storage form has a `Padded` node for each array that is
padded. Public functions return trees in the form of their arguments, so that `jax.tree.map` can combine them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree, Shaped

from zerojax import compat, names
from zerojax.comm.manual import ManualCollectives
from zerojax.comm.mesh import mapped, owned, replicated
from zerojax.config import Config
from zerojax.config.data_mesh import axes_of
from zerojax.layout.leaf import Leaf, is_padded, is_stored_node, pad, replace_items, trim
from zerojax.layout.tree import Layout


def is_on_host(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def leaves_of(params: PyTree) -> list:
    """Return the leaves of a tree. A `Padded` node counts as one leaf, and so does a parameter on disk."""
    return jax.tree.leaves(params, is_leaf=is_stored_node)


# The padded dim of a `Padded` node and the dim's size in storage; None for a plain array.
Form = tuple[int, int] | None


def padded_forms(params: PyTree) -> tuple[Form, ...]:
    """Return the form of each leaf. The tree may have been padded for another stage or number of devices."""
    return tuple((x.dim, x.storage.shape[x.dim]) if is_padded(x) else None for x in leaves_of(params))


def storage_leaves(params: PyTree, leaves: Sequence[Leaf]) -> list[Shaped[Array, "*storage"]]:
    """Return the arrays of `params` in storage shape. `params` may be in logical or storage form."""

    def stored(x, leaf: Leaf):
        if is_padded(x):
            if x.storage.shape == leaf.storage_shape:
                return x.storage
            x = logical_array(x)  # x was padded for another stage or number of devices
        if leaf.dim is None or x.shape == leaf.storage_shape:
            return x
        return pad(to_device(x), leaf.dim, leaf.storage_shape[leaf.dim])

    return [stored(x, leaf) for x, leaf in zip(leaves_of(params), leaves, strict=True)]


def logical_array(x: Any) -> Shaped[Array, "*logical"]:
    return dataclasses.replace(x, storage=to_device(x.storage)).logical() if is_padded(x) else to_device(x)


def return_to_host(config: Config, moved: Mapping[int, Array], leaves: Sequence[Leaf]) -> dict[int, Array]:
    """Return the new parameters `moved`, by index. Copy a parameter to the host if it is kept there."""
    return {i: jax.device_put(x, leaf_sharding(config, leaves[i])) if leaves[i].host else x for i, x in moved.items()}


def unflatten_params(stored: Sequence[Any], layout: Layout, leaves: Sequence[Leaf], forms: Sequence[Form]) -> PyTree:
    """Undo `storage_leaves`. Return a tree whose leaves have the given `forms`."""

    def in_form(x: Any, leaf: Leaf, form: Form) -> Any:
        if form is None:
            return unpadded(x, leaf)
        from zerojax.layout.padded import Padded

        dim, size = form
        if leaf.dim != dim or leaf.storage_shape[dim] != size:
            x = pad(to_device(unpadded(x, leaf)), dim, size)
        return Padded(x, leaf.shape, dim)

    return jax.tree.unflatten(layout.treedef, list(map(in_form, stored, leaves, forms)))


def storage_forms(leaves: Sequence[Leaf]) -> tuple[Form, ...]:
    padded = [leaf.dim if leaf.kind == "sharded" and leaf.padding > 0 else None for leaf in leaves]
    pairs = zip(leaves, padded, strict=True)
    return tuple(None if dim is None else (dim, leaf.storage_shape[dim]) for leaf, dim in pairs)


def in_storage(stored: Sequence[Any], layout: Layout) -> PyTree:
    forms = storage_forms(layout.params)
    if any(forms):
        from zerojax.layout.padded import register_with_flax

        register_with_flax()
    return unflatten_params(stored, layout, layout.params, forms)


@jax.named_scope(names.SHARDS)
def unpadded(stored: Shaped[Array, "*storage"], leaf: Leaf) -> Array:
    """Remove the padding of a stored array, unless the array is flat. An optimizer sees arrays in this form."""
    return stored if leaf.dim is None else trim(stored, leaf.dim, leaf.shape[leaf.dim])


def in_logical_shape(stored: Shaped[Array, "*storage"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    return trim(stored, 0, leaf.size).reshape(leaf.shape) if leaf.kind == "flat" else unpadded(stored, leaf)


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
    return [place_array(x, leaf_sharding(config, leaf)) for x, leaf in zip(stored, layout.params, strict=True)]


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
    if config.offload is not None and (needed := sum(leaf.local_bytes for leaf in layout.params if leaf.host)):
        config.offload.check_host_memory(config.mesh, needed)


def place_array(x: Any, sharding: NamedSharding) -> Any:
    """Return a copy of `x` with this `sharding`. Donating the copy does not delete the caller's array."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding.memory_kind not in (None, "device"):
        return copy_to_host(x, sharding)
    x = to_device(x)
    if isinstance(x, jax.core.Tracer) or compat.is_tracing():  # device_put would replicate constants of a program
        return jax.lax.with_sharding_constraint(x, sharding)
    # device_put may share a shard with its argument, even with may_alias=False (seen on jax 0.10.2)
    return jax.device_put(jnp.array(x, copy=True) if isinstance(x, jax.Array) else owned(x), sharding)


def copy_to_host(x: Any, sharding: NamedSharding) -> Any:
    """Copy one array to host memory. Wait for the copy, so that the device never holds two leaves at once."""
    # Copy through the device. Otherwise, the copy of an array in host memory would share the array's shards.
    return jax.block_until_ready(jax.device_put(to_device(x) if isinstance(x, jax.Array) else owned(x), sharding))


def cast_params(config: Config, layout: Layout, arrays: list, like: Sequence[Leaf]) -> list:
    """Cast `arrays`, which are parameters in `layout`, to the types of `like`."""
    others = [i for i, x in enumerate(arrays) if x.dtype != like[i].dtype]
    shardings = {i: leaf_sharding(config, layout.params[i]) for i in others}
    # Cast parameters in host memory one by one, because one program would hold all of them on the device.
    on_device = [i for i in others if not layout.params[i].host]
    program = jax.jit(cast, static_argnums=1, out_shardings=[shardings[i] for i in on_device])
    results = program([arrays[i] for i in on_device], tuple(like[i].dtype for i in on_device)) if on_device else []
    done = dict(zip(on_device, results, strict=True))
    for i in others:
        if i not in done:  # cast on the device, because JAX cannot cast in host memory
            done[i] = copy_to_host(to_device(arrays[i]).astype(like[i].dtype), shardings[i])
    return [done.get(i, x) for i, x in enumerate(arrays)]


@jax.named_scope(names.SHARDS)
def pin_to_plan(
    config: Config, stored: Sequence[Shaped[Array, "*storage"]], leaves: Sequence[Leaf]
) -> list[Shaped[Array, "*storage"]]:
    """Constrain stored arrays to their layouts along the data axes, under `jax.jit`. Skip arrays in host memory.

    `comm.mesh.constrain` lets the compiler choose the layout of a replicated leaf if the mesh has other axes. In a loop
    over steps, the compiler would shard the leaf between steps, and gather it twice (for the loss and the update).
    """
    pinned = [i for i, x in enumerate(stored) if not is_on_host(x)]
    axes = config.data.batch
    specs = [leaves[i].spec_over(axes) for i in pinned]
    same = mapped(lambda arrays: arrays, mesh=config.mesh, in_specs=(specs,), out_specs=specs, axis_names=set(axes))
    return replace_items(stored, pinned, same([stored[i] for i in pinned]))


@jax.named_scope(names.SHARDS)
def cast(arrays: Sequence[Array], dtypes: Sequence) -> list[Array]:
    """Cast `arrays` to `dtypes` on the device. An array that already has its type is returned unchanged."""
    return [x if x.dtype == dtype else to_device(x).astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def leaf_sharding(config: Config, leaf: Leaf) -> NamedSharding:
    if not leaf.host:
        return NamedSharding(config.mesh, leaf.spec)
    assert config.offload is not None
    return config.offload.host_sharding(config.mesh, leaf.spec)


def sharding_tree(config: Config, treedef: Any, leaves: Sequence[Leaf]) -> PyTree:
    return jax.tree.unflatten(treedef, [leaf_sharding(config, leaf) for leaf in leaves])


def shapes(leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


def gather(
    config: Config, stored: Sequence[Shaped[Array, "*storage"]], leaves: Sequence[Leaf], targets: Sequence[Leaf]
) -> list[Array]:
    """All-gather stored arrays into the layouts `targets`. Flat leaves share one bucket.

    A result has logical shape if its target is replicated, and storage shape if its target is sharded over fewer axes.
    """
    axes = config.data.batch
    comm = ManualCollectives(axes, bucket_bytes=0)
    specs = [leaf.spec for leaf in leaves]
    pairs = zip(leaves, targets, strict=True)
    moved = [leaf if target.kind == "replicated" else target.divided(axes) for leaf, target in pairs]
    if all(leaf.shards == 1 for leaf in moved):
        trios = zip(stored, leaves, targets, strict=True)
        return [in_logical_shape(x, leaf) if target.kind == "replicated" else x for x, leaf, target in trios]
    return mapped(
        lambda shards: comm.all_gather(shards, moved),
        mesh=config.mesh,
        in_specs=(specs,),
        out_specs=[target.spec for target in targets],
        # All axes are manual, because XLA would first gather a leaf along the axes that are not manual.
        axis_names={*axes, *axes_of(*specs)},
    )(list(stored))


def is_placed(mesh: Mesh, x: Any) -> bool:
    return isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat)
