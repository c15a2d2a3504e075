"""What a step tells: the learning rate, norms of parameters and updates, aux, and the numbers of steps in a profile.

Aux is as the loss returned it where one call sees all rows. Otherwise its marker says how it is combined.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, shape
from jax.sharding import AxisType

from zerojax import Offload, Tuning, collectives, zero_shard
from zerojax.metrics import Mean, PerRow, Replicated, Sum
from zerojax.train.optional_outputs import norms_of_update

PARAMS = {"w": jnp.ones((16, 64)), "v": jnp.ones((64, 3)), "learning_rate": jnp.ones(())}
BATCH = jnp.ones((16, 16))
ROWS = jax.random.normal(jax.random.key(0), (48, 3))
WEIGHTS = {"w": jnp.linspace(-1, 1, 3 * 64).reshape(3, 64)}
SCHEDULE = optax.linear_schedule(0.0, 1.0, 8)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"]) @ params["v"]) * params["learning_rate"]


def begun(tx, *, offload=None, **options):
    tx = zero_shard(tx, stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=8), offload=offload)
    return tx.train_step(loss, **options), tx.create(PARAMS)


@pytest.mark.parametrize("offload", [None, pytest.param(Offload(optimizer="host"), marks=pytest.mark.slow)])
def test_metrics_have_the_learning_rate_of_their_step(offload):
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE))
    step, state = begun(tx, offload=offload, skip_nonfinite=True)
    for i, batch in enumerate([BATCH, BATCH, jnp.nan * BATCH, BATCH]):
        state, metrics = step(state, batch)
        assert metrics["learning_rate"] == SCHEDULE([0, 1, 2, 2][i])  # a skipped step leaves the schedule alone


def test_metrics_have_no_learning_rate_where_the_state_has_not_exactly_one():
    rates = {k: optax.inject_hyperparams(optax.sgd)(learning_rate=r) for k, r in (("a", 0.1), ("b", 1.0))}
    several = optax.partition(rates, {"w": "a", "v": "b", "learning_rate": "b"})
    for tx in (optax.adam(SCHEDULE), several):  # optax keeps the count of a schedule, and no rate
        step, state = begun(tx)
        assert "learning_rate" not in jax.eval_shape(step, state, BATCH)[1]


def test_a_profile_has_the_number_of_each_step(tmp_path):
    step, state = begun(optax.sgd(1e-3))
    state, _ = step(state, BATCH)
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            state, metrics = step(state, BATCH)
        metrics["loss"].block_until_ready()
    (profile,) = pathlib.Path(tmp_path).rglob("*.xplane.pb")
    events = [
        dict(event.stats)
        for plane in jax.profiler.ProfileData.from_file(str(profile)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert [int(np.asarray(event["step_num"])) for event in events] == [1, 2]


def norms_loss(params, batch):
    return batch.mean() * sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))


@pytest.mark.slow
def test_a_step_tells_how_far_each_parameter_moved():
    """A step that is skipped moves none."""
    kept = optax.masked(optax.set_to_zero(), {"w": False, "b": True, "small": False})
    tx = optax.chain(optax.sgd(0.1), optax.add_noise(0.01, 0.5, 3), kept)
    tx = zero_shard(tx, stage=3, mesh=mesh_of(7), tuning=Tuning(persist_below=10))
    start = {
        "w": jnp.linspace(-1, 4, 9 * 51).reshape(9, 51),
        "b": jnp.linspace(1, 3, 23),
        "small": jnp.linspace(-5, -4, 15).reshape(3, 5),
    }
    step, state = tx.train_step(norms_loss, leaf_norms=True, skip_nonfinite=True), tx.create(start)
    for batch, is_skipped in ((jnp.ones((7, 1)), False), (jnp.full((7, 1), jnp.inf), True)):
        before = tx.unshard(state.params)
        state, metrics = step(state, batch)
        after = tx.unshard(state.params)
        assert metrics["skipped"] == is_skipped
        for name, old in before.items():
            np.testing.assert_allclose(metrics["param_norms"][name], np.linalg.norm(old), rtol=1e-5)
            moved = np.linalg.norm(np.asarray(after[name]) - old)
            np.testing.assert_allclose(metrics["update_norms"][name], moved, rtol=1e-4)
            assert (moved > 0) == (name != "b" and not is_skipped)
    found = collectives(step.lower(state, batch).compile())
    assert found
    assert max(array.elements for one in found for array in one.arrays) <= 16  # of this loss, a step sends only sums


@pytest.mark.parametrize("stage", [1, 3])
def test_padding_is_in_no_norm(stage):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(7), tuning=Tuning(persist_below=20))
    plan = tx.create({"w": shape(9, 51), "b": shape(23), "small": shape(3, 5)}).plan
    assert {leaf.kind for leaf in plan.grads} == {"sharded", "flat"}
    full = lambda value: [jnp.full(leaf.storage_shape, value) for leaf in plan.grads]
    found = norms_of_update(plan, full(-2.0), dict(enumerate(full(1.0))))
    for name, value in {"param_norms": 2, "update_norms": 3}.items():
        wanted = [value * leaf.size**0.5 for leaf in plan.grads]
        np.testing.assert_allclose(jax.tree.leaves(found[name]), wanted, rtol=1e-6)


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
    (_, aux), _ = grad(tx.shard(WEIGHTS), ROWS)
    (_, expected), _ = jax.value_and_grad(marked, has_aux=True)(WEIGHTS, ROWS)
    expected = {name: x.tree if isinstance(x, Mean | PerRow | Replicated | Sum) else x for name, x in expected.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), aux, expected)


@pytest.mark.parametrize("view", ["device", "global"])
def test_results_on_explicit_axes_have_types(view):
    mesh = mesh_of(8, kind=AxisType.Explicit)
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, view=view, tuning=Tuning(persist_below=20))
    state, specs = (
        tx.create(WEIGHTS),
        lambda found: {k: tuple(x.sharding.spec) for k, x in found.items() if k != "seen"},
    )
    _, metrics = jax.eval_shape(tx.train_step(marked, has_aux=True), state, ROWS)
    wanted = {"logits": ("data", None), "columns": (None,), "version": (None,), "loss": ()}
    assert specs(metrics["aux"]) == wanted
    predict = lambda params, rows: {"rows": rows @ params["w"], "mean": jnp.mean(rows @ params["w"])}
    found = jax.eval_shape(tx.eval_step(predict), state.params, ROWS)
    assert specs(found) == {"rows": ("data", None), "mean": ()}


def test_what_is_not_marked_is_as_it_was_returned_where_the_loss_sees_all_rows():
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), view="global", tuning=Tuning(persist_below=20))
    loss = lambda p, b: (jnp.mean((b @ p["w"]) ** 2), (b @ p["w"], jnp.argmax(b, 0), b > 0))
    state, step = tx.create(WEIGHTS), tx.train_step(loss, has_aux=True)
    _, metrics = step(state, ROWS)
    jax.tree.map(np.testing.assert_allclose, metrics["aux"], loss(WEIGHTS, ROWS)[1])


@pytest.mark.parametrize(("options", "form"), [({}, 2), ({"has_aux": True}, 3)])
def test_mutable_state_goes_through_a_gradient(options, form):
    """One microbatch after the other."""
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=20))

    def loss(params, seen, batch):
        return (jnp.mean((batch @ params["w"]) ** 2), {"rows": seen["rows"] + len(batch)}, batch.mean())[:form]

    grad = tx.value_and_grad(loss, mutable=True, accumulate=2, **options)
    (value, seen, *_), _ = grad(tx.shard(WEIGHTS), {"rows": jnp.array(5)}, ROWS)
    np.testing.assert_allclose(value, loss(WEIGHTS, {"rows": 0}, ROWS)[0], rtol=1e-5)
    assert seen["rows"] == 5 + 48
