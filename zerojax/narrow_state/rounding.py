"""Convert between wide arrays and encoded arrays; `layout.encoding` describes the blocks of an encoded array.

Codes of 8 bits are fractions of twice the scale of their block. The scale is the largest power of two that is not above
the largest magnitude in the block. So a decoded element is exact, and compilers cannot round it in several ways. In a
block without negative elements, the sign of the scale is set, and a code has 5 bits of exponent and 3 of mantissa. In
other blocks, a code has a sign and 7 bits: a multiple of 1/128 (`"int8"`), or 4 bits of exponent and 3 of mantissa
(`"float8"`). An update may divide by second moments, so a nonzero element of a block without negative elements does not
become zero.

Each conversion is a primitive, because the analyses of an update go through it equation by equation: `BY_BLOCK`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from zerojax.layout.encoding import BY_BLOCK, Encoding

if TYPE_CHECKING:
    from jaxtyping import Array, Float, UInt

SIGN = 0x80
DROPPED = 20  # bits of a float32's mantissa that a code with 3 bits of mantissa does not have
HALVED = np.uint32(253 << 23)  # less the exponent's bits of a power of two: those of its inverse, halved
FIXED = 17  # bits after the point of a number that is rounded to an integer of 7 bits: 24 in all, as float32 has
STEP = 0x9E3779B9  # what an update adds to a seed: 2^32 over the golden ratio, and odd, so that all seeds occur
FACTORS = 0x85EBCA6B, 0xC2B2AE35  # of the finalizer of MurmurHash3 (Appleby, public domain)


def widened(encoded: UInt[Array, "*rows words"], *, encoding: Encoding) -> Array:
    """Return the wide array that an encoded array represents."""
    codes, scales, _ = _parts_of(encoded, encoding)
    if encoding.format == "bfloat16":
        wide = lax.bitcast_convert_type(codes.astype(jnp.uint32) << 16, jnp.float32)
    else:
        magnitude = codes & (SIGN - 1)
        linear = magnitude.astype(jnp.float32) * jnp.float32(2 / SIGN)
        signed = _from_float_code(magnitude, SIGN - 1) if encoding.format == "float8" else linear
        signed = jnp.where(codes >= SIGN, -signed, signed)
        wide = jnp.where(jnp.signbit(scales), _from_float_code(codes, 2 * SIGN - 1), signed) * jnp.abs(scales)
    return _joined(wide, encoding).astype(encoding.dtype)


def narrowed(wide: Array, encoded: UInt[Array, "*rows words"], *, encoding: Encoding) -> UInt[Array, "*rows words"]:
    """Round and encode a wide array. The seeds are those of `encoded`, the old encoded array, advanced by one step."""
    seeds = _parts_of(encoded, encoding)[2]
    seeds = None if seeds is None else seeds + jnp.uint32(STEP)
    if encoding.format == "seeds":
        return _in_blocks([seeds], encoding)
    x, noise = _split(wide.astype(jnp.float32), encoding), _noise(seeds, encoding.width)
    if encoding.format == "bfloat16":
        return _in_blocks([(_to_bfloat16(x, noise) >> 16).astype(jnp.uint16), seeds], encoding)
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # The code of the largest element is at most 127, also if it is rounded up.
    exponent = lax.bitcast_convert_type(largest * jnp.float32(SIGN / (SIGN - 1)), jnp.uint32) & jnp.uint32(0x7F800000)
    part = jnp.abs(x) * lax.bitcast_convert_type(HALVED - exponent, jnp.float32)
    has_sign = ~(jnp.min(x, axis=-1, keepdims=True) >= 0)  # also if there is a NaN
    most = jnp.where(has_sign, SIGN - 1, 2 * SIGN - 1)
    codes = _to_float_code(part, noise, most)
    if encoding.format == "int8":
        # In integers, because it depends on the program whether a product is rounded before the noise is added.
        fixed = (part * (SIGN << FIXED)).astype(jnp.uint32) + (noise >> 32 - FIXED)
        codes = jnp.where(has_sign, jnp.minimum(fixed >> FIXED, SIGN - 1).astype(jnp.int32), codes)
    codes = jnp.where(has_sign, jnp.where(x < 0, codes + SIGN, codes), jnp.maximum(codes, part > 0))
    # What is not finite is not lost: the scale becomes infinite or NaN, and so does the block.
    scale = jnp.where(exponent < HALVED, lax.bitcast_convert_type(exponent, jnp.float32), largest + jnp.inf)
    return _in_blocks([codes.astype(jnp.uint8), jnp.where(has_sign, scale, -scale), seeds], encoding)


def rounded(wide: Float[Array, "*rows n"], encoded: UInt[Array, "*rows words"], *, encoding: Encoding) -> Array:
    """Round a float32 array stochastically to numbers that bfloat16 has. The seeds are those of `encoded`."""
    bits = _to_bfloat16(_split(wide, encoding), _noise(_parts_of(encoded, encoding)[2], encoding.width))
    return _joined(lax.bitcast_convert_type(bits, jnp.float32), encoding)


def first_encoded(wide: Array, encoding: Encoding, number: int) -> UInt[Array, "*rows words"]:
    """Encode a wide array for the first time. `number` is the leaf's, so that seeds of several leaves differ."""
    shape = (*encoding.shape[:-1], encoding.blocks, 1)
    seeds = _mixed(lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + _mixed(jnp.uint32(number + 1)))
    # Most first states are constants, and XLA would take seconds to fold the codes of a constant. It does not know that
    # an integer of 32 bits has fewer than 33 bits set, so this sum is no constant.
    wide = _joined(_split(wide, encoding) + (lax.population_count(seeds) // 33).astype(wide.dtype), encoding)
    codes = jnp.zeros((*shape[:-1], encoding.codes), encoding.code_dtype) if encoding.codes else None
    scales = jnp.zeros(shape, jnp.float32) if encoding.is_scaled else None
    return narrow(wide, _in_blocks([codes, scales, seeds if encoding.has_seeds else None], encoding), encoding)


def recoded(x: Array, source: Encoding | None, target: Encoding | None) -> Array:
    """Convert an array of logical shape from one encoding to another. None: the array is wide. Seeds begin anew."""
    if source is not None and source.format != "seeds":
        x = widen(x, source)
    if target is None:
        return x
    return first_encoded(jnp.zeros(target.shape, target.dtype) if target.format == "seeds" else x, target, 0)


def _offset(largest: Any) -> Any:
    """Return the difference between the leading bits of a float32 and its code. The code of 1.0 is `largest`."""
    return (127 << 23 - DROPPED) - largest


def _to_float_code(part: Float[Array, "*block"], noise: Any, largest: Array) -> Array:
    """Round fractions of at most 1 to codes from 0 to `largest`, which is a number per block."""
    code = (lax.bitcast_convert_type(part, jnp.uint32) + (noise >> 32 - DROPPED) >> DROPPED).astype(jnp.int32)
    least = lax.bitcast_convert_type(1 + _offset(largest) << DROPPED, jnp.float32)
    uniform = (noise >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)  # from 0 to less than 1, exact in float32
    code = jnp.minimum(code - _offset(largest), largest)
    return jnp.where(part < least, (uniform * least < part).astype(jnp.int32), code)


def _from_float_code(code: Array, largest: int) -> Float[Array, "*block"]:
    """Return the number from 0 to 2 that a code represents. Twice the fraction is one more in the exponent."""
    bits = code.astype(jnp.uint32) + jnp.uint32(_offset(largest) + (1 << 23 - DROPPED)) << DROPPED
    return jnp.where(code == 0, 0, lax.bitcast_convert_type(bits, jnp.float32))


def _to_bfloat16(x: Float[Array, "*block"], noise: Any) -> UInt[Array, "*block"]:
    """Return the bits of float32 numbers that are rounded to bfloat16. Finite numbers stay finite."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    up = jnp.where((bits & 0x7FFFFFFF) >= 0x7F7F0000, 0, noise >> 16)
    quiet = jnp.where(jnp.isnan(x), jnp.uint32(0x00400000), 0)
    return (bits + up | quiet) & jnp.uint32(0xFFFF0000)


def _noise(seeds: Array | None, width: int) -> Any:
    """Return 32 random bits per element of a block. Without seeds, return the bits that round to the nearest code."""
    if seeds is None:
        return jnp.uint32(1 << 31)
    lanes = lax.broadcasted_iota(jnp.uint32, (*seeds.shape[:-1], width), seeds.ndim - 1)
    return _mixed(seeds ^ lanes * jnp.uint32(FACTORS[0]))


def _mixed(x: Array) -> Array:
    x = (x ^ x >> 16) * jnp.uint32(FACTORS[0])
    x = (x ^ x >> 13) * jnp.uint32(FACTORS[1])
    return x ^ x >> 16


def _split(wide: Array, encoding: Encoding) -> Array:
    """Divide the last dim into blocks: `[*rows, blocks, width]`. Unused elements at the end are zero."""
    unused = encoding.blocks * encoding.width - encoding.shape[-1]
    if unused:
        wide = jnp.pad(wide, [*[(0, 0)] * (wide.ndim - 1), (0, unused)])
    return wide.reshape(*wide.shape[:-1], encoding.blocks, encoding.width)


def _joined(blocks: Array, encoding: Encoding) -> Array:
    wide = blocks.reshape(*blocks.shape[:-2], -1)
    return lax.slice_in_dim(wide, 0, encoding.shape[-1], axis=-1)


def _parts_of(encoded: Array, encoding: Encoding) -> tuple[Array, Any, Any]:
    """Return codes, scales and seeds, each with one row per block, or None if blocks have no scale or no seed."""
    blocks = encoded.reshape(*encoded.shape[:-1], encoding.blocks, encoding.words)
    size = 4 // encoding.code_dtype.itemsize

    def word(n: int, dtype: Any) -> Array:
        start = encoding.codes + n * size
        bits = lax.slice_in_dim(blocks, start, start + size, axis=-1)
        return lax.bitcast_convert_type(bits if size > 1 else bits[..., 0], dtype)[..., None]

    scales = word(0, jnp.float32) if encoding.is_scaled else None
    seeds = word(int(encoding.is_scaled), jnp.uint32) if encoding.has_seeds else None
    return lax.slice_in_dim(blocks, 0, encoding.codes, axis=-1), scales, seeds


def _in_blocks(parts: list, encoding: Encoding) -> Array:
    """Undo `_parts_of`."""
    bits = [lax.bitcast_convert_type(x, encoding.code_dtype) for x in parts if x is not None]
    blocks = jnp.concatenate([x.reshape(*x.shape[: len(encoding.shape)], -1) for x in bits], axis=-1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def _primitive(name: str, fn: Callable[..., Array], last_dim: Callable, dtype: Callable) -> Callable[..., Array]:
    """Return `fn(*arrays, encoding)` as a primitive, for arrays with any number of rows."""
    primitive = Primitive(name)
    assert name in BY_BLOCK

    @primitive.def_abstract_eval
    def _aval(x: Any, *_: Any, encoding: Encoding) -> Any:
        shape = (*x.shape[:-1], last_dim(encoding))
        return x.update(shape=shape, dtype=jnp.dtype(dtype(encoding)), weak_type=False)

    primitive.def_impl(jax.jit(fn, static_argnames="encoding"))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    return lambda *args: primitive.bind(*args[:-1], encoding=args[-1])


_WIDE = (lambda encoding: encoding.shape[-1]), (lambda encoding: encoding.dtype)
_ENCODED = (lambda encoding: encoding.encoded_shape[-1]), (lambda encoding: encoding.code_dtype)
widen = _primitive("widen_blocks", widened, *_WIDE)
narrow = _primitive("narrow_blocks", narrowed, *_ENCODED)
round_to_bfloat16 = _primitive("round_blocks", rounded, *_WIDE)
