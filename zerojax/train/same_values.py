"""Compute checksums of arrays on the devices. Processes compare checksums instead of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.layout.chunked import is_chunked
from zerojax.offload.host import to_device

FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # primes of xxHash


def checksums(tree: Any) -> dict[str, str]:
    """Return the checksum of each leaf, by path. An array that is sharded over processes has one checksum per shard.

    Offloaded state is left out, because each process computes its own chunks from parameters that are compared.
    """
    pending = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_chunked):
        name = jax.tree_util.keystr(path).replace("']", "", 1).removeprefix("['")
        if is_chunked(x) or not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            continue
        pending += [(f"the checksum of {name}{part}", checksum(to_device(array))) for part, array in parts(x)]
    return {name: f"{int(value):08x}" for name, value in pending}


def parts(x: Any) -> list[tuple[str, Any]]:
    """Return `(place, shard)` for each shard of `x` that this process holds. The place of a whole array is empty."""
    if not isinstance(x, jax.Array):
        return [("", jnp.asarray(x))]
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.is_fully_addressable:
        return [("", x)]
    if x.is_fully_replicated:
        return [("", x.addressable_data(0))]
    by_index = {in_words(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    return list(by_index.items())


def in_words(index: tuple, shape: tuple[int, ...]) -> str:
    """Return the place of a shard as an index, such as `[0:4, 0:16]`."""
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """Return a 32-bit checksum of an array. The checksum depends on every bit, and on the order of elements."""
    bits = jnp.ravel(as_bits(x)).astype(jnp.uint32)
    place = jax.lax.iota(jnp.uint32, bits.size)
    mixed = (bits ^ (place * jnp.uint32(FACTORS[0]))) * jnp.uint32(FACTORS[1])
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(FACTORS[2])
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def as_bits(x: jax.Array) -> jax.Array:
    """Return the bits of an array as an array of integers of at most 32 bits each."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    width = jnp.dtype(x.dtype).itemsize
    if jnp.issubdtype(x.dtype, jnp.integer) and width < 4:  # `bitcast_convert_type` fails for 4-bit integers
        return x.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32))
