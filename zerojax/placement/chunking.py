"""Slice each device's shard of an array into chunks, and join the chunks again."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from zerojax.comm.mapped import mapped
from zerojax.config import Config
from zerojax.layout.chunked import Chunked, Chunking, concrete_mesh
from zerojax.layout.leaf import Leaf
from zerojax.offload.host import host_sharding, to_memory
from zerojax.offload.read_ahead import read_ahead
from zerojax.offload.state_files import boxes_of
from zerojax.placement.storage import named

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped


def slice_chunk(
    mesh: Mesh, stored: Shaped[Array, "*storage"], leaf: Leaf, dim: int, start: Int[Array, ""] | int, length: int
) -> Shaped[Array, "*chunk"]:
    """Slice `length` elements on `dim`, from `start` on, out of every device's shard. Call this under `jax.jit`."""

    def local(x, start):
        return lax.dynamic_slice_in_dim(x, start, length, dim)

    return per_shard(mesh, local, leaf, 1)(stored, start)


def update_chunk(
    mesh: Mesh,
    stored: Shaped[Array, "*storage"],
    chunk: Shaped[Array, "*chunk"],
    leaf: Leaf,
    dim: int,
    start: Int[Array, ""] | int,
) -> Shaped[Array, "*storage"]:
    """Write `chunk` into every device's shard of `stored`, at `start` on `dim`. Call this under `jax.jit`."""

    def local(x, chunk, start):
        return lax.dynamic_update_slice_in_dim(x, chunk, start, dim)

    return per_shard(mesh, local, leaf, 2)(stored, chunk, start)


def per_shard(mesh: Mesh, local: Any, leaf: Leaf, arrays: int) -> Any:
    """Return a function that calls `local(*arrays, start)` on each device's shards of `arrays` arrays."""
    spec = leaf.local_spec
    return mapped(
        local, mesh=mesh, in_specs=(*[spec] * arrays, PartitionSpec()), out_specs=spec, axis_names=set(leaf.axes)
    )


def split_chunks(
    mesh: Mesh, stored: Shaped[Array, "*storage"], leaf: Leaf, chunking: Chunking
) -> list[Shaped[Array, "*chunk"]]:
    """Split an array into all of its chunks, in order. Call this under `jax.jit`."""
    if len(chunking.extents) == 1:
        return [stored]
    return [slice_chunk(mesh, stored, leaf, chunking.dim, start, length) for start, length in chunking.chunks]


def join_chunks(
    mesh: Mesh, chunks: Sequence[Shaped[Array, "*chunk"]], leaf: Leaf, chunking: Chunking
) -> Shaped[Array, "*storage"]:
    """Undo `split_chunks`."""
    if len(chunks) == 1:
        return chunks[0]

    def local(*chunks_and_start):
        return lax.concatenate(chunks_and_start[:-1], chunking.dim)

    return per_shard(mesh, local, leaf, len(chunks))(*chunks, 0)


def chunked(config: Config, chunks: Sequence[Any], leaf: Leaf, chunking: Chunking) -> Chunked:
    return Chunked(leaf, chunking, named(config, leaf), tuple(chunks))


def joined(node: Chunked) -> Shaped[Array, "*storage"]:
    """Load an offloaded leaf as one array on the devices, in memory of its own: a step donates the chunks."""
    chunks = [to_memory(x, "device") for x in node.chunks] if node.store is None else node.store.load(*node.chunks)
    return joining(node.sharding, node.leaf, node.chunking)(chunks)


def filled(node: Chunked, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Chunked:
    """Write an offloaded leaf chunk by chunk, without the devices. `read(box)` returns a part of the leaf's storage.

    `box` has one slice per dim, with a start and an end. Return the new node.
    """
    if node.store is not None:
        return dataclasses.replace(node, chunks=(node.store.fill(read),))
    where = host_sharding(concrete_mesh(node.sharding), node.sharding.spec)
    shapes = node.chunking.chunk_shapes(node.leaf)
    boxes = [(box,) for n in range(len(shapes)) for box in boxes_of(node, n)]
    sizes = [math.prod(one.stop - one.start for one in box) * node.dtype.itemsize for (box,) in boxes]
    values = read_ahead(read, boxes, sizes, 2 * max(sizes))
    chunks = tuple(assembled(shape, where, node.dtype, values) for shape in shapes)
    return dataclasses.replace(node, chunks=chunks)


def places_of(shape: tuple[int, ...], sharding: Sharding) -> dict[tuple[tuple[int, int], ...], list[Sharding]]:
    """Return the devices of this process that need each part of an array, as shardings on one device.

    A part has a start and an end per dim.
    """
    places: dict[tuple[tuple[int, int], ...], list[Sharding]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        places.setdefault(box, []).append(SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
    return places


def assembled(shape: tuple[int, ...], sharding: Sharding, dtype: Any, values: Iterator) -> Array:
    """Make an array of the next of `values`, which are the parts of `places_of`. The host holds one value at a time."""
    shards = []
    for places in places_of(shape, sharding).values():
        value = next(values)
        shards += jax.block_until_ready([jax.device_put(value, place) for place in places])
        del value
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


def replaced(node: Chunked, x: Shaped[Array, "*storage"]) -> Chunked:
    """Store `x`, an array on the devices, as the offloaded leaf `node` is stored. Return the new node.

    Only one chunk at a time is in device memory besides `x`.
    """
    chunks = chunks_of(x, node.leaf, node.chunking)
    if node.store is not None:
        return dataclasses.replace(node, chunks=(node.store.save(chunks),))
    where = host_sharding(concrete_mesh(node.sharding), node.sharding.spec)
    moved = tuple(jax.block_until_ready(jax.device_put(chunk, where)) for chunk in chunks)
    return dataclasses.replace(node, chunks=moved)


@functools.lru_cache(maxsize=32)
def joining(sharding: NamedSharding, leaf: Leaf, chunking: Chunking) -> Any:
    mesh = concrete_mesh(sharding)
    return jax.jit(lambda chunks: join_chunks(mesh, chunks, leaf, chunking), out_shardings=sharding)


def chunks_of(x: Shaped[Array, "*storage"], leaf: Leaf, chunking: Chunking) -> Iterator[Shaped[Array, "*chunk"]]:
    """Yield the chunks of an array on the devices, one at a time. `splitting` makes all chunks at once."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    for start, length in chunking.chunks:
        yield x if len(chunking.extents) == 1 else slicing(sharding, leaf, chunking.dim, length)(x, start)


@functools.lru_cache(maxsize=64)
def slicing(sharding: NamedSharding, leaf: Leaf, dim: int, length: int) -> Any:
    """Return the jitted function that `chunks_of` calls. Chunks of one length share it."""
    mesh = concrete_mesh(sharding)
    return jax.jit(lambda x, start: slice_chunk(mesh, x, leaf, dim, start, length), out_shardings=sharding)


@functools.lru_cache(maxsize=32)
def splitting(sharding: NamedSharding, leaf: Leaf, chunking: Chunking) -> Any:
    """Return a jitted function that splits an array into all of its chunks at once."""
    mesh = concrete_mesh(sharding)
    return jax.jit(lambda x: split_chunks(mesh, x, leaf, chunking), out_shardings=sharding)
