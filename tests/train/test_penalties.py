"""Penalties and other reductions of parameters are those of one device, at stages 1 and 2 and with microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import fraction, mesh_of, quick_or_slow
from flat_options import tuned
from jax import lax

from zerojax import Precision, zero_shard

WIDTH, HIDDEN, DEVICES = 25, 257, 8  # 8 devices divide neither, so every matrix has padding
LEAVES = jax.tree.leaves
X = jax.random.normal(jax.random.key(1), (64, WIDTH))
STRENGTH = jnp.float32(0.1)


def parameters(width=WIDTH, hidden=HIDDEN):
    matrix = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape) * 0.1
    layer = lambda seed: {"up": matrix(seed, width, hidden), "down": matrix(seed + 1, hidden, width)}
    # Equal maxima share their cotangent. The small leaf is no shard.
    head = jnp.full((width, 64), 0.1).at[3, 4].set(0.5).at[20, 60].set(0.5)
    return {"layers": [layer(0), layer(2)], "frozen": matrix(5, width, 64), "head": head, "small": jnp.ones(3)}


def base(params, x):
    for w in params["layers"]:
        x = x + jax.checkpoint(lambda x, w: jnp.tanh(x @ w["up"]) @ w["down"])(x, w)
    return jnp.mean((x @ params["head"]) ** 2) * params["small"][0] * 1e-2


def each(penalty):
    """A loss with a penalty on each leaf."""
    return lambda params, x, strength: base(params, x) + strength * sum(penalty(w) for w in LEAVES(params))


def orthogonality(w):
    return jnp.sum((w.T @ w - jnp.eye(w.shape[-1])) ** 2)


def scanned(params, x, strength):
    """A penalty on a stack of layers."""
    stack = jax.tree.map(lambda *w: jnp.stack(w), *params["layers"])
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, stack)
    return jnp.mean(x**2) + strength * optax.tree.norm(params)


def everything(params, x, strength):
    """Reductions that read each other, a frozen leaf, changed weights, and values of whole parameters."""
    norm = optax.tree.norm(params)
    penalty = sum(jnp.max(w) + jnp.var(w) + jax.nn.logsumexp(w) / norm for w in LEAVES(params))
    weights = jax.tree.map(lambda w: w * (1 + jnp.mean(w)) if w.ndim == 2 else w, params)
    distance = jnp.sum((params["head"] - params["frozen"]) ** 2)
    dense = jnp.sum(jnp.abs(params["head"]) > 0.2) / 2  # The sum is an integer, and has no cotangent.
    return base(weights, x) + strength * (penalty + norm + distance * dense + orthogonality(params["head"]))


def low_rank(w):
    """The reduction reads a value of the whole parameter, so it is computed on all devices."""
    return jnp.sum((w - w[:, :2] @ w[:2]) ** 2) if w.ndim == 2 else 0.0


LOSSES = {
    "L2": each(lambda w: jnp.sum(w**2)),
    "L1": each(lambda w: jnp.sum(jnp.abs(w))),
    "norm": each(jnp.linalg.norm),
    "reference": each(lambda w: jnp.sum((w - jnp.full(w.shape, 0.1)) ** 2)),
    "norms of columns": each(lambda w: jnp.sum(jnp.sqrt(jnp.sum(w**2, axis=0)))),
    "jitted": jax.jit(each(jax.jit(lambda w: jnp.max(jnp.abs(w)) * jnp.sum(w**2)))),
    "scanned": scanned,
    "low rank": each(low_rank),
    "everything": everything,
}
OPTIONS = {"plain": {}, "hybrid": {"axis": ("host", "gpu"), "shard_axis": "gpu"}}


def transformed(stage, view, options="plain", **more):
    sizes = (8,) if options == "plain" else (2, 4)
    more = {"persist_below": 100, "trainable": lambda path, _: path != "frozen", **OPTIONS[options], **more}
    return zero_shard(optax.sgd(1.0), stage=stage, view=view, mesh=mesh_of(*sizes), **tuned(**more))


def stepped(tx, loss, **options):
    """The gradient by which a step changes the parameters, whose norm is that in the metrics."""
    params = parameters()
    state, metrics = tx.train_step(loss, **options)(tx.create(params), X, STRENGTH)
    found = jax.tree.map(jnp.subtract, params, tx.unshard(state.params))
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(found), rtol=1e-4)  # of a difference
    return found


@functools.cache
def expected(name):
    found = jax.jit(jax.grad(LOSSES[name]))(parameters(), X, STRENGTH)
    return found | {"frozen": jnp.zeros_like(found["frozen"])}


def assert_gradient(found, wanted, rounding=1e-5):
    for a, b in zip(LEAVES(found), LEAVES(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding * max(1, np.abs(b).max()))


QUICK = [
    (1, "global", "plain", 4, "everything"),
    (2, "device", "hybrid", 4, "everything"),
    (2, "device", "plain", 1, "low rank"),
]
GRID = fraction(8, (1, 2), ("global", "device"), OPTIONS, (1, 4), LOSSES)


@pytest.mark.parametrize(("stage", "view", "options", "accumulate", "name"), quick_or_slow([*QUICK, *GRID], QUICK))
def test_a_step_is_that_of_one_device(stage, view, options, accumulate, name):
    tx = transformed(stage, view, options)
    assert_gradient(stepped(tx, LOSSES[name], accumulate=accumulate), expected(name))


@pytest.mark.slow
@pytest.mark.parametrize("view", ["global", "device"])
def test_a_weighted_and_scaled_step_is_that_of_one_device(view):
    def weighted(params, x, strength):
        return x.shape[0] * everything(params, x, strength), 1.0 * x.shape[0]

    scale = Precision(compute=jnp.float32, loss_scale=2.0**8)
    found = stepped(transformed(2, view, precision=scale), weighted, weighted=True, accumulate=4)
    assert_gradient(found, expected("everything"), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "view"), [(2, "device"), (3, "global"), (3, "device")])
def test_a_second_derivative_is_that_of_one_device(stage, view):
    tx = transformed(stage, view)
    stored, tangent = tx.shard(parameters()), tx.shard(jax.tree.map(jnp.ones_like, parameters()))
    gradient = lambda params: tx.value_and_grad(LOSSES["everything"])(params, X, STRENGTH)[1]["layers"]
    found = jax.jit(lambda p, t: jax.jvp(gradient, (p,), (t,))[1])(stored, tangent)
    plain = lambda params: jax.grad(LOSSES["everything"])(params, X, STRENGTH)["layers"]
    wanted = jax.jvp(plain, (parameters(),), (jax.tree.map(jnp.ones_like, parameters()),))[1]
    assert_gradient(tx.unshard(found), wanted, 1e-4)
