"""A loss in tiles of the sequence: the same numbers and collectives, and no more memory than a tile needs."""

import dataclasses
import functools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import llama
import long_context
import numpy as np
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of
from jax import lax

from zerojax import Precision, Tuning, collectives, tiled, zero_shard
from zerojax.gpus.devices import absent_mesh

WIDTH, HIDDEN, VOCABULARY, LENGTH = 16, 32, 48, 22
WHOLE = lambda fn, tiles: fn


def draw(number, *shape):
    return jax.random.normal(jax.random.key(number), shape) / 4


PARAMS = {
    "mlp": {"gate": draw(0, WIDTH, HIDDEN), "up": draw(1, WIDTH, HIDDEN), "down": draw(2, HIDDEN, WIDTH)},
    "head": draw(3, WIDTH, VOCABULARY),
}
BATCH = {
    "x": draw(4, 8, LENGTH, WIDTH),
    "targets": jax.random.randint(jax.random.key(5), (8, LENGTH), 0, VOCABULARY),
    "real": jax.random.bernoulli(jax.random.key(6), 0.7, (8, LENGTH)),
}


def mlp(params, x):
    return jax.nn.silu(x @ params["gate"]) * (x @ params["up"]) @ params["down"]


def nll(head, x, targets):
    return optax.softmax_cross_entropy_with_integer_labels((x @ head).astype(jnp.float32), targets)


def loss_by(wrap, tiles):
    """The mean over real positions, both parts by `wrap`."""

    def loss(params, batch):
        x = batch["x"] + wrap(mlp, tiles=tiles)(params["mlp"], batch["x"])
        each = wrap(nll, tiles=tiles)(params["head"], x, batch["targets"])
        real = batch["real"].astype(each.dtype)
        return jnp.sum(each * real) / jnp.sum(real)

    return loss


@functools.cache
def on_one_device():
    return jax.jit(jax.value_and_grad(loss_by(WHOLE, 1), argnums=(0, 1), allow_int=True))(PARAMS, BATCH)


def assert_same(found, expected):
    # float32 sums in another order
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.parametrize("tiles", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 100))])  # 100: too many
def test_value_and_derivatives_are_those_of_the_whole(tiles):
    gradient = jax.jit(jax.value_and_grad(loss_by(tiled, tiles), argnums=(0, 1), allow_int=True))
    (value, (grads, to_batch)), (whole, (whole_grads, whole_to_batch)) = gradient(PARAMS, BATCH), on_one_device()
    assert_same((value, grads, to_batch["x"]), (whole, whole_grads, whole_to_batch["x"]))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "view"), [(3, "global"), (3, "device"), (1, "global")])
def test_parameters_are_gathered_and_their_gradients_reduced_once_for_all_tiles(stage, view):
    tx = zero_shard(optax.sgd(1.0), stage=stage, mesh=mesh_of(8), view=view, tuning=Tuning(persist_below=1))
    loss, batch = loss_by(tiled, 4), BATCH | {"real": jnp.ones((8, LENGTH), bool)}
    step, state = tx.train_step(loss), tx.create(PARAMS)
    moved = collectives(step.lower(state, batch).compile())
    assert {c.times for c in moved} == {1}
    elements = Counter()
    for c in moved:
        elements[c.kind == "all-gather"] += c.elements * (c.elements >= WIDTH * HIDDEN)
    size = sum(x.size for x in jax.tree.leaves(PARAMS))
    assert elements[False] == size  # reduced
    assert size <= elements[True] <= (2 * size if stage == 3 else size)  # gathered, in each pass at most
    state, metrics = step(state, batch)
    value, grads = jax.jit(jax.value_and_grad(loss_by(WHOLE, 1)))(PARAMS, batch)
    assert_same(metrics["loss"], value)
    assert_same(tx.unshard(state.params), jax.tree.map(jnp.subtract, PARAMS, grads))


def test_narrow_gradients_are_added_up_in_float32():
    """Of 1 and 256 bfloat16 makes 256."""
    w, x = jnp.ones((1,), jnp.bfloat16), jnp.ones((1, 1024, 1), jnp.bfloat16)
    total = lambda w: tiled(lambda w, x: x * w, tiles=1024)(w, x).astype(jnp.float32).sum()
    np.testing.assert_array_equal(jax.grad(total)(w), 1024)


@pytest.mark.slow
def test_the_gradient_of_what_a_loop_adds_up_is_reduced_behind_it():
    """In global view too, whatever the loop: here a recurrent net's."""

    def loss(params, x):
        step = lambda h, x: (jnp.tanh(h @ params["w"].astype(jnp.bfloat16) + x), None)
        h, _ = lax.scan(step, jnp.zeros((8, 32), jnp.bfloat16), jnp.moveaxis(x, 1, 0).astype(jnp.bfloat16))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    tx = zero_shard(optax.sgd(1.0), stage=2, mesh=mesh_of(8), tuning=Tuning(persist_below=1))
    params, x = {"w": draw(7, 32, 32)}, draw(8, 8, 12, 32)
    step, state = tx.train_step(loss), tx.create(params)
    moved = collectives(step.lower(state, x).compile())
    assert {c.times for c in moved if c.elements >= 32 * 32} == {1}
    state, _ = step(state, x)
    expected = jax.jit(jax.grad(loss))(params, x)["w"]
    found = params["w"] - tx.unshard(state.params)["w"]
    # bfloat16 rounds to 8 bits, and each device rounds its own sum
    np.testing.assert_allclose(found, expected, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(
    ("shapes", "fn", "tiles", "error", "message"),
    [
        ([(2, 8, 4)], mlp, 0, ValueError, "tiles counts tiles and must be at least 1"),
        ([(2, 8, 4)], mlp, 2.0, TypeError, "tiles counts tiles and must be an int"),
        ([(2, 8, 4), (2, 9)], mlp, 2, ValueError, r"as many in each; the shapes are \[2, 8, 4\], \[2, 9\]"),
        ([(8,)], mlp, 2, ValueError, r"on dim 1.*the shapes are \[8\]"),
        ([], mlp, 2, ValueError, "the shapes are none"),
        ([(2, 0)], mlp, 2, ValueError, "the arrays have none"),
        ([(2, 8, 4)], lambda _, x: x.mean(), 2, ValueError, r"the 4 positions.*result has shape \[\].*Take sums"),
        ([(2, 8, 4)], lambda _, x: {"y": x[:, :1]}, 2, ValueError, r"result\['y'\] has shape \[2, 1, 4\]"),
    ],
)
def test_what_has_no_positions_is_refused(shapes, fn, tiles, error, message):
    with pytest.raises(error, match=message):
        tiled(fn, tiles=tiles)(PARAMS["mlp"], *map(jnp.zeros, shapes))


SMALL = llama.Config(vocabulary=64, width=16, hidden=24, layers=2, heads=4, kv_heads=2, head=4, epsilon=1e-5, theta=1e4)


@pytest.mark.slow
def test_the_examples_model_is_the_same_in_tiles(monkeypatch):
    """And with a tied head, attention by blocks, and layers' inputs offloaded."""
    config = dataclasses.replace(SMALL, tied=True)
    monkeypatch.setattr(long_context, "QUERIES", 4)
    monkeypatch.setattr(long_context, "KEYS", 8)
    monkeypatch.setitem(long_context.TILES, "offload", (5, 7))
    tokens = jax.random.randint(jax.random.key(0), (8, 33), 0, 64)
    real = jnp.arange(33) < jnp.arange(26, 34)[:, None]
    params = llama.Llama(config).init(jax.random.key(1), tokens)
    expected = jax.jit(jax.value_and_grad(llama.next_token_loss(llama.Llama(config))))(params, tokens, real)
    tx = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=1))
    loss = llama.next_token_loss(long_context.model_of("offload", 32, config))
    value, grads = tx.value_and_grad(lambda params, batch: loss(params, *batch))(tx.shard(params), (tokens, real))
    chex.assert_trees_all_close((value, tx.unshard(grads)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@aot
def test_no_more_memory_for_gpus_than_a_tile_needs(optimized):
    """Whole, logits and what is inside of the feed-forward layers are tokens times a width; a tile is a 64th of it."""
    length = wide = 16384
    config = dataclasses.replace(SMALL, vocabulary=wide, hidden=wide, width=64, head=16)

    model = llama.Llama(config, 64, 64, attention=lambda q, k, v: q)
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=absent_mesh("h200:8"), precision=Precision.bf16())
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    batch = jax.ShapeDtypeStruct((8, length + 1), jnp.int32)
    lowered = tx.train_step(llama.next_token_loss(model)).lower(tx.create(shapes), batch)
    # A matrix of tokens times a width has 2 * length * wide bytes in bfloat16.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 2 * length * wide / 4
