"""The example of rollouts: workers have the weights of one step ago, in their names, and the policy learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollouts import Loop, init, renamed, rollout, train


def test_the_workers_weights_are_one_step_old():
    loop, key = Loop(), jax.random.key(0)
    state = loop.tx.create(loop.tx.init_params(init, key))
    weights = loop.handed_over(renamed(state.params))
    batch = rollout(weights, jax.device_put(key, loop.everywhere))
    for _ in range(2):
        old = jax.device_get(loop.tx.unshard(state.params))
        state, weights, batch = loop.iterate(state, weights, batch, key)
        expected = {"net.0.weight": old["up"].T, "net.0.bias": old["shift"], "net.2.weight": old["down"].T}
        assert weights.keys() == expected.keys()
        for name, x in expected.items():
            assert np.array_equal(weights[name], x.astype(jnp.bfloat16)), name
            assert weights[name].sharding == loop.everywhere
    assert not np.array_equal(old["up"], jax.device_get(loop.tx.unshard(state.params))["up"])
    assert not loop.everywhere.device_set & loop.rows.device_set


@pytest.mark.slow
def test_the_policy_learns():
    rewards = train(jax.random.key(0), steps=60)
    assert rewards[0] < 0.4
    assert rewards[-1] > 0.6
