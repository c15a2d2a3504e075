"""Parameters that are gathered in full before a loop: they train the same, and a warning names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disk_models import LOSSES, batch_of, layer, model_params, on_disk, sharded


def squares(x, params):
    return jnp.mean((x @ params["embed"].T) ** 2)


def solved(weights, x):
    """A fixed point by a loop that ends when it is reached, so that no derivative passes through it."""

    def more(carry):
        count, moved, _ = carry
        return (count < 5) & (moved > 1e-3)

    def body(carry):
        count, _, x = carry
        new = jnp.tanh(x @ weights["w"]) @ weights["w"].T / 4 + weights["bias"]
        return count + 1, jnp.max(jnp.abs(new - x)), new

    return jax.lax.while_loop(more, body, (0, jnp.ones((), x.dtype), x))[2]


def of_a_while_loop(params, batch):
    x = params["embed"][batch["tokens"]]
    start = jax.lax.stop_gradient(solved(jax.tree.map(lambda stack: stack[0], params["layers"]), x))
    return squares(layer(jax.tree.map(lambda stack: stack[1], params["layers"]), start + x), params)


def of_a_while_loop_in_a_branch(params, batch):
    x = params["embed"][batch["tokens"]]
    first = jax.tree.map(lambda stack: stack[0], params["layers"])
    found = jax.lax.cond(batch["tokens"][0] >= 0, lambda: solved(first, x), lambda: x)
    return squares(jax.lax.stop_gradient(found) + x, params)


def of_a_scan_in_remat(params, batch):
    run = jax.checkpoint(lambda stack, x: jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, stack)[0])
    return squares(run(params["layers"], params["embed"][batch["tokens"]]), params)


def of_microbatches(params, batch):
    rows = batch["tokens"].reshape(2, -1, *batch["tokens"].shape[1:])
    total, _ = jax.lax.scan(lambda sum, t: (sum + LOSSES["loop"](params, batch | {"tokens": t}), None), 0.0, rows)
    return total / 2


REPORTED = {
    "a while loop": (of_a_while_loop, "params['layers']['w']"),
    "a while loop in a branch": (of_a_while_loop_in_a_branch, "params['layers']['w']"),
    "a loop over microbatches": (of_microbatches, "params['layers']['w']"),
    "a scan in a remat": (of_a_scan_in_remat, "params['layers']['w']"),
}


def trained(tx, loss):
    step, state, losses = tx.train_step(loss), tx.create(model_params()), []
    for seed in range(2):
        state, metrics = step(state, batch_of(seed))
        losses.append(metrics["loss"])
    return jax.device_get((losses, tx.unshard(state.params)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in REPORTED])
def test_parameters_of_a_loop_are_reported_and_train_the_same(tmp_path, caplog, name):
    loss, leaf = REPORTED[name]
    with jax.enable_x64(True):
        found = trained(on_disk(tmp_path, devices=2), loss)
        reports = [record.message for record in caplog.records if record.name == "zerojax.staged"]
        wanted = trained(sharded(devices=2), loss)
    assert [leaf in report and "in full before the loop" in report for report in reports] == [True]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11), found, wanted)


def test_an_evaluation_reports_the_parameters_of_its_while_loop(tmp_path, caplog):
    tx = on_disk(tmp_path, devices=2)
    state = tx.create(model_params())
    given = model_params()

    def predict(params, batch):
        return solved(jax.tree.map(lambda stack: stack[2], params["layers"]), params["embed"][batch["tokens"]])

    found = tx.eval_step(predict)(state.params, batch_of())
    np.testing.assert_allclose(found, predict(given, batch_of()), atol=2e-6)
    (report,) = [record.message for record in caplog.records if record.name == "zerojax.staged"]
    assert "params['layers']['w'] in every iteration" in report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "remat_loop"])
def test_layers_that_are_read_one_by_one_are_not_reported(tmp_path, caplog, name):
    trained(on_disk(tmp_path, devices=2), LOSSES[name])
    assert not [record for record in caplog.records if record.name == "zerojax.staged"]
