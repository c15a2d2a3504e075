"""What a loss returns beside its loss: as returned where one call sees all rows, else as its marker says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, zero_shard
from zerojax.metrics import Mean, PerRow, Replicated, Sum

BATCH = jax.random.normal(jax.random.key(0), (48, 3))
PARAMS = {"w": jnp.linspace(-1, 1, 3 * 64).reshape(3, 64)}


def marked(params, batch):
    logits = batch @ params["w"]
    positive = logits[:, 0] > 0
    aux = {
        "logits": PerRow(logits),
        "seen": Sum({"rows": jnp.asarray(batch.shape[0]), "positive": positive.sum()}),
        "columns": Mean(logits.mean(0)),
        "version": Replicated(jnp.array([3, 4])),
        "loss": jnp.mean(logits),
    }
    return jnp.mean(logits**2), aux


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("view", "accumulate", "stage"), [("device", 3, 0), ("global", 2, 3), ("device", 1, 3), ("global", 1, 1)]
)
def test_marked_aux_is_that_of_all_rows(view, accumulate, stage):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(8), view=view, tuning=Tuning(persist_below=20))
    grad = tx.value_and_grad(marked, has_aux=True, accumulate=accumulate)
    (_, aux), _ = grad(tx.shard(PARAMS), BATCH)
    (_, expected), _ = jax.value_and_grad(marked, has_aux=True)(PARAMS, BATCH)
    expected = {name: x.tree if isinstance(x, Mean | PerRow | Replicated | Sum) else x for name, x in expected.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), aux, expected)


def test_what_is_not_marked_is_as_it_was_returned_where_the_loss_sees_all_rows():
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), view="global", tuning=Tuning(persist_below=20))
    loss = lambda p, b: (jnp.mean((b @ p["w"]) ** 2), (b @ p["w"], jnp.argmax(b, 0), b > 0))
    state, step = tx.create(PARAMS), tx.train_step(loss, has_aux=True)
    _, metrics = step(state, BATCH)
    jax.tree.map(np.testing.assert_allclose, metrics["aux"], loss(PARAMS, BATCH)[1])


@pytest.mark.parametrize(("options", "form"), [({}, 2), ({"has_aux": True}, 3)])
def test_mutable_state_goes_through_a_gradient(options, form):
    """One microbatch after the other."""
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=20))

    def loss(params, seen, batch):
        return (jnp.mean((batch @ params["w"]) ** 2), {"rows": seen["rows"] + len(batch)}, batch.mean())[:form]

    grad = tx.value_and_grad(loss, mutable=True, accumulate=2, **options)
    (value, seen, *_), _ = grad(tx.shard(PARAMS), {"rows": jnp.array(5)}, BATCH)
    np.testing.assert_allclose(value, loss(PARAMS, {"rows": 0}, BATCH)[0], rtol=1e-5)
    assert seen["rows"] == 5 + 48
