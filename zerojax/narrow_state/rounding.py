"""Convert between wide arrays and encoded arrays; `layout.encoding` describes the blocks of an encoded array.

An 8-bit code is a fraction of twice its block's scale. The scale is the largest power of two that is at most 128/127
times the largest magnitude in the block. A product with a power of two is exact, so all programs decode to the same
number. In a block without negative elements, the sign bit of the scale is set, and a code has 5 bits of exponent and 3
of mantissa. In other blocks, a code has a sign and 7 bits: a multiple of 1/128 (`"int8"`), or 4 bits of exponent and 3
of mantissa (`"float8"`). An update may divide by second moments. So a nonzero element of a block without negative
elements does not become zero.

Each conversion is a primitive, so that the analyses of an update see one equation with a name in `BY_BLOCK`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, UInt

from zerojax.layout.encoding import BY_BLOCK, Encoding

SIGN = 0x80
DROPPED = 20  # bits of a float32's mantissa that a code with 3 bits of mantissa does not have
HALVED = np.uint32(253 << 23)  # `HALVED - bits` has the bits of 1 / (2 * x), if `bits` are those of a power of two x
FIXED = 17  # fraction bits of a number before it is rounded to 7 bits: 24 bits in all, as many as a float32 has
STEP = 0x9E3779B9  # an update adds it to each seed: 2^32 over the golden ratio. It is odd, so that all seeds occur
FACTORS = 0x85EBCA6B, 0xC2B2AE35  # from the finalizer of MurmurHash3 (Appleby, public domain)


class EncodedBlocks(NamedTuple):
    """The codes, scales and seeds of an encoded array. Each part has one row per block."""

    codes: Any  # shape=(*rows, blocks, width), an unsigned integer. Format "seeds" has none
    scales: Any  # shape=(*rows, blocks, 1), dtype=float32, or None
    seeds: Any  # shape=(*rows, blocks, 1), dtype=uint32, or None


def decoded(x: EncodedBlocks, encoding: Encoding) -> Float[Array, "*rows blocks width"]:
    """Return the decoded elements of blocks, in the type of the wide array."""
    codes, scales, _ = x
    if encoding.format == "bfloat16":
        return lax.bitcast_convert_type(codes.astype(jnp.uint32) << 16, jnp.float32).astype(encoding.dtype)
    magnitude = codes & (SIGN - 1)
    linear = magnitude.astype(jnp.float32) * jnp.float32(2 / SIGN)
    signed = _from_float_code(magnitude, SIGN - 1) if encoding.format == "float8" else linear
    signed = jnp.where(codes >= SIGN, -signed, signed)
    wide = jnp.where(jnp.signbit(scales), _from_float_code(codes, 2 * SIGN - 1), signed) * jnp.abs(scales)
    return wide.astype(encoding.dtype)


def encoded(wide: Float[Array, "*rows blocks width"], old: EncodedBlocks, encoding: Encoding) -> EncodedBlocks:
    """Round and encode the elements of blocks. The new seeds are those of `old`, advanced by one step."""
    seeds = None if old.seeds is None else old.seeds + jnp.uint32(STEP)
    if encoding.format == "seeds":
        return EncodedBlocks(old.codes, None, seeds)
    x, noise = wide.astype(jnp.float32), _noise(seeds, wide.shape)
    if encoding.format == "bfloat16":
        return EncodedBlocks((_to_bfloat16(x, noise) >> 16).astype(jnp.uint16), None, seeds)
    most, least = (fn(x, axis=-1, keepdims=True) for fn in (jnp.max, jnp.min))
    largest, has_sign = jnp.maximum(most, -least), ~(least >= 0)  # true also if there is a NaN
    # The factor keeps the code of the largest element at most 127, even if the element is rounded up.
    exponent = lax.bitcast_convert_type(largest * jnp.float32(SIGN / (SIGN - 1)), jnp.uint32) & jnp.uint32(0x7F800000)
    part = jnp.abs(x) * lax.bitcast_convert_type(HALVED - exponent, jnp.float32)
    codes = _to_float_code(part, noise, jnp.where(has_sign, SIGN - 1, 2 * SIGN - 1))
    if encoding.format == "int8":
        # Use integers: with floats, only some programs would round the product before they add the noise.
        fixed = (part * (SIGN << FIXED)).astype(jnp.uint32) + (noise >> 32 - FIXED)
        codes = jnp.where(has_sign, jnp.minimum(fixed >> FIXED, SIGN - 1).astype(jnp.int32), codes)
    codes = jnp.where(has_sign, jnp.where(x < 0, codes + SIGN, codes), jnp.maximum(codes, part > 0))
    # If the largest magnitude is NaN, infinite or too large, the scale becomes NaN or infinite, to show the error.
    scale = jnp.where(exponent < HALVED, lax.bitcast_convert_type(exponent, jnp.float32), largest + jnp.inf)
    return EncodedBlocks(codes.astype(jnp.uint8), jnp.where(has_sign, scale, -scale), seeds)


def rounded(
    wide: Float[Array, "*rows blocks width"], old: EncodedBlocks, encoding: Encoding
) -> Float[Array, "*rows n"]:
    """Round float32 elements stochastically to bfloat16 numbers. Use the seeds of `old` unchanged."""
    return lax.bitcast_convert_type(_to_bfloat16(wide, _noise(old.seeds, wide.shape)), jnp.float32)


def nearest_bfloat16(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Round float32 numbers to bfloat16. XLA removes a pair of casts, and Pallas lacks `reduce_precision`."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = bits + jnp.uint32(0x7FFF) + (bits >> 16 & jnp.uint32(1)) & jnp.uint32(0xFFFF0000)  # ties to even
    return jnp.where(jnp.isfinite(x), lax.bitcast_convert_type(bits, jnp.float32), x)


def first_encoded(wide: Array, encoding: Encoding, number: int) -> UInt[Array, "*rows words"]:
    """Encode a wide array for the first time. Leaves with different `number` get different seeds."""
    shape = (*encoding.shape[:-1], encoding.blocks, 1)
    seeds = _mixed(lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + _mixed(jnp.uint32(number + 1)))
    # Most first states are constants, and XLA would take seconds to compute the codes of a constant as it compiles. So
    # add a zero that XLA does not recognise: a 32-bit integer has fewer than 33 bits set.
    wide = to_rows(to_blocks(wide, encoding) + (lax.population_count(seeds) // 33).astype(wide.dtype), encoding)
    codes = jnp.zeros((*shape[:-1], encoding.codes), encoding.code_dtype)
    scales = jnp.zeros(shape, jnp.float32) if encoding.is_scaled else None
    return narrow(
        wide, to_rows(EncodedBlocks(codes, scales, seeds if encoding.has_seeds else None), encoding), encoding
    )


def recoded(x: Array, source: Encoding | None, target: Encoding | None) -> Array:
    """Convert an array of logical shape from one encoding to another, with new seeds. None stands for a wide array."""
    if source is not None and source.format != "seeds":
        x = widen(x, source)
    if target is None:
        return x
    return first_encoded(jnp.zeros(target.shape, target.dtype) if target.format == "seeds" else x, target, 0)


def _offset(largest: Any) -> Any:
    """Return the leading bits of a float32, as an integer, minus its code, if the code of 1.0 is `largest`."""
    return (127 << 23 - DROPPED) - largest


def _to_float_code(part: Float[Array, "*block"], noise: Any, largest: Array) -> Array:
    """Round fractions from 0 to 1 to codes from 0 to `largest`, which is one number per block."""
    code = (lax.bitcast_convert_type(part, jnp.uint32) + (noise >> 32 - DROPPED) >> DROPPED).astype(jnp.int32)
    least = lax.bitcast_convert_type(1 + _offset(largest) << DROPPED, jnp.float32)
    uniform = (noise >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)  # from 0 to less than 1, exact in float32
    code = jnp.minimum(code - _offset(largest), largest)
    return jnp.where(part < least, (uniform * least < part).astype(jnp.int32), code)


def _from_float_code(code: Array, largest: int) -> Float[Array, "*block"]:
    """Return twice the fraction that a code represents. Doubling adds one to the exponent."""
    bits = code.astype(jnp.uint32) + jnp.uint32(_offset(largest) + (1 << 23 - DROPPED)) << DROPPED
    return jnp.where(code == 0, 0, lax.bitcast_convert_type(bits, jnp.float32))


def _to_bfloat16(x: Float[Array, "*block"], noise: Any) -> UInt[Array, "*block"]:
    """Round float32 numbers to bfloat16 numbers, and return their float32 bits. Finite numbers stay finite."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    up = jnp.where((bits & 0x7FFFFFFF) >= 0x7F7F0000, 0, noise >> 16)
    quiet = jnp.where(jnp.isnan(x), jnp.uint32(0x00400000), 0)
    return (bits + up | quiet) & jnp.uint32(0xFFFF0000)


def _noise(seeds: Array | None, shape: tuple[int, ...]) -> Any:
    """Return 32 random bits per element. Without seeds, return the constant that rounds to the nearest code."""
    if seeds is None:
        return jnp.uint32(1 << 31)
    lanes = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    return _mixed(seeds ^ lanes * jnp.uint32(FACTORS[0]))


def _mixed(x: Array) -> Array:
    x = (x ^ x >> 16) * jnp.uint32(FACTORS[0])
    x = (x ^ x >> 13) * jnp.uint32(FACTORS[1])
    return x ^ x >> 16


def to_blocks(x: Array, encoding: Encoding) -> Float[Array, "*rows blocks width"]:
    """Divide the last dim of a wide array into blocks. Unused elements at the end are zero."""
    if encoding.unused:
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, encoding.unused)])
    return x.reshape(*x.shape[:-1], encoding.blocks, encoding.width)


def blocks_of(x: UInt[Array, "*rows words"], encoding: Encoding) -> EncodedBlocks:
    """Divide an encoded array into its parts."""
    blocks = x.reshape(*x.shape[:-1], encoding.blocks, encoding.words)
    size = 4 // encoding.code_dtype.itemsize

    def word(n: int, dtype: Any) -> Array:
        start = encoding.codes + n * size
        bits = lax.slice_in_dim(blocks, start, start + size, axis=-1)
        return lax.bitcast_convert_type(bits if size > 1 else bits[..., 0], dtype)[..., None]

    scales = word(0, jnp.float32) if encoding.is_scaled else None
    seeds = word(int(encoding.is_scaled), jnp.uint32) if encoding.has_seeds else None
    return EncodedBlocks(lax.slice_in_dim(blocks, 0, encoding.codes, axis=-1), scales, seeds)


def to_rows(x: Array | EncodedBlocks, encoding: Encoding) -> Array:
    """Undo `to_blocks` or `blocks_of`."""
    if not isinstance(x, EncodedBlocks):
        return lax.slice_in_dim(x.reshape(*x.shape[:-2], -1), 0, encoding.shape[-1], axis=-1)
    bits = [lax.bitcast_convert_type(part, encoding.code_dtype) for part in x if part is not None]
    blocks = jnp.concatenate([x.reshape(*x.shape[: len(encoding.shape)], -1) for x in bits], axis=-1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def _primitive(name: str, last_dim: Callable, dtype: Callable) -> Callable[..., Array]:
    """Make a primitive `f(*arrays, encoding)` from a rule in `RULES`. Its arrays may have any number of rows."""
    primitive, rule = Primitive(name), RULES[name]

    @primitive.def_abstract_eval
    def _aval(x: Any, *_: Any, encoding: Encoding) -> Any:
        shape = (*x.shape[:-1], last_dim(encoding))
        return x.update(shape=shape, dtype=jnp.dtype(dtype(encoding)), weak_type=False)

    def run(*arrays: Array, encoding: Encoding) -> Array:
        *wide, last = arrays
        return to_rows(rule(*(to_blocks(x, encoding) for x in wide), blocks_of(last, encoding), encoding), encoding)

    primitive.def_impl(jax.jit(run, static_argnames="encoding"))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    return lambda *args: primitive.bind(*args[:-1], encoding=args[-1])


RULES = {"widen_blocks": decoded, "narrow_blocks": encoded, "round_blocks": rounded}
assert RULES.keys() == BY_BLOCK
_WIDE = (lambda encoding: encoding.shape[-1]), (lambda encoding: encoding.dtype)
_ENCODED = (lambda encoding: encoding.encoded_shape[-1]), (lambda encoding: encoding.code_dtype)
widen = _primitive("widen_blocks", *_WIDE)
narrow = _primitive("narrow_blocks", *_ENCODED)
round_to_bfloat16 = _primitive("round_blocks", *_WIDE)
