"""Loops over parameters on disk: a stack is read one layer per iteration, or refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disk_models import LOSSES, batch_of, layer, model_params, on_disk, sharded


def squares(x, params):
    return jnp.mean((x @ params["embed"].T) ** 2)


def of_a_while_loop(params, batch):
    """A fixed point of the first layer, through which no derivative passes, and then the second layer."""
    x = params["embed"][batch["tokens"]]
    first, second = (jax.tree.map(lambda stack, i=i: stack[i], params["layers"]) for i in range(2))
    more = lambda carry: (carry[0] < 5) & (jnp.abs(carry[1]).max() > 1e-3)
    body = lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ first["w"]) @ first["w"].T / 4 + first["bias"])
    return squares(layer(second, jax.lax.stop_gradient(jax.lax.while_loop(more, body, (0, x))[1]) + x), params)


def of_time_steps(params, batch):
    first = jax.tree.map(lambda stack: stack[0], params["layers"])
    rows = params["embed"][batch["tokens"]].reshape(3, 16, 16)
    return squares(jax.lax.scan(lambda x, row: (layer(first, x + row), None), jnp.zeros((16, 16)), rows)[0], params)


def of_a_scan_in_remat(params, batch):
    run = jax.checkpoint(lambda stack, x: jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, stack)[0])
    return squares(run(params["layers"], params["embed"][batch["tokens"]]), params)


def of_microbatches(params, batch):
    rows = batch["tokens"].reshape(2, -1, *batch["tokens"].shape[1:])
    total, _ = jax.lax.scan(lambda sum, t: (sum + LOSSES["loop"](params, batch | {"tokens": t}), None), 0.0, rows)
    return total / 2


def of_a_stack_that_is_carried(params, batch):
    def step(carry, _):
        w, x = carry
        return (0.9 * w, x + jnp.tanh(x @ w[0]) @ w[0].T), None

    start = params["layers"]["w"], params["embed"][batch["tokens"]]
    return squares(jax.lax.scan(step, start, length=2)[0][1], params)


def of_a_stack_that_the_loss_makes(params, batch):
    x, stack = params["embed"][batch["tokens"]], jnp.stack([params["layers"]["w"][i] for i in range(2)])
    return squares(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), x, stack)[0], params)


def of_a_stack_that_is_sharded_over_its_layers(params, batch):
    x = params["embed"][batch["tokens"]]
    return squares(jax.lax.scan(lambda x, w: (x * jnp.tanh(w), None), x, params["embed"])[0], params)


def trained(tx, loss):
    step, state, losses = tx.train_step(loss), tx.create(model_params()), []
    for seed in range(2):
        state, metrics = step(state, batch_of(seed))
        losses.append(metrics["loss"])
    return jax.device_get((losses, tx.unshard(state.params)))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [of_a_while_loop, of_time_steps])
def test_a_parameter_that_all_iterations_read_trains_the_same(tmp_path, loss):
    with jax.enable_x64(True):
        found, wanted = trained(on_disk(tmp_path, devices=2), loss), trained(sharded(devices=2), loss)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11), found, wanted)


STACK = r"\['layers'\]\['w'\]"
REFUSED = {
    of_a_scan_in_remat: STACK,
    of_microbatches: STACK,
    of_a_stack_that_is_carried: STACK,
    of_a_stack_that_the_loss_makes: STACK,
    of_a_stack_that_is_sharded_over_its_layers: r"\['embed'\]",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_a_stack_that_is_not_read_one_layer_per_iteration_is_refused(tmp_path, loss):
    tx = on_disk(tmp_path, devices=2)
    state = tx.create(model_params())
    with pytest.raises(ValueError, match=rf"A loop reads params{REFUSED[loss]}, but not one layer per iteration"):
        tx.train_step(loss)(state, batch_of())
    with pytest.raises(ValueError, match=r"put jax\.checkpoint around one layer"):
        tx.eval_step(loss)(state.params, batch_of())
