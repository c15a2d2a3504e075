"""Custom rules see the cotangents of `pmap` with `pmean` and of plain accumulation, whatever the number of losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Precision, Tuning, zero_shard

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
DEVICES, MICROBATCHES, WIDTH, LIMIT = 4, 3, 8, 0.02


@jax.custom_vjp
def clipped(x, seen):
    """Return `x`; its cotangent is clipped, and the gradient of `seen` is its largest element before, and minus it."""
    del seen
    return x


def backward(_, g):
    largest = jnp.abs(g).max()
    return jnp.clip(g, -LIMIT, LIMIT), jnp.stack([largest, -largest])


clipped.defvjp(lambda x, seen: (x, None), backward)


PARAMS = {
    "w": jnp.sin(jnp.arange(WIDTH * WIDTH)).reshape(WIDTH, WIDTH),
    "scale": jnp.ones(3),  # stays replicated: its gradient is reduced after the backward pass
    "seen": jnp.zeros(2),
}
BATCH = jnp.cos(jnp.arange(24.0 * WIDTH)).reshape(24, WIDTH) + jnp.linspace(0, 2, 24)[:, None]


def rows_of(p, x):
    return jnp.sum((clipped(x @ p["w"], p["seen"])[:, :3] * p["scale"]) ** 2, axis=1)


def mean(p, x):
    return jnp.mean(rows_of(p, x))


def weighted(p, x):
    """Weights that differ much between the parts."""
    weights = x[:, 0] ** 2
    return jnp.sum(weights * rows_of(p, x)), jnp.sum(weights)


def expected(loss, view, accumulate, scale=1.0):
    """Differentiate every part by itself, as `pmap` and a loop over microbatches do, and average the gradients."""
    parts = BATCH.reshape(DEVICES, accumulate, -1, WIDTH).swapaxes(0, 1)
    if view == "global":  # a microbatch has rows of every device
        parts = parts.reshape(accumulate, 1, -1, WIDTH)
    gradient = jax.jit(jax.grad(lambda p, x, by: scale * (loss(p, x)[0] / by if loss is weighted else loss(p, x))))
    grads, shares = [], []
    for devices in parts:
        # As in a pmap whose loss is `total / lax.pmean(weight)`.
        by = np.mean([loss(PARAMS, x)[1] for x in devices]) if loss is weighted else 1.0
        grads += [gradient(PARAMS, x, by) for x in devices]
        shares += [by] * len(devices)
    average = lambda *xs: np.average(xs, axis=0, weights=shares) / scale
    found = jax.tree.map(average, *grads)
    return found | {"seen": np.max([g["seen"] for g in grads], axis=0)}


def zero(stage, view, **options):
    overwrite = {name: name == "seen" for name in PARAMS}
    mesh = mesh_of(DEVICES)
    return zero_shard(
        optax.sgd(1.0),
        stage=stage,
        view=view,
        mesh=mesh,
        tuning=Tuning(persist_below=8),
        overwrite=overwrite,
        **options,
    )


def assert_close(found, expected):
    """Equal up to the order of sums."""
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("stage", "view", "accumulate", "loss"),
    [
        (3, "device", MICROBATCHES, mean),
        (3, "global", MICROBATCHES, mean),
        (1, "device", MICROBATCHES, weighted),
        slow(2, "device", 1, mean),
        slow(0, "global", MICROBATCHES, weighted),
        slow(3, "device", 1, weighted),
        slow(3, "global", 1, weighted),
    ],
)
def test_a_rule_sees_the_cotangent_of_its_own_loss(stage, view, accumulate, loss):
    tx = zero(stage, view)
    options = {"accumulate": accumulate, "weighted": loss is weighted}
    _, grads = tx.value_and_grad(loss, **options)(tx.shard(PARAMS), BATCH)
    want = expected(loss, view, accumulate)
    assert want["seen"][0] > 2 * LIMIT  # it clips
    assert want["seen"][1] < 0  # so is the maximum over microbatches and devices
    assert_close(grads, want)


@pytest.mark.slow
def test_the_loss_scale_is_all_that_a_rule_sees_besides():
    tx = zero(3, "device", precision=Precision.fp32(loss_scale=4.0))
    state, metrics = tx.train_step(mean, accumulate=MICROBATCHES)(tx.create(PARAMS), BATCH)
    want = expected(mean, "device", MICROBATCHES, scale=4.0)
    moved = {name: PARAMS[name] - np.asarray(x) for name, x in tx.unshard(state.params).items()}
    assert_close(moved | {"seen": state.params["seen"]}, want)
    norm = np.sqrt(sum(np.sum(want[name] ** 2) for name in ("w", "scale")))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
