"""Convert between wide arrays and encoded arrays, with blocks along the last dim. `layout.encoding` describes the form.

Three primitives do this. An update is analysed equation by equation, and the analyses know that these primitives read
and write whole blocks: `BY_BLOCK`. So rows of a encoded array may be updated by any device and in chunks.

Codes of 8 bits are fractions of the largest magnitude in the block, its scale. If the block has no negative element,
the sign of the scale is set, and a code has 5 bits of exponent and 3 of mantissa. Otherwise a code has a sign, and 7
bits that are a multiple of 1/127 (`"int8"`), or 4 bits of exponent and 3 of mantissa (`"float8"`). No code of a
nonzero element is zero if the block has no negative element, because an update may divide by second moments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from zerojax.layout.encoding import BY_BLOCK, Encoding

if TYPE_CHECKING:
    from jaxtyping import Array, Float, UInt

MANTISSA = 3  # bits of mantissa of the codes with exponents
FIXED = 17  # bits after the point of a number that is rounded to an integer of 7 bits: 24 in all, as float32 has
STEP = 0x9E3779B9  # added to a seed at each update: 2^32 over the golden ratio, an odd number, so all seeds occur
SIGN = 0x80


def widened(encoded: UInt[Array, "*rows words"], *, encoding: Encoding) -> Array:
    """Return the wide array that a encoded array represents, in the type of `encoding`."""
    codes, scales, _ = _parts_of(encoded, encoding)
    if encoding.format == "bfloat16":
        wide = lax.bitcast_convert_type(codes.astype(jnp.uint32) << 16, jnp.float32)
    else:
        magnitude = codes & (SIGN - 1)
        fraction = magnitude.astype(jnp.float32) / (SIGN - 1)
        signed = _from_float_code(magnitude, SIGN - 1) if encoding.format == "float8" else fraction
        signed = jnp.where(codes >= SIGN, -signed, signed)
        wide = jnp.where(jnp.signbit(scales), _from_float_code(codes, 2 * SIGN - 1), signed) * jnp.abs(scales)
    return _joined(wide, encoding).astype(encoding.dtype)


def narrowed(wide: Array, encoded: UInt[Array, "*rows words"], *, encoding: Encoding) -> UInt[Array, "*rows words"]:
    """Round and encode a wide array. The seeds are those of `encoded`, the old encoded array, advanced by one step."""
    _, _, seeds = _parts_of(encoded, encoding)
    seeds = None if seeds is None else seeds + jnp.uint32(STEP)
    if encoding.format == "seeds":
        return _in_blocks(None, None, seeds, encoding)
    x, noise = _split(wide.astype(jnp.float32), encoding), _noise(seeds, encoding.width)
    if encoding.format == "bfloat16":
        return _in_blocks((_to_bfloat16(x, noise) >> 16).astype(jnp.uint16), None, seeds, encoding)
    # A wide program flushes subnormal numbers to zero, too.
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    largest = jnp.where(largest < jnp.finfo(jnp.float32).tiny, 0, largest)
    has_sign = ~jnp.all(x >= 0, axis=-1, keepdims=True)
    # A compiler may multiply by the reciprocal of `largest`, which must not be subnormal.
    down = jnp.where(largest > 1, jnp.float32(2.0**-64), 1)
    part = jnp.where(largest > 0, jnp.abs(x) * down / jnp.where(largest > 0, largest * down, 1), 0)
    if encoding.format == "float8":
        signed = _to_float_code(part, noise, SIGN - 1)
    else:
        # In integers, because a compiler may or may not round a product before it adds the noise.
        fixed = (part * (SIGN - 1 << FIXED)).astype(jnp.uint32) + (noise >> 32 - FIXED)
        signed = jnp.minimum(fixed >> FIXED, SIGN - 1).astype(jnp.int32)
    signed = jnp.where(x < 0, signed + SIGN, signed)
    unsigned = jnp.maximum(_to_float_code(part, noise, 2 * SIGN - 1), part > 0)
    # A NaN or an infinity is not lost: it makes the scale NaN or infinite, and so the block.
    codes = jnp.where(has_sign, signed, unsigned).astype(jnp.uint8)
    return _in_blocks(codes, jnp.where(has_sign, largest, -largest), seeds, encoding)


def rounded(wide: Float[Array, "*rows n"], encoded: UInt[Array, "*rows words"], *, encoding: Encoding) -> Array:
    """Round a float32 array stochastically to numbers that bfloat16 has. The seeds are those of `encoded`."""
    _, _, seeds = _parts_of(encoded, encoding)
    bits = _to_bfloat16(_split(wide, encoding), _noise(seeds, encoding.width))
    return _joined(lax.bitcast_convert_type(bits, jnp.float32), encoding)


def first_encoded(wide: Array, encoding: Encoding, number: int) -> UInt[Array, "*rows words"]:
    """Pack a wide array for the first time. `number` is the leaf's, so that seeds of several leaves differ."""
    shape = (*encoding.shape[:-1], encoding.blocks)
    at = functools.reduce(
        lambda n, dim: n * jnp.uint32(shape[dim]) + lax.broadcasted_iota(jnp.uint32, shape, dim),
        range(len(shape)),
        jnp.zeros(shape, jnp.uint32),
    )
    seeds = _mixed(at + _mixed(jnp.uint32(number + 1)))[..., None]
    # Most first states are constants, and XLA would take seconds to fold the codes of a constant. It does not know that
    # an integer of 32 bits has fewer than 33 bits set, so this sum is no constant.
    wide = _joined(_split(wide, encoding) + (lax.population_count(seeds) // 33).astype(wide.dtype), encoding)
    empty = jnp.zeros((*shape, encoding.codes), encoding.code_dtype)
    scales = jnp.zeros((*shape, 1), jnp.float32) if encoding.is_scaled else None
    return narrow(wide, _in_blocks(empty, scales, seeds if encoding.has_seeds else None, encoding), encoding)


def _to_float_code(part: Float[Array, "*block"], noise: Any, largest: int) -> Array:
    """Round fractions of at most 1 to codes from 0 to `largest`, which is the code of 1."""
    drop = jnp.finfo(jnp.float32).nmant - MANTISSA
    offset = (jnp.finfo(jnp.float32).maxexp - 1 << MANTISSA) - largest
    code = (lax.bitcast_convert_type(part, jnp.uint32) + (noise >> 32 - drop) >> drop).astype(jnp.int32) - offset
    least = lax.bitcast_convert_type(jnp.uint32(1 + offset << drop), jnp.float32)
    return jnp.where(part < least, (_uniform(noise) < part / least).astype(jnp.int32), jnp.minimum(code, largest))


def _from_float_code(code: Array, largest: int) -> Float[Array, "*block"]:
    """Undo `_to_float_code`."""
    drop = jnp.finfo(jnp.float32).nmant - MANTISSA
    offset = (jnp.finfo(jnp.float32).maxexp - 1 << MANTISSA) - largest
    bits = code.astype(jnp.uint32) + jnp.uint32(offset) << drop
    return jnp.where(code == 0, 0, lax.bitcast_convert_type(bits, jnp.float32))


def _to_bfloat16(x: Float[Array, "*block"], noise: Any) -> UInt[Array, "*block"]:
    """Return the bits of float32 numbers that are rounded to bfloat16. NaN, infinities and overflows stay or clip."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    largest = jnp.uint32(0x7F7F0000)
    up = jnp.where((bits & 0x7FFFFFFF) >= largest, 0, noise >> 16)  # nothing becomes infinite
    quiet = jnp.where(jnp.isnan(x), jnp.uint32(0x00400000), 0)
    return (bits + up | quiet) & jnp.uint32(0xFFFF0000)


def _noise(seeds: Array | None, width: int) -> Any:
    """Return 32 random bits per element of a block. Without seeds, return the bits that round to the nearest code."""
    if seeds is None:
        return jnp.uint32(1 << 31)
    lanes = lax.broadcasted_iota(jnp.uint32, (*seeds.shape[:-1], width), seeds.ndim - 1)
    return _mixed(seeds ^ lanes * jnp.uint32(0x85EBCA6B))


def _mixed(x: Array) -> Array:
    """Return a hash of 32 bits: the finalizer of MurmurHash3 (Appleby, public domain)."""
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16


def _uniform(noise: Any) -> Any:
    """Return numbers of at least 0 and below 1. They are exact in float32."""
    return (noise >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _split(wide: Array, encoding: Encoding) -> Array:
    """Divide the last dim into blocks: `[*rows, blocks, width]`. Unused elements are zero."""
    unused = encoding.blocks * encoding.width - encoding.shape[-1]
    if unused:
        wide = jnp.pad(wide, [*[(0, 0)] * (wide.ndim - 1), (0, unused)])
    return wide.reshape(*wide.shape[:-1], encoding.blocks, encoding.width)


def _joined(blocks: Array, encoding: Encoding) -> Array:
    """Undo `_split`."""
    wide = blocks.reshape(*blocks.shape[:-2], encoding.blocks * encoding.width)
    return lax.slice_in_dim(wide, 0, encoding.shape[-1], axis=-1)


def _parts_of(encoded: Array, encoding: Encoding) -> tuple[Array, Any, Any]:
    """Return codes, scales and seeds. Their last dim is that of a block, with 1 for scales and seeds, or None."""
    blocks = encoded.reshape(*encoded.shape[:-1], encoding.blocks, encoding.words)
    size, found = 4 // encoding.code_dtype.itemsize, []
    for n in range(encoding.is_scaled + encoding.has_seeds):
        start = encoding.codes + n * size
        word = lax.slice_in_dim(blocks, start, start + size, axis=-1)
        word = lax.bitcast_convert_type(word if size > 1 else word[..., 0], jnp.uint32)
        found.append(word[..., None])
    scales = lax.bitcast_convert_type(found[0], jnp.float32) if encoding.is_scaled else None
    return lax.slice_in_dim(blocks, 0, encoding.codes, axis=-1), scales, found[-1] if encoding.has_seeds else None


def _in_blocks(codes: Array | None, scales: Array | None, seeds: Array | None, encoding: Encoding) -> Array:
    """Undo `_parts_of`."""
    words = []
    for word in (scales, seeds):
        if word is not None:
            bits = lax.bitcast_convert_type(word, encoding.code_dtype)
            words.append(bits.reshape(*word.shape[:-1], -1))
    blocks = (
        lax.concatenate([*([codes] if encoding.codes and codes is not None else []), *words], words[0].ndim - 1)
        if words
        else codes
    )
    return blocks.reshape(*blocks.shape[:-2], encoding.blocks * encoding.words)


def _primitive(name: str, fn: Callable[..., Array], shape_of: Callable[[Any, Encoding], tuple]) -> Primitive:
    """Return a primitive that computes `fn`, which takes arrays with any number of rows."""
    primitive = Primitive(name)

    def aval(first, *_, encoding: Encoding):
        shape, dtype = shape_of(first, encoding)
        return first.update(shape=shape, dtype=dtype, weak_type=False)

    primitive.def_abstract_eval(aval)
    primitive.def_impl(jax.jit(fn, static_argnames="encoding"))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    return primitive


_wide_like = lambda x, encoding: ((*x.shape[:-1], encoding.shape[-1]), jnp.dtype(encoding.dtype))
_encoded_like = lambda x, encoding: ((*x.shape[:-1], encoding.encoded_shape[-1]), encoding.code_dtype)
WIDEN = _primitive("widen_blocks", widened, _wide_like)
NARROW = _primitive("narrow_blocks", narrowed, _encoded_like)
ROUND = _primitive("round_blocks", rounded, _wide_like)
assert {WIDEN.name, NARROW.name, ROUND.name} == BY_BLOCK


def widen(encoded: Array, encoding: Encoding) -> Array:
    """Return the wide array that a encoded array represents; see `widened`."""
    return WIDEN.bind(encoded, encoding=encoding)


def narrow(wide: Array, encoded: Array, encoding: Encoding) -> Array:
    """Return a wide array, rounded and encoded, with the next seeds of `encoded`; see `narrowed`."""
    return NARROW.bind(wide, encoded, encoding=encoding)


def round_to_bfloat16(wide: Array, encoded: Array, encoding: Encoding) -> Array:
    """Return a float32 array of numbers that bfloat16 has; see `rounded`."""
    return ROUND.bind(wide, encoded, encoding=encoding)


def recoded(x: Array, source: Encoding | None, target: Encoding | None) -> Array:
    """Convert an array of logical shape from one encoding to another. None: the array is wide. New seeds begin anew."""
    if source is not None and source.format != "seeds":
        x = widen(x, source)
    if target is None:
        return x
    wide = jnp.zeros(target.shape, target.dtype) if target.format == "seeds" else x
    return first_encoded(wide, target, 0)
