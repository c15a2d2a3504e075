"""A cotangent holds the rows where its primal holds them, so each gradient is a sum over rows, and reduce-scattered."""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import zero_shard

WORKERS, ROWS, TIME, WIDTH, HIDDEN, ACTIONS = 8, 48, 10, 32, 40, 16
X, SERIES, KEY = (ROWS, WIDTH), (ROWS, TIME, WIDTH), (ROWS,)
MLP = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
STACK = {name: (3, *shape) for name, shape in MLP.items()}


def mlp(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def conditioned(p, x, remat):
    c = jnp.tanh(x[:, 0] @ p["cond"])  # not made by a loop
    layer = lambda x, w: (mlp(w, x) * c[:, None], None)
    return lax.scan(jax.checkpoint(layer) if remat else layer, x, p["layers"])[0].mean()


def slots(p, x):
    keys = x @ p["key"]
    step = lambda q, _: (mlp(p, q + jax.nn.softmax(q @ keys.swapaxes(1, 2)) @ keys), None)
    return lax.scan(step, jnp.zeros((ROWS, 5, WIDTH)), None, length=3)[0].std()


def chunks(p, x):
    x = mlp(p, x)
    return lax.scan(lambda total, w: (total + jax.nn.logsumexp(x @ w, -1), None), jnp.zeros(ROWS), p["head"])[0].mean()


def actions(p, x):
    return jnp.mean(mlp(p, x)[jnp.arange(ROWS), x[:, :ACTIONS].argmax(-1)] ** 2)


def actions_in_jit(p, x):
    chosen = jax.jit(lambda q, i: q[jnp.arange(ROWS), i])
    return jnp.mean(chosen(mlp(p, x), x.argmax(-1)) ** 2)


def actions_remat(p, x):
    step = jax.checkpoint(lambda x, w: (mlp(w, x) + mlp(w, x)[jnp.arange(ROWS), x.argmax(-1)][:, None], None))
    return lax.scan(step, x, p)[0].mean()


def depths(p, x):
    score = x @ p["router"]
    i, rows = lax.top_k(score[..., 0], 3)[1], jnp.arange(ROWS)[:, None]
    return jnp.mean(x.at[rows, i].add(score[rows, i] * mlp(p, x[rows, i])) ** 2)


def sparse(p, x):
    value, i = lax.top_k(x @ p["up"], 6)
    return jnp.mean((jnp.zeros((ROWS, HIDDEN)).at[jnp.arange(ROWS)[:, None], i].set(value) @ p["down"] - x) ** 2)


def energies(p, x):
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return jnp.mean(mlp(p, x) ** 2) - jnp.mean(mlp(p, noise) ** 2)


def generated(p, x):
    fake = jnp.tanh(jax.random.normal(jax.random.key(0), (len(x), 12)) @ p["g"])
    return -jnp.mean(mlp(p, fake) * jnp.cos(x[:1]))


def dynamics(p, x):
    """Langevin steps from noise, in a scan."""
    slope = jax.grad(lambda x: jnp.sum(mlp(lax.stop_gradient(p), x)))
    step = lambda x, key: (x - slope(x) + jax.random.normal(key, x.shape), None)
    fake = lax.scan(step, jax.random.uniform(jax.random.key(0), x.shape), jax.random.split(jax.random.key(1), 2))[0]
    return jnp.mean(mlp(p, x) ** 2) - jnp.mean(mlp(p, lax.stop_gradient(fake)) ** 2)


LOOPS = {
    "condition of a scan": (lambda p, x: conditioned(p, x, False), {"layers": STACK, "cond": (WIDTH, WIDTH)}, SERIES),
    "condition, remat": (lambda p, x: conditioned(p, x, True), {"layers": STACK, "cond": (WIDTH, WIDTH)}, SERIES),
    "keys of slots": (slots, {**MLP, "key": (WIDTH, WIDTH)}, SERIES),
    "chunks of a vocabulary": (chunks, {**MLP, "head": (4, WIDTH, 32)}, X),
}
INDICES = {
    "actions": (actions, MLP, X),
    "actions, jit": (actions_in_jit, MLP, X),
    "actions, remat and scan": (actions_remat, STACK, X),
    "mixture of depths": (depths, {**MLP, "router": (WIDTH, 1)}, SERIES),
    "sparse autoencoder": (sparse, MLP, X),
}
NOISE = {
    "energies of noise": (energies, MLP, X),
    "generator of noise": (generated, {**MLP, "g": (12, WIDTH)}, X),
    "Langevin dynamics": (dynamics, MLP, X),
}
SLICES = {
    "halves": (lambda p, x: jnp.mean(jnp.tanh((r := mlp(p, x))[: ROWS // 2] - r[ROWS // 2 :])), MLP, X),
    "every other row": (lambda p, x: jnp.mean(jnp.tanh((r := mlp(p, x))[::2] - r[1::2])), MLP, X),
    "halves of scores": (lambda p, x: jnp.mean(jnp.tanh(mlp(p, x).mean(-1)[: ROWS // 2])), MLP, X),
}
LOSSES = {**LOOPS, **INDICES, **NOISE, **SLICES}


def lowered(name, mesh, stage):
    """The lowered text of a gradient, and the number of elements in all parameters."""
    loss, params, batch = LOSSES[name]
    is_shape = lambda x: isinstance(x, tuple)
    params = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), params, is_leaf=is_shape)
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, persist_below=0)
    rows = jax.ShapeDtypeStruct(batch, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    text = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(params), rows).as_text()
    return text, sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [*LOOPS, *INDICES])
def test_no_activation_is_a_partial_sum_per_worker(name, mesh):
    text, _ = lowered(name, mesh, 0)
    assert not re.findall(rf"tensor<{WORKERS}x{ROWS}x[x\d]*f32>", text)


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", LOSSES)
def test_every_gradient_is_reduce_scattered(name, mesh):
    text, parameters = lowered(name, mesh, 2)
    operands = re.findall(r'"stablehlo.reduce_scatter".*?\}\) : \(tensor<([\dx]*)xf32>', text, re.DOTALL)
    assert sum(math.prod(map(int, shape.split("x"))) for shape in operands) == parameters
