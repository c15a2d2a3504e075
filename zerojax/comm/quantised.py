"""Gather and reduce quantised values. Each block of narrow elements has a scale, and one array of bytes holds both.

`Collectives` asks for the `Codec` of a bucket's leaves, if the option `wire` is given, and calls its methods instead of
JAX's collectives.

References:
    Wang et al. 2023, arXiv 2306.10209, sections 3.2 and 3.4: ZeRO++.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from zerojax.comm.gloo import psum_scatter
from zerojax.config.wire import FORMATS, SCALE_BYTES, Wire
from zerojax.layout.leaf import Leaf, pad

INTEGER_LIMITS = {"int4": 7, "int8": 127}


@dataclasses.dataclass(frozen=True)
class Codec:
    """Encode blocks of elements. The scale maps a block's largest magnitude to the largest number of the format.

    The error of an element has these bounds, where `max` is the largest magnitude in the element's block:

    - int8: `max / 254`; int4: `max / 14`. With stochastic rounding, the bound is twice as large.
    - float8: 1/16 (e4m3fn) or 1/8 (e5m2) of the element. For an element below `tiny * scale`, the bound is this part of
      `tiny * scale`, where `tiny` is the format's smallest normal number.

    Zeros stay zeros. A block with an infinity or NaN is decoded to values that are not finite.
    """

    format: str  # one of `FORMATS`
    block: int  # the number of elements that share a scale; even
    stochastic: bool = False  # whether integers are rounded up or down at random, so that rounding is unbiased
    over: tuple[str, ...] = ()  # the mesh axes over which a reduction sends quantised values, and a gather sends first

    def bytes(self, size: int) -> int:
        return -(-size // self.block) * (self.block * FORMATS[self.format] // 8 + SCALE_BYTES)

    def encode(self, x: Float[Array, "*leading elements"]) -> UInt8[Array, "*leading bytes"]:
        """Encode each row as the bytes of all elements, followed by all scales."""
        size = -(-x.shape[-1] // self.block) * self.block
        blocks = pad(x, x.ndim - 1, size).astype(jnp.float32).reshape(*x.shape[:-1], -1, self.block)
        scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / self._limit
        scaled = jnp.where(scales == 0, 0, blocks / scales)
        elements = self._narrow(scaled).reshape(*x.shape[:-1], -1)
        scale_bytes = lax.bitcast_convert_type(scales[..., 0], jnp.uint8).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([elements, scale_bytes], axis=-1)

    def decode(self, payload: UInt8[Array, "*leading bytes"], size: int) -> Float[Array, "*leading elements"]:
        blocks = -(-size // self.block)
        split = payload.shape[-1] - blocks * SCALE_BYTES
        leading = payload.shape[:-1]
        elements, scales = payload[..., :split], payload[..., split:].reshape(*leading, blocks, SCALE_BYTES)
        wide = self._wide(elements.reshape(*leading, blocks, -1))
        values = wide * lax.bitcast_convert_type(scales, jnp.float32)[..., None]
        return values.reshape(*leading, -1)[..., :size]

    def all_gather(
        self, shards: Sequence[Shaped[Array, "*local"]], axes: tuple[str, ...]
    ) -> list[Shaped[Array, "shards elements"]]:
        """Gather one bucket, and return the stack of each leaf's shards, in the order of `axes`.

        Each device sends its encoded shard over the axes in `over` first, and then sends the received shards over the
        other axes. So one encoded shard per device crosses the slow links that `over` names.
        """
        plain = tuple(axis for axis in axes if axis not in self.over)
        payload = lax.all_gather(jnp.concatenate([self.encode(shard.ravel()) for shard in shards]), self.over)
        if plain:
            gathered = lax.all_gather(payload, plain)
            sizes = [lax.axis_size(axis) for axis in (*plain, *self.over)]
            order = [(*plain, *self.over).index(axis) for axis in axes]
            payload = gathered.reshape(*sizes, -1).transpose(*order, -1).reshape(-1, payload.shape[-1])
        stacks = _split(payload, [self.bytes(shard.size) for shard in shards])
        return [self.decode(x, shard.size).astype(shard.dtype) for x, shard in zip(stacks, shards, strict=True)]

    def reduce_scatter(
        self, stacks: Sequence[Shaped[Array, "shards elements"]], axes: tuple[str, ...]
    ) -> list[Float[Array, " elements"]]:
        """Reduce-scatter one bucket, given the stack of each leaf's shards, and return float32.

        The axes are reduced one by one, the innermost first. After an all-to-all, each device sums the decoded values
        of its shard in float32. So values are rounded once per axis, when they are sent, and not once per addition.
        """
        counts = [lax.axis_size(axis) for axis in axes]
        stacks = [stack.reshape(*counts, -1) for stack in stacks]
        sizes = [stack.shape[-1] for stack in stacks]
        for dim in reversed(range(len(axes))):
            if axes[dim] in self.over:
                payload = jnp.concatenate([self.encode(stack) for stack in stacks], axis=-1)
                arrived = lax.all_to_all(payload, axes[dim], dim, dim, tiled=True)
                parts = _split(arrived, [self.bytes(size) for size in sizes])
                stacks = [self.decode(x, n).sum(dim) for x, n in zip(parts, sizes, strict=True)]
            else:
                summed = psum_scatter(jnp.concatenate(stacks, axis=-1), axes[dim], scatter_dimension=dim)
                stacks = _split(summed, sizes)
        return [stack.astype(jnp.float32) for stack in stacks]

    @property
    def _limit(self) -> float:
        return INTEGER_LIMITS.get(self.format) or float(jnp.finfo(self.format).max)

    def _narrow(self, x: Float[Array, "*leading block"]) -> UInt8[Array, "*leading bytes"]:
        if self.format not in INTEGER_LIMITS:
            return lax.bitcast_convert_type(x.astype(self.format), jnp.uint8)
        rounded = jnp.floor(x + uniform(x)) if self.stochastic else jnp.round(x)
        whole = jnp.clip(rounded, -self._limit, self._limit).astype(jnp.int8)
        if self.format == "int8":
            return lax.bitcast_convert_type(whole, jnp.uint8)
        low, high = jnp.split(lax.bitcast_convert_type(whole, jnp.uint8), 2, axis=-1)
        return (low & 0xF) | (high << 4)

    def _wide(self, x: UInt8[Array, "*leading bytes"]) -> Float[Array, "*leading block"]:
        if self.format not in INTEGER_LIMITS:
            return lax.bitcast_convert_type(x, jnp.dtype(self.format)).astype(jnp.float32)
        signed = lax.bitcast_convert_type(x, jnp.int8)
        if self.format == "int4":  # the arithmetic right shift extends the sign bit
            signed = jnp.concatenate([lax.shift_left(signed, jnp.int8(4)), signed], axis=-1)
            signed = lax.shift_right_arithmetic(signed, jnp.int8(4))
        return signed.astype(jnp.float32)


def codec_of(wire: Wire | None, leaf: Leaf, *, gathers: bool) -> Codec | None:
    """Return the codec that quantises a leaf's shards for a gather, or its gradient for a reduction, or None.

    If the loss itself quantises a weight to one byte, the weight is sent unchanged: a second rounding would change its
    values.
    """
    if wire is None or leaf.dim is None or not leaf.is_quantised:
        return None
    fmt, stochastic = (wire.gather, False) if gathers else (wire.reduce, wire.rounding == "stochastic")
    over = tuple(axis for axis in leaf.axes if wire.over is None or axis in wire.over)
    is_narrow = gathers and getattr(leaf.dtype, "itemsize", 0) == 1
    return None if fmt is None or not over or is_narrow else Codec(fmt, wire.block, stochastic, over)


def uniform(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return a pseudo-random number in [0, 1) for each element of `x`: a hash of the element's bits and position.

    References:
        The finaliser of MurmurHash3 (Appleby 2011), which mixes 32 bits.
    """
    position = lax.iota(jnp.uint32, x.size).reshape(x.shape) * jnp.uint32(0x9E3779B1)
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ position
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) * 2.0**-24


def _split(x: Array, sizes: Sequence[int]) -> list[Any]:
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=-1)
