"""The checksum with which processes compare arrays depends on every bit, and on the place of every element."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from zerojax.train.same_run import checksum, checksums


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float32", "bfloat16", "float16", "complex64"])
def test_a_checksum_depends_on_each_element_and_its_place(dtype):
    x = np.arange(24).reshape(4, 6).astype(getattr(ml_dtypes, dtype, dtype))
    other = x.copy()
    other[3, 5] = not other[3, 5] if dtype == "bool" else other[3, 5] + 1
    found = {int(checksum(jnp.asarray(y))) for y in (x, other, x[::-1].copy())}
    assert len(found) == 3
    assert int(checksum(jnp.asarray(x))) == int(checksum(jnp.asarray(x.copy())))


def test_each_bit_counts():
    bits = 1 << np.arange(32, dtype=np.uint32)
    assert len({int(checksum(jnp.asarray(bit)[None])) for bit in (*bits, np.uint32(0))}) == 33


def test_keys_and_numbers_have_checksums_and_words_have_none():
    found = checksums({"args": {"key": jax.random.key(0), "rate": 0.5, "name": "word"}})
    assert sorted(found) == ["the checksum of args['key']", "the checksum of args['rate']"]
