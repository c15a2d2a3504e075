"""Parameters in the storage of one transformation, in a loop of another."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.layout.padded import Padded

# No dim is divided by 4 devices.
PARAMS = {"w": jnp.sin(jnp.arange(77.0)).reshape(7, 11), "v": jnp.cos(jnp.arange(55.0)).reshape(11, 5)}
BATCH = jnp.cos(jnp.arange(12 * 7.0)).reshape(12, 7)


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)


def trained(tx, params) -> Any:
    state, gradient = tx.init(params), getattr(tx, "value_and_grad", jax.value_and_grad)(loss)
    for _ in range(2):
        _, grads = gradient(params, BATCH)
        assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 0])
def test_padded_parameters_keep_their_form_in_a_loop_of_another_stage(stage):
    make = functools.partial(zero_shard, optax.adam(1e-2), mesh=mesh_of(4), persist_below=0)
    given = make(stage=3).shard(PARAMS)
    assert all(isinstance(x, Padded) for x in given.values())
    found = trained(make(stage=stage), given)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for name, x in trained(optax.adam(1e-2), PARAMS).items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, err_msg=name)
