"""Twenty steps with parameters on disk, and in host memory, equal those in memory.

In float64, because Adam divides a gradient by its size. Where a gradient is almost zero, as for a row of an embedding
that is seldom seen, one unit of rounding in float32 can change an update by the whole learning rate. Plain JAX on one
device does so too, if one unit changes its parameters. In float64 Adam's `eps` is far larger than rounding.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disk_models import LOSSES, batch_of, model_params, on_disk, sharded

from zerojax import Offload

STEPS = 20
RTOL = 1e-11  # float64 rounds at 1e-16; steps amplify it
PLACES = {
    "host": lambda path, devices: sharded(
        devices=devices, offload=Offload(optimizer="host", params="host", update="device")
    ),
    "disk": lambda path, devices: on_disk(path, devices=devices),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def trained(tx, loss):
    """The losses, and the logical parameters and optimizer state at the end."""
    step, state, losses = tx.train_step(loss), tx.create(model_params()), []
    for seed in range(STEPS):
        state, metrics = step(state, batch_of(seed))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get((tx.unshard(state.params), tx.unshard(state.opt_state, state.params)))


@functools.cache
def in_memory(name, devices):
    return trained(sharded(devices=devices), LOSSES[name])


def assert_equal(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=RTOL, atol=RTOL * np.abs(y).max())


CASES = [
    pytest.param(*case, marks=() if case == ("loop", 1, "disk") else pytest.mark.slow)
    for case in itertools.product(["loop", "one_by_one"], [1, 3, 8], PLACES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices", "place"), CASES)
def test_twenty_steps_equal_those_in_memory(tmp_path, name, devices, place):
    found = trained(PLACES[place](tmp_path, devices), LOSSES[name])
    wanted = in_memory(name, devices)
    assert wanted[0][-1] < 0.5 * wanted[0][0]
    assert jax.tree.leaves(wanted[1])[0].dtype == jnp.float64
    assert_equal(found, wanted)
