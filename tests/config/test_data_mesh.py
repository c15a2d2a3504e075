"""Several mesh axes as one data axis: the same numbers, bytes and collectives as one axis of their product."""

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of
from jax.sharding import PartitionSpec
from models import awkward_params, floats_only

from zerojax import Tuning, zero_shard
from zerojax.config import DataMesh
from zerojax.optim.sharding_plan import make_plan

AXES = ("host", "gpu")
CLIPPED = floats_only(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


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
