"""Transformations are described alike if they compute alike, whatever their leaves, and differently if they do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.optim.transformation import Describe, in_words

PARAMS = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}


def describe(tx, params=None):
    return Describe(tx, PARAMS if params is None else params).description


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
    assert in_words(value) == text
    ones = in_words(np.ones(2, np.float32))
    assert ones.startswith("float32[2] ")
    assert ones == in_words(jnp.ones(2)) != in_words(np.array([1, 2], np.float32))


def test_a_key_is_described_by_its_data():
    assert (
        in_words(jax.random.key(1)) == in_words(jax.random.key_data(jax.random.key(1))) != in_words(jax.random.key(2))
    )


def test_the_structure_names_the_nodes_and_the_parameters_tree():
    assert describe(optax.adam(1e-3)).structure == "(ScaleByAdamState(*, params, params), EmptyState())"
    assert describe(optax.sgd(1e-3)).structure == "(EmptyState(), EmptyState())"
    injected = describe(optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3)).structure
    assert "'learning_rate': *" in injected


def test_constants_are_among_the_operations():
    assert "mul 0.9" in describe(optax.adam(1e-3)).operations
    assert "mul 0.8" in describe(optax.adam(1e-3, b1=0.8)).operations
    offset = np.array([1.0, 2.0, 3.0], np.float32)
    closed = optax.stateless(lambda grads, params: jax.tree.map(lambda g: g + offset, grads))
    assert any(name.startswith("constant float32[3] ") for name in describe(closed).operations)


def test_equal_updates_have_one_description_and_others_have_another():
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), PARAMS)
    assert describe(optax.adam(1e-3)) == describe(optax.adam(1e-3)) == describe(optax.adam(1e-3), wide)
    others = [optax.adam(1e-3), optax.adam(2e-3), optax.adamw(1e-3), optax.lamb(1e-3), optax.sgd(1e-3)]
    assert len({describe(tx).program for tx in others}) == len(others)


def test_a_transformation_that_needs_more_arguments_has_a_structure_alone():
    needs = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda grads, state, params=None, *, more: (more, ())
    )
    assert (describe(needs).structure, describe(needs).operations) == ("()", ())
