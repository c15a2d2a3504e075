"""Move an array from one mesh to another in boxes, so that no device ever holds more of it in full than one box.

A box is a range of each logical dim. `take` gathers a box onto all devices of the array's mesh, `carried` copies the
box to the devices of the other mesh, and `put` writes each device's part of the box into a shard that is already
allocated.

Rejected: copying each intersection of two shards by itself. That moves fewer bytes, but it compiles one program for
each shape of an intersection, and it works only if one process has all devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zerojax.comm.mapped import mapped
from zerojax.comm.mesh import replicated
from zerojax.config.data_mesh import entry_axes
from zerojax.layout.padded import pad, trim
from zerojax.offload.host import to_device

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec
    from jaxtyping import Array, Int, Shaped


def chunked_dim(shape: Sequence[int], itemsize: int, spec: PartitionSpec, limit: int) -> tuple[int, int]:
    """Choose the dim along which an array is moved, and the length of a box along it, in elements.

    A box has at most `limit` bytes, or a length of 1. Dims that the source does not shard come first, because `take`
    sends half as many bytes for them.
    """
    size = math.prod(shape) * itemsize
    wanted = -(-size // limit)
    undivided = [dim for dim in range(len(shape)) if not axes_at(spec, dim)]
    order = [*undivided, *(dim for dim in range(len(shape)) if dim not in undivided)]
    dim = next((dim for dim in order if shape[dim] >= wanted), max(order, key=lambda dim: shape[dim]))
    return dim, max(1, min(shape[dim], limit * shape[dim] // size))


def starts_of(size: int, length: int) -> Iterator[int]:
    """Yield the starts of ranges of `length` that cover `size` elements. The last range may overlap the one before.

    So all ranges have one length, and share one program.
    """
    yield from range(0, size - length + 1, length)
    if size % length:
        yield size - length


def axes_at(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """Return the mesh axes that divide a dim."""
    return entry_axes(spec[dim]) if dim < len(spec) else ()


def on_mesh(x: Any) -> jax.Array:
    """Return an array with a `NamedSharding`. An array that one device holds in full is put on a mesh of that device.

    Raises:
        TypeError: If `x` is not an array of JAX or NumPy, or its shards are not those of a mesh.
    """
    if not isinstance(x, jax.Array):
        x = jnp.asarray(x)
    if isinstance(x.sharding, NamedSharding):
        return x
    if not x.sharding.is_fully_replicated:
        raise TypeError(f"An array of the shape {list(x.shape)} is on {x.sharding}. Give it a NamedSharding.")
    [shard, *_] = x.addressable_shards
    whole = replicated(mesh_of_one(shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, whole, [shard.data], dtype=x.dtype)


def mesh_of(x: jax.Array) -> Mesh:
    """Return the mesh of an array with a `NamedSharding`."""
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def mesh_of_one(device: jax.Device) -> Mesh:
    """Return a mesh of one device."""
    return Mesh(np.asarray([device]), ("device",))


def take(
    x: Shaped[Array, "*storage"], shape: tuple[int, ...], starts: Sequence[int], sizes: tuple[int, ...]
) -> Shaped[Array, "*sizes"]:
    """Gather a box of an array onto every device of its mesh, bit for bit.

    Args:
        x: An array with a `NamedSharding`, on the devices or in host memory. It may be padded, but not flat.
        shape: The logical shape of `x`.
        starts: The first index of the box along each dim.
        sizes: The shape of the box. The box lies within `shape`.
    """
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    return taking(sharding.mesh, sharding.spec, tuple(shape), tuple(sizes))(x, jnp.asarray(starts, jnp.int32))


@functools.lru_cache(maxsize=128)
def taking(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Return the jitted function that `take` calls."""
    divided = {dim: axes for dim in range(len(shape)) if (axes := axes_at(spec, dim))}

    def local(x, starts):
        summed: list[str] = []
        dtype, x = x.dtype, as_bits(x)
        for dim, size in enumerate(sizes):
            if size < shape[dim] and dim in divided:
                x = window(x, dim, starts[dim] - lax.axis_index(divided[dim]) * x.shape[dim], size)
                summed += divided[dim]
            elif size < shape[dim]:
                x = lax.dynamic_slice_in_dim(x, starts[dim], size, dim)
        if summed:
            x = sum_of_one(x, tuple(summed))
        for dim, axes in divided.items():
            if sizes[dim] == shape[dim]:
                x = trim(lax.all_gather(x, axes, axis=dim, tiled=True), dim, sizes[dim])
        return from_bits(x, dtype)

    def program(x, starts):
        over = mapped(
            local,
            mesh=mesh,
            in_specs=(spec, replicated(mesh).spec),
            out_specs=replicated(mesh).spec,
            axis_names=set(mesh.axis_names),
        )
        return over(to_device(x), starts)

    return jax.jit(program, out_shardings=replicated(mesh))


def window(x: Shaped[Array, "*local"], dim: int, start: Int[Array, ""], size: int) -> Shaped[Array, "*window"]:
    """Return `size` entries of a dim, from `start` on, with zeros where `x` has no entries."""
    at = start + jnp.arange(size)
    inside = (at >= 0) & (at < x.shape[dim])
    found = jnp.take(x, at, axis=dim, mode="clip")
    return jnp.where(along(inside, dim, x.ndim), found, jnp.zeros((), x.dtype))


def along(values: Shaped[Array, " size"], dim: int, rank: int) -> Shaped[Array, "*size"]:
    """Give a vector further dims, so that it broadcasts along `dim` of an array with `rank` dims."""
    return values.reshape(*[1] * dim, -1, *[1] * (rank - dim - 1))


def as_bits(x: Array) -> Array:
    """Return floats of 8 bits or more as unsigned integers, because a select or a sum may change the bits of a NaN."""
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 8:
        return lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    return x


def from_bits(bits: Array, dtype: Any) -> Array:
    """Undo `as_bits`."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def sum_of_one(x: Array, axes: tuple[str, ...]) -> Array:
    """Sum the results of `as_bits` over mesh axes. Of each element, all devices but one have zero bits.

    Floats are summed as bits, because the sum of 0.0 and -0.0 is 0.0.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = (from_bits(lax.psum(as_bits(part), axes), part.dtype) for part in (x.real, x.imag))
        return lax.complex(*parts)
    if jnp.issubdtype(x.dtype, jnp.floating):  # of less than 8 bits: float32 has every value
        whole = lax.psum(as_bits(x.astype(jnp.float32)), axes)
        return from_bits(whole, jnp.float32).astype(x.dtype)
    narrow = x.dtype == jnp.bool_ or jnp.iinfo(x.dtype).bits < 8
    return lax.psum(x.astype(jnp.int8), axes).astype(x.dtype) if narrow else lax.psum(x, axes)


def check_processes(old: Mesh, new: Mesh) -> None:
    """Raise a `ValueError` if a process has devices of only one of the meshes. JAX could not copy its values."""
    before, after = ({device.process_index for device in mesh.devices.flat} for mesh in (old, new))
    if before != after:
        raise ValueError(
            f"The arrays are on devices of the processes {sorted(before)}, and the new mesh has devices of the "
            f"processes {sorted(after)}. Values can only be moved between meshes that have devices of the same "
            f"processes. Use files: save a checkpoint and restore it, or publish the parameters to a folder."
        )


def carried(x: Shaped[Array, "*box"], mesh: Mesh) -> Shaped[Array, "*box"]:
    """Copy an array that its devices hold in full to all devices of `mesh`. Devices of both meshes share the buffer."""
    held = {shard.device: shard.data for shard in x.addressable_shards}
    copies = list(held.values())
    ours = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    shards = [held[d] if d in held else jax.device_put(copies[i % len(copies)], d) for i, d in enumerate(ours)]
    return jax.make_array_from_single_device_arrays(x.shape, replicated(mesh), shards, dtype=x.dtype)


def put(
    target: Shaped[Array, "*storage"], box: Shaped[Array, "*box"], dim: int, start: int
) -> Shaped[Array, "*storage"]:
    """Write a box into `target`, which is donated, from `start` on along `dim`. Each device writes its own part.

    The box is on the devices of `target`, in full, and is cast to its type. Along all other dims, it has the logical
    size of `target`.
    """
    sharding = target.sharding
    assert isinstance(sharding, NamedSharding)
    return putting(sharding.mesh, sharding.spec, tuple(target.shape), dim)(target, box, jnp.int32(start))


@functools.lru_cache(maxsize=128)
def putting(mesh: Mesh, spec: PartitionSpec, storage: tuple[int, ...], dim: int) -> Any:
    """Return the jitted function that `put` calls."""

    def local(target, box, start):
        dtype, is_cast = target.dtype, box.dtype != target.dtype
        target, box = as_bits(target), box if is_cast else as_bits(box)
        for d, extent in enumerate(target.shape):
            if d != dim:
                box = pad(box, d, storage[d])
                if axes := axes_at(spec, d):
                    box = lax.dynamic_slice_in_dim(box, lax.axis_index(axes) * extent, extent, d)
        extent, length = target.shape[dim], box.shape[dim]
        axes, some = axes_at(spec, dim), min(extent, length)
        start = start - lax.axis_index(axes) * extent if axes else start  # relative to this shard
        first = jnp.clip(start, 0, extent - some)
        at = first - start + jnp.arange(some)
        new = jnp.take(box, at, axis=dim, mode="clip")
        new = as_bits(new.astype(dtype)) if is_cast else new
        old = lax.dynamic_slice_in_dim(target, first, some, dim)
        new = jnp.where(along((at >= 0) & (at < length), dim, target.ndim), new, old)
        return from_bits(lax.dynamic_update_slice_in_dim(target, new, first, dim), dtype)

    every, whole = set(mesh.axis_names), replicated(mesh).spec
    over = mapped(local, mesh=mesh, in_specs=(spec, whole, whole), out_specs=spec, axis_names=every)
    return jax.jit(over, donate_argnums=0, out_shardings=NamedSharding(mesh, spec))
