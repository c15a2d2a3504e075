"""A batch that is given by keywords is divided over the devices as a positional one is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from flax import nnx
from jax.sharding import PartitionSpec

import zerojax.flax_nnx
from zerojax import Tuning, zero_shard

PARAMS = {"w": jnp.linspace(-1, 1, 256).reshape(16, 16)}
X, Y = jnp.sin(jnp.arange(128.0)).reshape(8, 16), {"left": jnp.cos(jnp.arange(8.0))}


def loss(params, *, x, y, key, power=2, double=False, act=jnp.tanh, name=None):
    h = act(x @ params["w"]).mean(1) * jax.random.uniform(key) ** 0
    return jnp.mean((h - y["left"]) ** power) * (2 if double and name == "noisy" else 1)


ROWS = {"x": X, "y": Y}
OTHERS = {"key": jax.random.key(0), "power": 4, "double": True, "act": jnp.sin, "name": "noisy"}


def zero(stage, **options):
    return zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=20), **options)


SPECS = {"x": PartitionSpec("data"), "y": {"left": PartitionSpec("data")}}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("stage", "options", "accumulate"), [(3, {"view": "device"}, 2), (1, {"batch_spec": SPECS}, 1)]
)
def test_every_entry_takes_it(stage, options, accumulate):
    tx, (value, grads) = zero(stage, **options), jax.value_and_grad(loss)(PARAMS, **ROWS, **OTHERS)
    found = tx.value_and_grad(loss, accumulate=accumulate)(tx.shard(PARAMS), **ROWS, **OTHERS)
    np.testing.assert_allclose(found[0], value, rtol=1e-6)
    np.testing.assert_allclose(tx.unshard(found[1])["w"], grads["w"], atol=1e-6)
    step = tx.train_step(loss, accumulate=accumulate)
    assert "all-reduce" in step.lower(tx.create(PARAMS), **ROWS, **OTHERS).compile().as_text()
    assert step.trace(tx.create(PARAMS), **ROWS, **OTHERS).jaxpr.eqns
    state, metrics = step(tx.create(PARAMS), **ROWS, **OTHERS)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
    np.testing.assert_allclose(tx.unshard(state.params)["w"], PARAMS["w"] - 0.1 * grads["w"], atol=1e-6)
    np.testing.assert_allclose(tx.eval_step(loss)(tx.shard(PARAMS), **ROWS, **OTHERS), value, rtol=1e-6)


def test_each_device_has_its_own_rows():
    """In device view, 2 rows of 8; and what has no rows is whole."""
    seen = []

    def rows(params, x, *, weight):
        seen.append((x.shape, weight.shape))
        return jnp.mean(x @ params["w"]) * weight

    tx = zero(2, view="device")
    tx.value_and_grad(rows)(tx.shard(PARAMS), x=X, weight=jnp.float32(2))
    tx.train_step(rows)(tx.create(PARAMS), x=X, weight=jnp.float32(2))
    assert {shape for shape, _ in seen} == {(2, 16)}
    with pytest.raises(ValueError, match=r"batch\['x'\].*its dim 0 has 6 rows"):
        tx.train_step(rows)(tx.create(PARAMS), x=X[:6], weight=jnp.float32(2))


def test_beside_a_positional_batch_keywords_are_further_arguments():
    def positional(params, x, scale):
        assert scale.shape == (16,)
        return jnp.mean(x @ (params["w"] * scale))

    tx, scale = zero(3, view="device"), jnp.arange(16.0)
    value = tx.value_and_grad(positional)(tx.shard(PARAMS), X, scale=scale)[0]
    np.testing.assert_allclose(value, positional(PARAMS, X, scale), rtol=1e-5)
    named = lambda params, batch: jnp.mean(batch @ params["w"])
    assert (
        tx.train_step(named)(tx.create(PARAMS), batch=X)[1]["loss"]
        == tx.train_step(named)(tx.create(PARAMS), X)[1]["loss"]
    )


@pytest.mark.parametrize("call", ["value_and_grad", "train_step", "eval_step"])
def test_a_call_without_rows_is_refused(call):
    tx = zero(1)
    given = tx.create(PARAMS) if call == "train_step" else PARAMS
    for keywords in ({}, {"power": 2, "key": jax.random.key(0)}):
        with pytest.raises(TypeError, match=r"without a batch.*x=x, y=y"):
            getattr(tx, call)(loss)(given, **keywords)


@pytest.mark.slow
def test_with_mutable_state_and_with_nnx():
    def counting(params, count, *, x, y):
        return jnp.mean(x @ params["w"]) + y["left"].mean(), count + 1

    tx = zero(3)
    (value, count), _ = tx.value_and_grad(counting, mutable=True)(PARAMS, jnp.float32(0), **ROWS)
    np.testing.assert_allclose(value, counting(PARAMS, 0, **ROWS)[0], rtol=1e-5)
    assert count == 1
    of_module = lambda module, *, x, y, power=2: jnp.mean((module(x).mean(1) - y["left"]) ** power)
    module = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    value = of_module(module, **ROWS, power=4)
    zerojax.flax_nnx.shard_module(module, tx)
    gradient = zerojax.flax_nnx.value_and_grad(tx, of_module)
    np.testing.assert_allclose(gradient(module, **ROWS, power=4)[0], value, rtol=1e-5)
    with pytest.raises(ValueError, match="without a batch"):
        gradient(module, power=4)
