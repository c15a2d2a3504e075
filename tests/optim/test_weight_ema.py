"""The moving average of the weights, beside an average in NumPy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.optim.weight_ema import averaged, weight_ema

PARAMS = {"w": jnp.arange(3.0), "narrow": jnp.ones(2, jnp.bfloat16), "count": jnp.int32(4)}


def test_the_average_is_float32_or_wider_and_integers_stay_what_they_are():
    average = weight_ema(0.9).init(PARAMS).average
    assert {name: str(x.dtype) for name, x in average.items()} == {
        "w": "float32",
        "narrow": "float32",
        "count": "int32",
    }
    for name, x in average.items():
        np.testing.assert_array_equal(x, PARAMS[name])


@pytest.mark.parametrize("decay", [0, 0.75, 1])
def test_each_step_keeps_its_share(decay):
    tx = optax.chain(optax.identity(), weight_ema(decay))
    state, updates = tx.init(PARAMS), {"w": jnp.ones(3), "narrow": jnp.ones(2, jnp.bfloat16), "count": jnp.int32(2)}
    found, state = tx.update(updates, state, PARAMS)
    assert found is updates
    average = averaged(state)
    np.testing.assert_allclose(average["w"], decay * np.arange(3.0) + (1 - decay) * (np.arange(3.0) + 1))
    np.testing.assert_allclose(average["narrow"], decay + (1 - decay) * 2)
    assert int(average["count"]) == 6


@pytest.mark.parametrize("decay", [-0.01, 1.01])
def test_a_share_is_within_0_and_1(decay):
    with pytest.raises(ValueError, match="must be within 0 and 1"):
        weight_ema(decay)


def test_parameters_are_needed():
    tx = weight_ema(0.5)
    with pytest.raises(ValueError, match="averages the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))
