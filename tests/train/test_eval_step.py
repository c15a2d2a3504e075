"""Parameters outside of the loss: evaluation with the gathers of training, and padded parameters in code of models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Offload, Padded, Precision, Tuning, collectives, zero_shard
from zerojax.layout.leaf import Leaf
from zerojax.train.eval_step import others_of
from zerojax.train.params import program_shares

PARAMS = {"w": jax.random.normal(jax.random.key(0), (13, 64)), "v": jax.random.normal(jax.random.key(1), (13, 7))}
BATCH = jax.random.normal(jax.random.key(2), (16, 13))


def predict(params, batch, scale=1.0):
    hidden = jnp.tanh(batch @ params["w"])
    return {"hidden": hidden, "out": scale * (batch @ params["v"]).T, "rows": jnp.array(len(batch))}


def zero(stage=3, **options):
    return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=20), **options)


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), a, b)


@pytest.mark.parametrize(
    ("rows", "stage", "options"),
    [
        (8, 3, {}),
        (5, 3, {"view": "device"}),
        pytest.param(16, 0, {}, marks=pytest.mark.slow),
        pytest.param(16, 3, {"offload": Offload(optimizer="host", params="host")}, marks=pytest.mark.slow),
    ],
)
def test_eval_step_is_the_function_of_logical_parameters(rows, stage, options):
    tx = zero(stage, **options)
    state = tx.create(PARAMS)
    assert stage == 0 or isinstance(state.params["v"], Padded)
    found = tx.eval_step(predict)(state.params, BATCH[:rows], 2.0)
    assert_close(found, predict(PARAMS, BATCH[:rows], 2.0))


def test_eval_step_gathers_each_parameter_once_and_computes_in_its_types():
    tx = zero(precision=Precision.bf16())
    step = tx.eval_step(predict)
    lowered = jax.jit(step).lower(tx.create(PARAMS).params, BATCH)
    found = [c.kind for c in collectives(lowered.compile())]
    assert set(found) == {"all-gather"}
    assert step(tx.create(PARAMS).params, BATCH)["out"].dtype == jnp.bfloat16


def test_axes_that_divide_parameters_are_found_outside_of_the_program():
    mesh = mesh_of(2, 4, names=("data", "model"))
    tx = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh, tuning=Tuning(persist_below=20))
    columns = jax.device_put(PARAMS["w"], NamedSharding(mesh, PartitionSpec(None, "model")))
    assert others_of(tx.config, {**PARAMS, "w": columns}) == ((), (None, "model"))
    assert others_of(zero().config, PARAMS) == ()


def test_parameters_of_another_model_are_logical_in_a_loss():
    """As a GAN's, or a teacher's, are further arguments; and so is a moving average of them."""
    tx = zero()
    other = jax.tree.map(lambda x: 0.5 * x, tx.shard(PARAMS))
    loss = lambda params, batch, other: jnp.mean((batch @ params["v"] - (other["v"].T @ batch.T).T) ** 2)
    _, metrics = tx.train_step(loss)(tx.create(PARAMS), BATCH, other)
    np.testing.assert_allclose(metrics["loss"], np.mean((0.5 * BATCH @ PARAMS["v"]) ** 2), rtol=1e-5)


def test_a_mask_may_be_made_of_parameters_in_storage():
    mask = jax.tree.map(lambda x: x.shape == (13, 64), zero().shard(PARAMS))
    tx = zero(trainable=mask)
    state, _ = tx.train_step(lambda p, b: predict(p, b)["out"].mean())(tx.create(PARAMS), BATCH)
    assert_close(tx.unshard(state.params)["v"], PARAMS["v"])


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([80] * 1000, 8),  # equal layers: an eighth of all shards per program
        ([8000, *[80] * 1000], 3),  # half of the largest leaf, in full, is more than an eighth of all shards
        ([8000] * 2, 1),
        ([], 0),
    ],
)
def test_each_program_makes_a_share_of_the_parameters(sizes, count):
    leaf = lambda size: Leaf("", (size,), np.dtype("float32"), ("data",), 8, kind="sharded", dim=0)
    leaves = tuple(map(leaf, sizes))
    found = list(program_shares(leaves))
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    assert len(found) == count
    most = max([leaf.bytes // 2 for leaf in leaves] + [sum(leaf.local_bytes for leaf in leaves) // 8])
    assert all(sum(leaves[i].local_bytes for i in group) <= most for group in found if len(group) > 1)
