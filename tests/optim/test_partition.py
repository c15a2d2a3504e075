"""The partition of an update: what may not be chunked gives the same numbers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, quick_or_slow

from zerojax import Offload, Precision, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, arrays, saving
from zerojax.layout.leaf import is_chunked
from zerojax.offload.chunked import joined


class Moments(NamedTuple):
    m: Any
    other: Any


def by_leaf(update, start):
    """A transformation leaf by leaf: `update(gradient, momentum, other) -> (update, momentum, other)`."""

    def init(params):
        return Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(start, params))

    def updated(grads, state, params=None):
        tree = jax.tree.structure(grads)
        found = jax.tree.map(update, grads, state.m, tree.unflatten(tree.flatten_up_to(state.other)))
        updates, m, other = (tree.unflatten(list(x)) for x in zip(*tree.flatten_up_to(found), strict=True))
        return updates, Moments(m, other)

    return optax.GradientTransformation(init, updated)


def counted(direction):
    """Momentum, then a direction of `(momentum, gradient, count)`."""

    def update(g, m, count):
        m = 0.9 * m + g
        return -0.01 * direction(m, g, count), m, count + 1

    return by_leaf(update, lambda _: jnp.zeros(()))


def branching(then, otherwise):
    return counted(lambda m, g, count: jax.lax.cond(count < 1.5, then, otherwise, m, g))


def statistic(g, m, other):
    """A matrix beside the momentum that nothing reads."""
    m = 0.9 * m + g
    return -0.01 * m, m, 0.9 * other + g.T @ g


def integers(g, m, other):
    """A count for each element, which stays on the device."""
    m = 0.9 * m + g
    return -0.01 * m / (other + 1), m, other + (g > 0)


def printing(m, g):
    jax.debug.print("late")
    return 2 * m


UPDATES = {
    "a sum in a branch": lambda: branching(lambda m, g: m / (1e-3 + jnp.sqrt(jnp.sum(g * g))), lambda m, g: m),
    "branches": lambda: branching(lambda m, g: jax.nn.softplus(m) + 2, lambda m, g: m),
    "a branch that prints": lambda: branching(lambda m, g: m, printing),
    "a branch over all leaves": lambda: optax.chain(
        optax.conditionally_transform(optax.clip_by_global_norm(0.01), lambda step: step % 2 == 0), optax.adam(1e-2)
    ),
    "a statistic": lambda: by_leaf(statistic, lambda p: jnp.zeros((p.shape[1],) * 2)),
    "integers": lambda: by_leaf(integers, lambda p: jnp.zeros(p.shape, jnp.int32)),
    "takes the loss": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
    "a short last chunk": lambda: counted(lambda m, g, count: m * (2.0 if len(g) >= 4 else 3.0)),
}


def params():
    keys = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(keys[0], (10, 6)), "b": jax.random.normal(keys[1], (10, 6))}


def loss(params, batch):
    return ((jnp.tanh(batch @ params["a"].T) @ params["b"] - 1) ** 2).mean()


def zero(tx, offload=None, *, stage=3, precision=None):
    tuning = Tuning(persist_below=8)
    return zero_shard(tx, stage=stage, mesh=mesh_of(2), tuning=tuning, offload=offload, precision=precision)


def trained(tx):
    state, step = tx.create(params()), tx.train_step(loss)
    for i in range(3):
        state, _ = step(state, jax.random.normal(jax.random.key(i), (8, 6)))
    opt_state = jax.tree.map(lambda x: joined(x) if is_chunked(x) else x, state.opt_state, is_leaf=is_chunked)
    return jax.device_get((tx.unshard(state.params), opt_state))


EVERY = [*((name, "device") for name in UPDATES), ("branches", "host")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "update"), quick_or_slow(EVERY, [("a statistic", "device")]))
def test_what_may_not_be_chunked_gives_the_same_numbers(name, update):
    # a chunk of two of the five rows of each device
    offloaded = Offload(optimizer="host", update=update, chunk_bytes=80)
    wanted, found = (trained(zero(UPDATES[name](), offload)) for offload in (None, offloaded))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # float32, three steps, other programs


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("branches", 3),
        ("a short last chunk", 3),
        ("takes the loss", 3),
        ("a sum in a branch", 1),
        ("a branch that prints", 1),
    ],
)
def test_an_update_is_chunked_if_that_of_the_whole_leaf_is_elementwise(name, chunks):
    """Each chunk is updated as a part of the leaf, so a factor that depends on the leaf's shape does not change."""
    tx = zero(UPDATES[name](), Offload(optimizer="host", chunk_bytes=80))
    plan = tx.create(jax.eval_shape(params)).plan
    assert {len(chunking.extents) for chunking in plan.chunkings if chunking} == {chunks}


def test_an_effect_that_no_result_needs_is_not_lost_without_a_word():
    def direction(m, g, count):
        jax.debug.print("count {}", count)
        return m

    tx = zero(counted(direction), Offload(optimizer="host"))
    with pytest.warns(UserWarning, match=r"does not run: an update of offloaded state"):
        tx.train_step(loss)(tx.create(params()), jnp.ones((8, 6)))


def test_a_save_that_fails_leaves_nothing_writing(tmp_path, monkeypatch):
    """What was begun before the leaf that fails is waited for."""
    tx = zero(optax.adam(1e-2), Offload(optimizer="host"))
    state, waited, wait_for = tx.create(params()), [], arrays.wait_for

    def torn(node):
        raise OSError("torn")

    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    monkeypatch.setattr(arrays, "wait_for", lambda futures: (waited.append(futures), wait_for(futures)))
    monkeypatch.setattr(arrays, "joined", torn)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state)
        with pytest.raises(CheckpointError, match="torn"):
            checkpoints.wait()
    assert waited


@pytest.mark.slow
def test_an_update_on_the_host_that_reads_its_state_alone():
    """Nothing is given whose place the new parameters could take."""

    def init(params):
        return jax.tree.map(jnp.ones_like, params)

    def update(grads, state, params=None):
        return jax.tree.map(lambda m: -0.01 * m, state), jax.tree.map(lambda m: 0.9 * m, state)

    params, batch = {"w": jnp.ones((64, 16))}, jnp.ones((8, 64))
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    offload = Offload(optimizer="host", chunk_bytes=64, update="host")
    for precision in (None, Precision.bf16()):
        tx = zero(optax.GradientTransformation(init, update), offload, stage=2, precision=precision)
        state, step = tx.create(params), tx.train_step(loss)
        for _ in range(2):
            state, _ = step(state, batch)
        np.testing.assert_allclose(np.asarray(state.params["w"], np.float32), 1 - 0.01 - 0.009, rtol=2**-8)
