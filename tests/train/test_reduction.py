"""A loss that sums over rows: its microbatches are added up, or it is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from flax import nnx

import zerojax.flax_nnx
from zerojax import Offload, Tuning, zero_shard

PARAMS = {"w": jax.random.normal(jax.random.key(0), (12, 16)), "b": jnp.ones(16)}
ROWS = {"x": np.asarray(jax.random.normal(jax.random.key(1), (32, 12))), "y": np.ones((32, 16), np.float32)}


def errors(params, rows):
    return jnp.square(jnp.tanh(rows["x"] @ params["w"] + params["b"]) - rows["y"])


def scanned(params, rows):
    layer = lambda x, _: (jnp.tanh(x + params["b"]), None)
    x, _ = jax.lax.scan(jax.checkpoint(layer), rows["x"] @ params["w"], None, length=3)
    return jnp.square(x - rows["y"])


SUMS = {
    "sum": lambda p, r: errors(p, r).sum(),
    "mean of tokens, sum of rows": lambda p, r: errors(p, r).mean(1).sum(),
    "sum of rows, then mean": lambda p, r: errors(p, r).sum(0).mean(),
    "half": lambda p, r: 0.5 * errors(p, r).sum(),
    "of a fixed batch": lambda p, r: jnp.sum(errors(p, r)) / 256,
    "jitted, in a scan": jax.jit(lambda p, r: scanned(p, r).sum()),
    "two terms": lambda p, r: errors(p, r).sum() + 0.1 * jnp.abs(errors(p, r)).sum(),
    "vmapped rows": lambda p, r: jax.vmap(lambda x, y: errors(p, {"x": x[None], "y": y}).sum())(r["x"], r["y"]).sum(),
    "optax": lambda p, r: optax.softmax_cross_entropy(r["x"] @ p["w"], r["y"]).sum(),
}
MEANS = {
    "mean": lambda p, r: errors(p, r).mean(),
    "by hand": lambda p, r: errors(p, r).sum() / r["x"].shape[0],
    "factor": lambda p, r: errors(p, r).sum() * (0.7 / len(r["x"])),
    "with a penalty": lambda p, r: scanned(p, r).mean() + 0.1 * jnp.sum(p["w"] ** 2),
    "of rows, sum of tokens": lambda p, r: errors(p, r).sum(1).mean(),
    "masked": lambda p, r: (errors(p, r) * (r["y"] > 0)).sum() / (r["y"] > 0).sum(),
    "weights that add up to 1": lambda p, r: (errors(p, r) * (r["y"] / r["y"].sum())).sum(),
}


def zero(stage=3, **options):
    return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=0), **options)


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_over_rows_is_not_averaged_silently(kind):
    with pytest.raises(ValueError, match=r"sum over the rows.*accumulate=2 averages.*reduction='sum'"):
        zero().value_and_grad(SUMS[kind], accumulate=2)(PARAMS, ROWS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", quick_or_slow([(name,) for name in MEANS], [("mean",), ("with a penalty",)]))
def test_a_mean_is_taken(kind):
    value, _ = zero().value_and_grad(MEANS[kind], accumulate=4)(PARAMS, ROWS)
    np.testing.assert_allclose(value, MEANS[kind](PARAMS, ROWS), rtol=1e-5)  # float32, in another order


DISK = {"params": "disk", "optimizer": "disk"}
WAYS = [(1, {}), (3, {}), (0, {"view": "device"}), (2, {"offload": "host"}), (3, {"offload": DISK})]


@pytest.mark.parametrize("way", quick_or_slow([(i,) for i in range(len(WAYS))], [(2,)]))
def test_sums_are_added_up(way, tmp_path):
    stage, options = WAYS[way]
    if found := options.get("offload"):
        options = {"offload": Offload(optimizer="host") if found == "host" else Offload(**found, path=tmp_path)}
    tx, loss = zero(stage, **options), SUMS["half"]
    with pytest.raises(ValueError, match="sum over the rows"):
        tx.train_step(loss, accumulate=2)(tx.create(PARAMS), ROWS)
    step, state = tx.train_step(loss, accumulate=2, reduction="sum"), tx.create(PARAMS)
    wanted, grads = jax.value_and_grad(loss)(PARAMS, ROWS)
    _, metrics = step(state, ROWS)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)  # float32, in another order
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    if "offload" not in options:
        mean, _ = tx.value_and_grad(loss, accumulate=2, reduction="mean")(PARAMS, ROWS)
        parts = 16 if options else 2
        np.testing.assert_allclose(mean, wanted / parts, rtol=1e-5)


@pytest.mark.parametrize("view", ["global", "device"])
def test_a_weighted_loss_and_its_gradient_are_those_of_the_total_over_the_weight(view):
    rows = ROWS | {"weight": np.arange(32.0, dtype="float32")}
    total = lambda p, r: ((errors(p, r).mean(1) * r["weight"]).sum(), r["weight"].sum())
    loss = lambda p: (found := total(p, rows))[0] / found[1]
    tx = zero(view=view)
    value, grads = tx.value_and_grad(total, weighted=True, accumulate=2)(tx.shard(PARAMS), rows)
    np.testing.assert_allclose(value, loss(PARAMS), rtol=1e-5)
    for found, wanted in zip(*map(jax.tree.leaves, (tx.unshard(grads), jax.grad(loss)(PARAMS))), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)  # sums of 32 rows in another order


def test_modules_and_weights():
    model, loss = nnx.Linear(12, 16, rngs=nnx.Rngs(0)), lambda model, rows: jnp.sum(model(rows["x"]) ** 2)
    wanted = loss(model, ROWS)
    zerojax.flax_nnx.shard_module(model, tx := zero())
    gradient = functools.partial(zerojax.flax_nnx.value_and_grad, tx, loss, accumulate=2)
    np.testing.assert_allclose(gradient(reduction="sum")(model, ROWS)[0], wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="sum over the rows"):
        gradient()(model, ROWS)
    with pytest.raises(ValueError, match="reduction is one of None, 'mean', 'sum'"):
        tx.train_step(loss, reduction="none")
