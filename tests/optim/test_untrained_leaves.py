"""Parameters without a gradient, integers and booleans, and frozen ones stay as they are, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import mesh_of

from zerojax import Offload, Precision, Tuning, report, zero_shard
from zerojax.checkpoint import Checkpointer

PARAMS = {
    "w": jnp.linspace(-1, 1, 256).reshape(16, 16),
    "b": jnp.ones(5),
    "order": jnp.arange(4)[::-1],
    "large": jnp.int32(2**24 + 1),
    "mask": (jnp.arange(256) % 3 > 0).reshape(16, 16),
    "uneven": jnp.arange(3 * 17, dtype=jnp.uint8).reshape(3, 17),
    "words": jnp.arange(27, dtype=jnp.uint32),
    "odd": jnp.eye(3, 17, dtype=bool),
    "flag": jnp.bool_(True),
}
ON_HOST = Offload(optimizer="host", params="host")
TRAINED = ("w", "b")
BATCH = jnp.cos(jnp.arange(8 * 16.0)).reshape(8, 16)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.3),
    "lion": lambda: optax.lion(1e-2, weight_decay=0.3),
    "muon": lambda: optax.contrib.muon(1e-2, weight_decay=0.3),
    "noisy": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.noisy_sgd(1e-2), optax.add_decayed_weights(0.3)),
}


def loss(p, batch):
    h = jnp.tanh(batch @ jnp.where(p["mask"], p["w"], 0)).take(p["order"], axis=1)
    factor = p["uneven"].astype(jnp.float32).mean() + p["large"] * 1e-8 + p["words"][p["odd"][0].sum()]
    return factor * jnp.mean(jnp.where(p["flag"], h**2, 0)) + jnp.mean((p["b"] * batch[:, :5]) ** 2)


def zero(name, stage, **options):
    return zero_shard(OPTIMIZERS[name](), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=20), **options)


def assert_only_floats_moved(tree, trained=TRAINED):
    for name, x in PARAMS.items():
        assert name in TRAINED or tree[name].dtype == x.dtype
        assert np.array_equal(tree[name], x) == (name not in trained), name


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "stage", "options"),
    [
        pytest.param("adamw", 0, {"view": "device"}, marks=pytest.mark.slow),
        pytest.param("lion", 1, {"precision": Precision.bf16()}, marks=pytest.mark.slow),
        ("noisy", 2, {"trainable": {name: name != "mask" for name in PARAMS}}),
        pytest.param("muon", 3, {"view": "device"}, marks=pytest.mark.slow),
        ("adamw", 3, {"precision": Precision.fp16(loss_scale=8.0), "offload": ON_HOST}),
    ],
)
def test_a_run_leaves_integers_and_booleans_alone(tmp_path, name, stage, options):
    tx = zero(name, stage, **options)
    state, step = tx.create(PARAMS), tx.train_step(loss, accumulate=2, leaf_norms=True)
    for _ in range(3):
        state, metrics = step(state, BATCH)
    assert_only_floats_moved(tx.unshard(state.params))
    assert len(jax.tree.leaves(metrics["grad_norms"])) == len(TRAINED)
    mirrored = {state.plan.trained.paths[i] for i in state.plan.param_of if i is not None}
    assert set(state.plan.trained.paths) == set(TRAINED)
    assert mirrored <= set(TRAINED)
    assert "not trained: bool has no gradient" in str(state.plan)
    assert "not trained: bool has no gradient" in str(report(state))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state)
        assert_only_floats_moved(tx.unshard(checkpoints.restore(tx.create(PARAMS)).state.params))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage", "precision"), [("adamw", 2, Precision.bf16()), ("noisy", 3, None)])
@pytest.mark.parametrize("trained", [TRAINED, ("w",)])
def test_a_loop_of_ones_own_does_so_too(name, stage, precision, trained):
    tx = zero(name, stage, precision=precision, trainable={name: name in ("mask", *trained) for name in PARAMS})
    params = tx.shard(PARAMS)
    state, gradient = tx.init(PARAMS), tx.value_and_grad(loss)
    for _ in range(2):
        _, grads = gradient(params, BATCH)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_only_floats_moved(tx.unshard(params), trained)


@pytest.mark.slow
def test_gradients_that_plain_jax_gives_of_integers():
    """They are float0, or floats where a user made them so: a float zero would round 2**24 + 1."""
    tx = zero("adamw", 1)
    _, grads = jax.value_and_grad(loss, allow_int=True)(PARAMS, BATCH)
    for given in (grads, jax.tree.map(lambda x: jnp.ones(x.shape), PARAMS)):
        updates, _ = tx.update(given, tx.init(PARAMS), PARAMS)
        assert_only_floats_moved(optax.apply_updates(PARAMS, updates))
