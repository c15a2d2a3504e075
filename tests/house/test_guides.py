"""Idioms of the newest guides of JAX, optax and Flax NNX: stages 1 and 3 give what they give without zerojax."""

import functools

import guides
import guides_nnx  # noqa: F401
import guides_optax  # noqa: F401
import jax
import numpy as np
import pytest
from conftest import quick_or_slow
from guides import IDIOMS

QUICK = [("sharpness_aware_opaque", 3)]


@functools.cache
def plain(name):
    expected = jax.device_get(IDIOMS[name](guides.Plain()))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))  # equal NaN would say nothing
    return expected


@pytest.mark.parametrize(
    ("name", "stage"), quick_or_slow([(name, (1, 3, 3)[i % 3]) for i, name in enumerate(IDIOMS)], QUICK)
)
def test_an_idiom_gives_what_it_gives_on_one_device(name, stage):
    found = jax.device_get(IDIOMS[name](guides.Zero(stage)))
    # Sums over rows are made in another order, and later steps build on them.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, plain(name))
