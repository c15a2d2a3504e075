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
from zerojax.layout.leaf import Leaf
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
    if (saved.kind == "flat") != (leaf.kind == "flat"):  # flat leaves are small, so every device reads all of it
        kind = "flat" if saved.kind == "flat" else "replicated"
        source = dataclasses.replace(source, kind=kind, dim=None, shards=1)
        mesh = getattr(sharding, "mesh", None)
        sharding = sharding if mesh is None else NamedSharding(mesh, PartitionSpec())
        shape = source.storage_shape
    request = ReadRequest(saved, shape, sharding)
    return request, None if source == leaf else Conversion(source, leaf, array.sharding)


def convert(x: Any, conversion: Conversion) -> Any:
    """Convert a stored array on its devices. Equal conversions share a program."""
    return converter(conversion)(x)


@functools.lru_cache(maxsize=256)
def converter(conversion: Conversion):
    source, target, sharding = conversion

    def program(x):
        return in_storage_shape(in_logical_shape(to_device(x), source), target).astype(target.dtype)

    return jax.jit(program, out_shardings=sharding)
