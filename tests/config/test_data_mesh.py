"""Several mesh axes as one data axis: the same numbers, bytes and collectives as one axis of their product."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import PartitionSpec
from models import awkward_batches, awkward_loss, awkward_params, floats_only

from zerojax import Tuning, collectives, report, zero_shard
from zerojax.config import DataMesh
from zerojax.optim.sharding_plan import make_plan

AXES = ("host", "gpu")
CLIPPED = floats_only(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


@functools.cache
def trained(stage, several):
    where = {"mesh": mesh_of(2, 4), "axis": AXES} if several else {"mesh": mesh_of(8)}
    tx = zero_shard(CLIPPED, stage=stage, tuning=Tuning(persist_below=50), **where)
    state, step = tx.create(awkward_params()), tx.train_step(awkward_loss)
    losses = []
    for batch in awkward_batches(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    compiled = step.lower(state, awkward_batches(1)[0]).compile()
    return jax.device_get(tx.unshard(state.params)), losses, report(state), collectives(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_two_axes_equal_one(stage):
    params, losses, held, moved = trained(stage, several=False)
    params_2, losses_2, held_2, moved_2 = trained(stage, several=True)
    # collectives over two axes may add the same eight numbers in another order: a few roundings of float32
    np.testing.assert_allclose(losses_2, losses, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6), params_2, params)
    assert held_2.bytes == held.bytes
    assert set(held_2.per_device.values()) == set(held.per_device.values())
    assert moved_2.moved() == moved.moved()
    assert sorted((c.kind, c.group_size) for c in moved_2) == sorted((c.kind, c.group_size) for c in moved)


def test_shards_are_over_both_axes_and_the_batch_too():
    mesh = mesh_of(2, 4, 1, names=(*AXES, "model"))
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, axis=AXES, tuning=Tuning(persist_below=50))
    shardings = tx.shardings({"w": jnp.ones((24, 64))})
    assert shardings.params["w"].spec == PartitionSpec(None, AXES)
    assert tx.config.data == DataMesh((("host", 2), ("gpu", 4), ("model", 1)), AXES, AXES, AXES, AXES)
    assert (tx.config.data.workers, tx.config.data.compiler_axes) == (8, ("model",))
    with pytest.raises(ValueError, match=r"mesh axes 'host' and 'gpu'.*10 rows.*axes have 8 devices.*8 or 16 rows"):
        tx.value_and_grad(lambda params, x: jnp.mean(x @ params["w"]))({"w": jnp.ones((24, 64))}, jnp.ones((10, 24)))


def test_a_plan_is_made_of_shapes_and_prints_every_leaf(mesh):
    config = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=50)).config
    plan = make_plan(config, jax.eval_shape(awkward_params))
    assert plan == make_plan(config, awkward_params())
    assert hash(plan) == hash(make_plan(config, awkward_params()))
    text = str(plan)
    assert "stage 3 over axis 'data', 8 workers" in text
    assert "params['uneven']  float32[13, 7] dim 1 over 8, 13 elements of padding" in text
    assert "opt_state[0].mu['scale']  float32[] flat over 8" in text
    assert len(text.splitlines()) == 1 + len(plan.layout.params) + len(plan.grads) + len(plan.state)


def test_create_plans_once(mesh, monkeypatch):
    traces = []
    inner = optax.adam(1e-2)

    def update(updates, state, params=None):
        traces.append(1)
        return inner.update(updates, state, params)

    tx = zero_shard(
        optax.GradientTransformation(inner.init, update), stage=3, mesh=mesh, tuning=Tuning(persist_below=50)
    )
    make_plan(tx.config, awkward_params())
    planned = len(traces)
    tx.create(awkward_params())
    assert planned < len(traces) <= 2 * planned  # what owners compute is remembered
