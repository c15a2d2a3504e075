"""Several models at once: averages of weights, teachers, and parameters of two transformations in one step."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from flax import nnx
from jax import lax
from several_models import EXAMPLES

from zerojax import Offload, Tuning, collectives, zero_shard
from zerojax.checkpoint import export, import_params
from zerojax.flax_nnx import shard_module, value_and_grad

DECAY = 0.75
random = np.random.default_rng(0)
# Padded, sharded evenly, flat.
PARAMS = {
    k: jnp.asarray(random.standard_normal(s, np.float32)) for k, s in {"w": (13, 7), "v": (13, 16), "b": (7,)}.items()
}
BATCH = jnp.asarray(random.standard_normal((16, 13), np.float32))


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]).mean(1) * (batch @ params["v"]).mean(1)) ** 2)


class Average(NamedTuple):
    average: Any


def weight_ema(decay):
    """A user's transformation: put last in a chain, it keeps an average of the weights in the optimizer's state."""

    def update(updates, state, params):
        moved = optax.apply_updates(params, updates)
        return updates, Average(optax.incremental_update(moved, state.average, 1 - decay))

    return optax.GradientTransformation(lambda params: Average(jax.tree.map(jnp.copy, params)), update)


def averaged(opt_state):
    return optax.tree_utils.tree_get(opt_state, "average")


def optimizer():
    return optax.chain(optax.adam(1e-1), weight_ema(DECAY))


def zero(stage=3, tx=None, **options):
    return zero_shard(tx or optimizer(), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=20), **options)


def train(tx, state):
    step = tx.train_step(loss)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return state


def average_of(tx, state):
    return tx.as_params(averaged(state.opt_state), state.params)


def assert_close(found, expected, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@functools.cache
def on_one_device():
    """The average after two steps of plain optax."""
    params, state = PARAMS, optimizer().init(PARAMS)
    for _ in range(2):
        updates, state = optimizer().update(jax.jit(jax.grad(loss))(params, BATCH), state, params)
        params = optax.apply_updates(params, updates)
    return averaged(state)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "options"), [(3, {}), (1, {"offload": Offload(optimizer="host")})])
def test_an_average_of_weights_is_that_of_one_device_and_sharded_as_the_parameters(stage, options, tmp_path):
    tx = zero(stage, **options)
    state = train(tx, tx.create(PARAMS))
    average = average_of(tx, state)
    assert_close(tx.unshard(average), on_one_device())
    assert_close(tx.eval_step(lambda p, b: b @ p["w"])(average, BATCH), BATCH @ on_one_device()["w"])
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert jax.tree.all(jax.tree.map(same, average, state.params))
    export(average, tmp_path / "a")
    assert_close(import_params(tmp_path / "a", PARAMS), on_one_device())


def test_the_average_has_parameters_that_are_not_trained():
    tx = zero(trainable=lambda path, leaf: path != "v")
    state = train(tx, tx.create(PARAMS))
    average = tx.unshard(average_of(tx, state))
    assert_close(average["v"], PARAMS["v"], atol=0)
    assert (average["w"] != PARAMS["w"]).any()


@pytest.mark.parametrize(
    ("mirror", "message"),
    [
        (lambda state: state.opt_state, "does not mirror the parameters.*optax.tree_utils.tree_get"),
        (lambda state: state.params, r"\['b'\] has shape \[7\].*\[8\] in storage"),
    ],
)
def test_what_is_no_mirror_of_the_parameters_is_refused(mirror, message):
    tx = zero()
    state = tx.create(PARAMS)
    with pytest.raises(ValueError, match=message):
        tx.as_params(mirror(state), state.params)


LAYERS, WIDTH = 4, 32


def deep(params, x):
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["head"]


def distilled(student, batch, teacher):
    return jnp.mean((student(batch) - lax.stop_gradient(teacher(batch))) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 1])
def test_a_teacher_is_gathered_layer_by_layer(stage):
    draw = lambda *shape: random.standard_normal(shape, np.float32)
    model = lambda layers: {"layers": draw(layers, WIDTH, WIDTH), "head": draw(WIDTH, 5)}
    student, teacher, batch = model(1), model(LAYERS), draw(16, WIDTH)
    tx = zero(stage, tx=optax.sgd(1e-2))
    teach = tx.eval_step(deep)
    step = tx.train_step(lambda p, b, t: distilled(lambda b: deep(p, b), b, lambda b: teach(t, b)))
    state, shards = tx.create(student), tx.shard(teacher)
    gathers = collectives(step.lower(state, batch, shards).compile()).of("all-gather")
    state, metrics = step(state, batch, shards)
    plain = jax.value_and_grad(lambda p: distilled(lambda b: deep(p, b), batch, lambda b: deep(teacher, b)))
    value, grads = plain(student)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_close(tx.unshard(state.params), jax.tree.map(lambda x, g: x - 1e-2 * g, student, grads), atol=1e-4)
    if stage == 3:
        padding = 3 * 3 * WIDTH  # the heads' columns
        assert gathers.moved().elements <= 2 * optax.tree.size(student) + optax.tree.size(teacher) + padding
        assert max(c.elements for c in gathers) == WIDTH * WIDTH


class Tied(nnx.Module):
    """Reads and writes with one table."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.embedding

    def __call__(self, tokens):
        return self.embed(tokens) @ self.head.kernel[...].T


@pytest.mark.slow
def test_nnx_modules_that_share_a_weight_train_as_on_one_device_and_have_an_average():
    tokens = jnp.arange(16)
    loss = lambda module, tokens: optax.softmax_cross_entropy_with_integer_labels(module(tokens), tokens[::-1]).mean()

    def trained(tx, value_and_grad, shard):
        module = Tied(nnx.Rngs(0))
        shard(module)
        optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
        for _ in range(2):
            _, grads = value_and_grad(loss)(module, tokens)
            optimizer.update(module, jax.block_until_ready(grads))
        assert module.head.kernel is module.embed.embedding
        return nnx.state(module, nnx.Param), averaged(optimizer.opt_state)

    tx = zero()
    params, average = trained(tx, lambda loss: value_and_grad(tx, loss), lambda m: shard_module(m, tx))
    expected, expected_average = trained(optimizer(), nnx.value_and_grad, lambda m: None)
    assert_close(params, expected)
    weights = tx.as_params(average, params)
    assert jax.tree.structure(weights) == jax.tree.structure(params)
    assert_close(jax.tree.leaves(weights), jax.tree.leaves(expected_average))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_learn(name):
    before, after = EXAMPLES[name](jax.random.key(0))
    assert after < 0.6 * before
