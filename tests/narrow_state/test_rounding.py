"""Codes of blocks: how large their errors are, that rounding is unbiased, and what must not be lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.layout.encoding import Encoding, is_encodable
from zerojax.narrow_state.masters import Compensated
from zerojax.narrow_state.rounding import first_encoded, narrow, recoded, round_to_bfloat16, widen

SHAPES = [(3, 64), (2, 3, 257), (5, 1000)]
# The largest error, as a part of the largest magnitude of the block, of elements of both signs, and of positive ones.
# A step of rounding is at most 1/63, or at most 1/8 of the element with 3 bits of mantissa, or 1/128 with 7 bits.
STEPS = {"int8": (1 / 63, 1 / 8), "float8": (1 / 8, 1 / 8), "bfloat16": (1 / 128, 1 / 128)}


def encoding(shape, fmt="int8", rounding="stochastic", block=256):
    return Encoding(shape, "float32", fmt, block, rounding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def roundings(x, of, count):
    """Round and widen the same array `count` times, each with the next seeds."""

    def body(encoded, _):
        encoded = narrow(x, encoded, of)
        return encoded, widen(encoded, of)

    return jax.lax.scan(body, first_encoded(x, of, 3), None, length=count)[1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", STEPS)
def test_errors_are_at_most_a_step_and_cancel_if_rounded_at_random(fmt, shape):
    rng = np.random.default_rng(0)
    both = rng.normal(size=shape) * 10 ** rng.uniform(-3, 3, size=shape)
    positive = 10 ** rng.uniform(-9, 0, size=shape)
    of, nearest = encoding(shape, fmt), encoding(shape, fmt, "nearest")
    for x, step in zip((both, positive), STEPS[fmt], strict=True):
        x = np.asarray(x, np.float32)
        rows = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, of.blocks * of.width - shape[-1])])
        largest = np.abs(rows).reshape(*shape[:-1], of.blocks, of.width).max(-1).repeat(of.width, -1)[..., : shape[-1]]
        found = np.asarray(roundings(x, of, 400))
        assert (np.abs(found - x) <= step * largest * 1.001).all()
        assert (np.abs(np.asarray(roundings(x, nearest, 1)) - x) <= step / 2 * largest * 1.001).all()
        # The mean of 400 errors, each within one step, is normal with a deviation of at most step / 40: six of them.
        assert (np.abs(found.mean(0) - x) <= 6 / 40 * step * largest).all()
        if (x > 0).all():
            assert (found > 0).all()


def test_seeds_of_blocks_differ_and_never_repeat_soon():
    of = encoding((64, 256), "seeds")
    first = first_encoded(jnp.zeros((64, 256)), of, 0)
    assert len(np.unique(first)) == 64
    assert not np.intersect1d(first, first_encoded(jnp.zeros((64, 256)), of, 1)).size
    once = narrow(jnp.zeros((64, 256)), first, of)
    assert not np.intersect1d(first, once).size


@pytest.mark.parametrize("fmt", STEPS)
def test_what_is_not_finite_is_seen(fmt):
    x = jnp.ones((4, 64)).at[0, 5].set(jnp.nan).at[1, 6].set(jnp.inf).at[2].set(8e37).at[3].set(-0.0)
    found = np.asarray(roundings(x, encoding(x.shape, fmt), 1))[0]
    assert np.isnan(found[0, 5])
    assert not np.isfinite(found[1, 6])
    assert np.isfinite(found[2]).all()
    np.testing.assert_allclose(found[2], 8e37, rtol=STEPS[fmt][1])
    assert (found[3] == 0).all()


def test_a_compensated_weight_keeps_sixteen_bits_and_forgets_a_changed_parameter():
    rng, form = np.random.default_rng(0), Compensated()
    weight = jnp.asarray(
        np.concatenate([rng.normal(size=4000), 1 + 2.0**-8 + np.arange(-8, 8) * 2.0**-18]), jnp.float32
    )
    param, error = form.kept(weight, weight)
    assert error.dtype == jnp.bfloat16
    assert (param == param.astype(jnp.bfloat16)).all()
    np.testing.assert_allclose(form.current(error, param), weight, rtol=2.0**-16)
    # What is added to a changed parameter is less than its type shows, or nothing.
    changed = jnp.asarray(rng.normal(size=param.shape), jnp.bfloat16).astype(jnp.float32)
    assert (form.current(error, changed).astype(jnp.bfloat16) == changed).all()
    assert (form.current(error, changed * 2.0**-20) == changed * 2.0**-20)[jnp.abs(error) > 2.0**-20].all()


def test_rounded_parameters_are_unbiased():
    of, x = encoding((4, 64), "seeds"), jnp.full((4, 64), 1 + 2.0**-9, jnp.float32)
    seeds, found = first_encoded(x, of, 0), []
    for _ in range(64):
        seeds = narrow(x, seeds, of)
        found.append(round_to_bfloat16(x, seeds, of))
    assert set(np.unique(found)) == {1.0, 1 + 2.0**-7}
    # 16,384 draws of probability 1/4: a deviation of 0.0034, of which five are allowed
    assert abs(np.mean(np.asarray(found) > 1) - 0.25) < 0.017


def test_an_encoding_is_converted_to_another():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 300)), jnp.float32)
    a, b = encoding(x.shape, "bfloat16"), encoding(x.shape, "int8", block=64)
    encoded = recoded(x, None, a)
    np.testing.assert_allclose(recoded(encoded, a, None), x, rtol=2.0**-7)
    assert recoded(encoded, a, b).shape == b.encoded_shape
    np.testing.assert_allclose(recoded(recoded(encoded, a, b), b, None), x, atol=4 / 63)
    assert recoded(encoded, a, encoding(x.shape, "seeds")).dtype == jnp.uint32


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((64, 64), True), ((9, 64, 64), True), ((4096,), False), ((64, 63), False), ((63, 5000), False), ((2, 64), False)],
)
def test_small_leaves_vectors_and_thin_matrices_stay_wide(shape, fits):
    assert is_encodable(shape, 4096) == fits
    assert not is_encodable(shape, 1 << 20)


def test_bytes_of_a_block():
    of = encoding((8, 512))
    assert of.encoded_shape == (8, 2 * (256 + 8))
    assert encoding((8, 512), "bfloat16").encoded_shape == (8, 2 * (256 + 2))
    assert encoding((8, 512), rounding="nearest").encoded_shape == (8, 2 * (256 + 4))
    assert encoding((8, 512), "seeds").encoded_shape == (8, 2)
    assert encoding((8, 1000)).width == 250
    assert str(of) == "int8 of float32[8, 512] in blocks of 256"
