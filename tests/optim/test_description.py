"""The description of a transformation has its constants; tests of checkpoints compare descriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.config import DataMesh, LayoutPolicy
from zerojax.layout.tree import lay_out
from zerojax.optim.description import describe_constant, description_of

PARAMS = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (np.float32(0.1), "0.1"),
        (jnp.full((1, 1), 2.0), "2"),
        (3, "3"),
        (True, "True"),
        (1j, "0+1j"),
    ],
)
def test_a_constant_is_a_number_or_a_digest(value, text):
    assert describe_constant(value) == text
    ones = describe_constant(np.ones(2, np.float32))
    assert ones.startswith("float32[2] ")
    assert ones == describe_constant(jnp.ones(2)) != describe_constant(np.array([1, 2], np.float32))


def test_a_key_is_described_by_its_data():
    assert (
        describe_constant(jax.random.key(1))
        == describe_constant(jax.random.key_data(jax.random.key(1)))
        != describe_constant(jax.random.key(2))
    )


def described(tx):
    return description_of(tx, lay_out(PARAMS, LayoutPolicy(0, DataMesh.for_stage({"data": 1}, ("data",), 0), 0)))


def test_constants_are_among_the_operations():
    assert "mul 0.8" in described(optax.adam(1e-3, b1=0.8)).operations
    offset = np.array([1.0, 2.0, 3.0], np.float32)
    closed = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g + offset, grads))
    assert any(name.startswith("constant float32[3] ") for name in described(closed).operations)
