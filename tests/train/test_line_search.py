"""Line searches, which store loss and gradient in their state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

import zerojax
from zerojax import zero_shard

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# No dim of `w` and `b` is divided by 4 devices.
PARAMS = {"w": jnp.sin(jnp.arange(42.0)).reshape(6, 7), "b": jnp.zeros(13), "frozen": jnp.ones(7)}
BATCH = jnp.cos(jnp.arange(48.0)).reshape(8, 6)


def loss(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) * p["frozen"]) ** 2) + jnp.mean((p["b"] - 1) ** 2)


def lbfgs():
    return optax.lbfgs(memory_size=2)


def backtracking():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=4, store_grad=True)
    return optax.chain(optax.sgd(0.5), search)


def fitted(tx, gradient, params):
    """Two steps; the second one takes value and gradient from the state."""

    @jax.jit
    def step(params, state):
        value, grad = gradient(params, BATCH, state=state)
        extra = {"value": value, "grad": grad, "value_fn": lambda p: loss(p, BATCH)}
        updates, state = tx.update(grad, state, params, **extra)
        return value, optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(2):
        value, params, state = step(params, state)
    return value, params, state


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optimizer"), [(3, backtracking), slow(1, lbfgs)])
def test_value_and_gradient_come_from_the_state(stage, optimizer):
    tx = zero_shard(optimizer(), stage=stage, mesh=mesh_of(4), persist_below=0)
    gradient = zerojax.value_and_grad_from_state(tx, loss)
    value, params, state = fitted(tx, gradient, tx.shard(PARAMS))
    expected, plainly, _ = fitted(optimizer(), optax.value_and_grad_from_state(loss), PARAMS)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, x in plainly.items():
        np.testing.assert_allclose(params[name], x, rtol=1e-4, atol=1e-5, err_msg=name)  # the search divides by sums
    # The state's value and gradient are taken as they are, those of no other parameters too.
    marked = optax.tree.set(state, value=jnp.float32(42))
    value, grads = gradient(jax.tree.map(jnp.zeros_like, params), BATCH, state=marked)
    assert value == 42
    want = jax.grad(loss)({name: jnp.asarray(x) for name, x in params.items()}, BATCH)
    for name, x in want.items():
        np.testing.assert_allclose(grads[name], x, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_has_no_stored_gradient_is_refused():
    make = functools.partial(zero_shard, stage=2, mesh=mesh_of(4))
    tx = make(optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"no value and gradient.*store_grad=True"):
        zerojax.value_and_grad_from_state(tx, loss)(tx.shard(PARAMS), BATCH, state=tx.init(PARAMS))
    tx = make(lbfgs(), overwrite=lambda path, leaf: path == "frozen")
    with pytest.raises(ValueError, match=r"params\['frozen'\] takes its gradient as the new value"):
        zerojax.value_and_grad_from_state(tx, loss)(tx.shard(PARAMS), BATCH, state=tx.init(PARAMS))


def test_a_row_for_each_device_is_enough():
    tx = zero_shard(backtracking(), stage=1, mesh=mesh_of(4), persist_below=0)
    gradient = functools.partial(zerojax.value_and_grad_from_state(tx, loss), state=tx.init(PARAMS))
    value, grads = jax.eval_shape(lambda: gradient(PARAMS, BATCH[:4]))
    assert value.shape == ()
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, PARAMS)
