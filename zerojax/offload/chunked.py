"""Divide offloaded arrays into chunks. `Chunked` is the pytree node that contains the chunks of one array."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Int, Shaped

from zerojax.comm.mesh import mapped, replicated
from zerojax.config import Config
from zerojax.layout.leaf import ChunkedNode, Leaf, replace_at
from zerojax.offload.host import host_sharding, to_memory
from zerojax.placement.storage import leaf_sharding


@dataclasses.dataclass(frozen=True)
class Chunking:
    """The division of each device's shard into chunks."""

    dim: int  # the dim that is divided into chunks
    # length of each chunk along `dim`, in elements; their sum is the length of `dim` in one device's shard
    extents: tuple[int, ...]

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return `(start, length)` of each chunk along `dim`."""
        starts = itertools.accumulate(self.extents, initial=0)
        return tuple(zip(starts, self.extents, strict=False))  # `starts` has one more item: the end of the last chunk

    def chunk_shape(self, leaf: Leaf, extent: int) -> tuple[int, ...]:
        """Return the global shape of a chunk that has length `extent` along `dim` in each device's shard."""
        shards = leaf.storage_shape[self.dim] // leaf.local_shape[self.dim]
        return replace_at(leaf.storage_shape, self.dim, extent * shards)

    def chunk_shapes(self, leaf: Leaf) -> list[tuple[int, ...]]:
        return [self.chunk_shape(leaf, extent) for extent in self.extents]

    def is_by_row(self, leaf: Leaf) -> bool:
        """Return whether each chunk is one row of dim 0, such as a layer of a stack."""
        return leaf.kind == "sharded" and len(leaf.shape) > 1 and self == Chunking(0, (1,) * leaf.shape[0])


def chunking_of(leaf: Leaf, chunk_bytes: int, *, encoded: bool = False) -> Chunking:
    """Divide each device's shard into equal chunks of at most `chunk_bytes`. The last chunk may be shorter.

    The first dim that is long enough (or else the longest) is chunked, because chunks along dim 0 are contiguous. Dims
    that non-data mesh axes divide are not chunked, and with `encoded` the last dim is not. A chunk may exceed
    `chunk_bytes` if its length in the dim is 1.
    """
    local = leaf.local_shape
    free = [d for d in range(len(local) - encoded) if d >= len(leaf.others) or not leaf.others[d]]
    if not free:
        return Chunking(0, local[:1])
    wanted = -(-leaf.local_bytes // chunk_bytes)
    dim = next((d for d in free if local[d] >= wanted), max(free, key=lambda d: local[d]))
    extent = max(1, local[dim] // wanted)
    count = -(-local[dim] // extent)
    return Chunking(dim, (extent,) * (count - 1) + (local[dim] - extent * (count - 1),))


MOST_ROWS = 256


def row_chunkings_of(leaves: Sequence[Leaf], chunk_bytes: int) -> dict[int, Chunking]:
    """Return the chunking of each sharded parameter on disk, by index. Gradients and state are divided like parameters.

    Each layer of a stack is one chunk, so that a scan reads the layer alone. The loss is not known here, so shapes tell
    which arrays are stacks. An array of three or more dims is a stack if its dim 0 is not sharded and at most
    `MOST_ROWS` long. A matrix, such as the biases of all layers, is a stack only if one of these stacks has as
    many rows. All other arrays are divided by `chunking_of`.
    """
    may_be = {
        i: leaf.shape[0]
        for i, leaf in enumerate(leaves)
        if len(leaf.shape) > 1 and leaf.dim != 0 and not any(leaf.others[:1]) and leaf.shape[0] <= MOST_ROWS
    }
    lengths = {n for i, n in may_be.items() if len(leaves[i].shape) > 2}
    return {
        i: Chunking(0, (1,) * may_be[i]) if may_be.get(i) in lengths else chunking_of(leaf, chunk_bytes)
        for i, leaf in enumerate(leaves)
        if leaf.kind == "sharded"
    }


@dataclasses.dataclass(frozen=True)
class ChunkedLayout:
    """The layout of an array that is kept in chunks."""

    leaf: Leaf  # the layout of the whole array
    chunking: Chunking  # the division of each shard into chunks
    sharding: NamedSharding  # the sharding of the array when it is on the devices


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["chunks"], meta_fields=["leaf", "chunking", "sharding", "leaf_files"]
)
@dataclasses.dataclass(frozen=True)
class Chunked(ChunkedLayout, ChunkedNode):
    """An optimizer state leaf in host memory or on disk, or a parameter on disk, in chunks. A pytree node.

    `chunks[k]` contains chunk k of every device's shard, so concatenating the chunks does not always give the array.
    """

    # arrays in host memory; for a leaf on disk, one int32 scalar: the version of its files
    chunks: tuple[Shaped[Array, "*chunk"], ...]
    leaf_files: Any = None  # the `LeafFiles` of a leaf on disk; None for chunks in host memory

    def __reduce__(self):
        """Raise a TypeError, because offloaded state cannot be pickled."""
        part = "opt_state" if self.leaf_files is None else self.leaf_files.state_files.part
        raise TypeError(
            f"{part}{self.leaf.path} is offloaded, and cannot be pickled or deep-copied. Save "
            f"the state with a zerojax.checkpoint.Checkpointer, or convert it with tx.unshard({part})."
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.leaf.storage_shape

    @property
    def dtype(self):
        return self.leaf.dtype


def concrete_mesh(sharding: NamedSharding) -> Mesh:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return mesh


def parts_of(shape: tuple[int, ...], sharding: Sharding) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """Return the parts of an array in this process, and each part's devices. A part has a start and an end per dim."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        part = tuple(one.indices(size)[:2] for one, size in zip(index or (), shape, strict=True))
        devices.setdefault(part, []).append(device)
    return devices


def host_shards(array: Array) -> list[np.ndarray]:
    """Copy this process's shards of an array to the host. The shards are in the order of `parts_of`."""
    data = {shard.device: shard.data for shard in array.addressable_shards}
    return [np.asarray(data[devices[0]]) for devices in parts_of(array.shape, array.sharding).values()]


def boxes_of(of: ChunkedLayout, n: int) -> list[tuple[slice, ...]]:
    """Return the slices of the leaf's storage that each shard of chunk `n` in this process covers."""
    dim, (start, length) = of.chunking.dim, of.chunking.chunks[n]
    boxes = []
    for part in parts_of(of.leaf.storage_shape, of.sharding):
        first = part[dim][0] + start
        boxes.append(replace_at(tuple(slice(*ends) for ends in part), dim, slice(first, first + length)))
    return boxes


def slice_chunk(
    mesh: Mesh, stored: Shaped[Array, "*storage"], start: Int[Array, ""] | int, leaf: Leaf, dim: int, length: int
) -> Shaped[Array, "*chunk"]:
    """Slice `length` elements on `dim`, from `start` on, out of every device's shard. Call this under `jax.jit`."""
    local = lambda x, start: lax.dynamic_slice_in_dim(x, start, length, dim)
    return per_shard(mesh, local, leaf, 1)(stored, start)


def per_shard(mesh: Mesh, local: Any, leaf: Leaf, arrays: int) -> Any:
    """Return a function of `arrays` arrays and a start, which calls `local(*shards, start)` for each device."""
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
    return [slice_chunk(mesh, stored, start, leaf, chunking.dim, length) for start, length in chunking.chunks]


def join_chunks(
    mesh: Mesh, chunks: Sequence[Shaped[Array, "*chunk"]], leaf: Leaf, chunking: Chunking
) -> Shaped[Array, "*storage"]:
    """Undo `split_chunks`."""
    if len(chunks) == 1:
        return chunks[0]
    local = lambda *chunks_and_start: lax.concatenate(chunks_and_start[:-1], chunking.dim)
    return per_shard(mesh, local, leaf, len(chunks))(*chunks, 0)


def chunked(config: Config, chunks: Sequence[Any], leaf: Leaf, chunking: Chunking) -> Chunked:
    return Chunked(leaf, chunking, leaf_sharding(config, leaf), tuple(chunks))


def chunked_shape(config: Config, leaf: Leaf, chunking: Chunking) -> Chunked:
    """Return an offloaded leaf that has shapes with shardings as its chunks. A node on disk gets no files."""
    assert config.offload is not None
    if config.offload.optimizer == "disk":
        version = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(config.mesh))
        return chunked(config, [version], leaf, chunking)
    where = host_sharding(config.mesh, leaf.spec)
    chunks = [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where) for shape in chunking.chunk_shapes(leaf)]
    return chunked(config, chunks, leaf, chunking)


def joined(node: Chunked) -> Shaped[Array, "*storage"]:
    """Load an offloaded leaf as one array on the devices. A single chunk is copied, too, as steps donate chunks."""
    chunks = (
        [to_memory(x, "device") for x in node.chunks] if node.leaf_files is None else node.leaf_files.load(*node.chunks)
    )
    return jitted(join_chunks, node.sharding, node.leaf, node.chunking)(chunks)


def filled(node: Chunked, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Chunked:
    """Write an offloaded leaf chunk by chunk, without the devices. `read(box)` returns a part of the leaf's storage.

    `box` has one slice per dim, with a start and an end. Return the new node.
    """
    if node.leaf_files is not None:
        shards = ([read(box) for box in boxes_of(node, n)] for n in range(len(node.chunking.extents)))
        return dataclasses.replace(node, chunks=(node.leaf_files.write(shards),))
    where = host_sharding(concrete_mesh(node.sharding), node.sharding.spec)
    shapes = node.chunking.chunk_shapes(node.leaf)
    boxes = [(box,) for n in range(len(shapes)) for box in boxes_of(node, n)]
    sizes = [math.prod(one.stop - one.start for one in box) * node.dtype.itemsize for (box,) in boxes]
    values = read_ahead(read, boxes, sizes, 2 * max(sizes))
    chunks = tuple(assembled(shape, where, node.dtype, values) for shape in shapes)
    return dataclasses.replace(node, chunks=chunks)


def assembled(shape: tuple[int, ...], sharding: Sharding, dtype: Any, values: Iterator) -> Array:
    """Make an array from `values`, which yields one value per part in `parts_of`. The host holds one at a time."""
    shards = []
    for devices in parts_of(shape, sharding).values():
        value, kind = next(values), sharding.memory_kind
        places = [SingleDeviceSharding(device, memory_kind=kind) for device in devices]
        shards += jax.block_until_ready([jax.device_put(value, place) for place in places])
        del value
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


def replaced(node: Chunked, x: Shaped[Array, "*storage"]) -> Chunked:
    """Store an array `x` on the devices in the form and place of the offloaded leaf `node`. Return the new node.

    Only one chunk at a time is in device memory besides `x`.
    """
    chunks = chunks_of(x, node.leaf, node.chunking)
    if node.leaf_files is not None:
        return dataclasses.replace(node, chunks=(node.leaf_files.write(map(host_shards, chunks)),))
    where = host_sharding(concrete_mesh(node.sharding), node.sharding.spec)
    moved = tuple(jax.block_until_ready(jax.device_put(chunk, where)) for chunk in chunks)
    return dataclasses.replace(node, chunks=moved)


def kept(node: Chunked) -> Chunked:
    """Return a copy of an offloaded leaf. A leaf on disk is not copied: the new state takes over its files."""
    if node.leaf_files is None:
        return replaced(node, joined(node))
    return dataclasses.replace(node, chunks=(node.leaf_files.keep(*node.chunks),))


def chunks_of(x: Shaped[Array, "*storage"], leaf: Leaf, chunking: Chunking) -> Iterator[Shaped[Array, "*chunk"]]:
    """Yield the chunks of an array on the devices, one at a time. `split_chunks` makes all chunks at once."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    for start, length in chunking.chunks:
        yield x if len(chunking.extents) == 1 else jitted(slice_chunk, sharding, leaf, chunking.dim, length)(x, start)


@functools.lru_cache
def jitted(fn: Callable, sharding: NamedSharding, *static: Any) -> Any:
    """Return `fn(mesh, *arrays, *static)` as a jitted function of the arrays. Its results have this `sharding`."""
    mesh = concrete_mesh(sharding)
    return jax.jit(lambda *arrays: fn(mesh, *arrays, *static), out_shardings=sharding)


THREADS = 8


def read_ahead(read: Callable[..., Any], parts: Sequence[tuple], sizes: Sequence[int], limit: int) -> Iterator[Any]:
    """Yield `read(*part)` of each part, in order. Threads read the next parts while the caller uses one.

    `sizes` has the bytes of each part. The part in use and the parts read ahead have at most `limit` bytes in total,
    unless a single part is larger.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        reading: collections.deque[tuple[Future, int]] = collections.deque()
        held = 0
        for part, size in zip(parts, sizes, strict=True):
            while reading and held + size > limit:
                future, done = reading.popleft()
                yield future.result()
                del future
                held -= done
            reading.append((pool.submit(read, *part), size))
            held += size
        while reading:
            yield reading.popleft()[0].result()
