"""Read a saved leaf into another layout, either directly or with a conversion on the devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from zerojax.checkpoint.arrays import ReadRequest
from zerojax.comm.mesh import in_storage_shape
from zerojax.config.data_mesh import dim_spec
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import best_dim
from zerojax.offload.host import to_device
from zerojax.placement.storage import in_logical_shape

if TYPE_CHECKING:
    from zerojax.checkpoint.manifest import SavedLeaf


class Conversion(NamedTuple):
    """A conversion from one layout and type to another, which runs on the devices after a leaf is read."""

    source: Leaf
    target: Leaf
    sharding: Sharding  # sharding of the result


def read_plan(saved: SavedLeaf, leaf: Leaf, array: Any) -> tuple[ReadRequest, Conversion | None]:
    """Return the request to read a saved leaf, and the conversion that is needed afterwards, or None.

    Sharded and replicated storage differ only in padding, which reading adds and trims. A leaf is converted on the
    devices if its type changes, or if exactly one of the two layouts is flat. `array` is an array, or a shape, with the
    wanted storage shape and sharding.
    """
    shape = tuple(array.shape)
    if saved.key is not None:
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, array.dtype))
        return ReadRequest(saved, tuple(data.shape), array.sharding), None
    source, sharding = dataclasses.replace(leaf, dtype=jnp.dtype(saved.dtype)), array.sharding
    if (saved.kind == "flat") != (leaf.kind == "flat"):
        source, sharding = sharded_by_dim(source, sharding)
        if saved.kind == "flat":
            source, sharding = flat(source, sharding, array.sharding)
        shape = source.storage_shape
    request = ReadRequest(saved, shape, sharding)
    return request, None if source == leaf else Conversion(source, leaf, array.sharding)


def sharded_by_dim(leaf: Leaf, sharding: Sharding) -> tuple[Leaf, Sharding]:
    """Return a layout for the step between flat and other storage. It is sharded if possible, to save device memory."""
    replicated = dataclasses.replace(leaf, kind="replicated", dim=None)
    if not isinstance(sharding, NamedSharding):
        return replicated, sharding
    if not leaf.shape or not set(leaf.axes) <= set(sharding.mesh.axis_names):
        return replicated, NamedSharding(sharding.mesh, PartitionSpec())
    dim = best_dim(leaf.shape, list(range(len(leaf.shape))), leaf.shards)
    sharded = dataclasses.replace(leaf, kind="sharded", dim=dim)
    return sharded, NamedSharding(sharding.mesh, dim_spec(dim, leaf.axes))


def flat(leaf: Leaf, sharding: Sharding, wanted: Sharding) -> tuple[Leaf, Sharding]:
    """Return a flat layout that is sharded over the leaf's axes if the mesh has them. Without a mesh, use one shard."""
    leaf = dataclasses.replace(leaf, kind="flat", dim=None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None and set(leaf.axes) <= set(mesh.axis_names):
        sharding = NamedSharding(mesh, leaf.spec)
    return dataclasses.replace(leaf, shards=1) if sharding is wanted else leaf, sharding


def convert(x: Any, conversion: Conversion) -> Any:
    """Convert a stored array on its devices. Equal conversions share a program."""
    return converter(conversion)(x)


@functools.lru_cache(maxsize=256)
def converter(conversion: Conversion):
    source, target, sharding = conversion

    def program(x):
        return in_storage_shape(in_logical_shape(to_device(x), source), target).astype(target.dtype)

    return jax.jit(program, out_shardings=sharding)
