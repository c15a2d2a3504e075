"""States of hand-written loops: a run goes on in another layout as if it had not been interrupted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import saved
from conftest import mesh_of, quick_or_slow
from flat_options import tuned
from flax import nnx
from flax.training.train_state import TrainState

from zerojax import Offload, Precision, logical, zero_shard
from zerojax.checkpoint import Checkpointer, restore_params
from zerojax.flax_nnx import init_module, value_and_grad

X = np.random.default_rng(0).normal(size=(24, 7)).astype(np.float32)
PARAMS = {"w": jnp.ones((7, 11)) / 7, "b": jnp.zeros(5), "v": jnp.ones((11, 5)) / 11}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - 1) ** 2)


def transformation(stage, count, **options):
    """With `persist_below=10`, moments are flat, padded and sharded."""
    return zero_shard(optax.adam(0.1), stage=stage, mesh=mesh_of(count), **options, **tuned(persist_below=10))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(7, 11, rngs=rngs), nnx.BatchNorm(11, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(11, 5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def of_pair(tx):
    """A loop over parameters, optimizer state and a PRNG key."""

    @jax.jit
    def step(tree):
        params, opt_state, key = tree
        key, now = jax.random.split(key)
        loss, grads = tx.value_and_grad(loss_fn)(params, X + jax.random.normal(now, X.shape) / 9)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    params = tx.shard(PARAMS)
    return (params, tx.init(params), jax.random.key(3)), step


def of_train_state(tx):
    @jax.jit
    def step(state):
        loss, grads = tx.value_and_grad(loss_fn)(state.params, X)
        return state.apply_gradients(grads=grads), loss

    return TrainState.create(apply_fn=None, params=tx.shard(PARAMS), tx=tx), step


def of_module(tx):
    """Dropout and batch norm: counts of random streams, keys and statistics are in the tree."""
    model = init_module(lambda key: Net(nnx.Rngs(key)), tx, jax.random.key(1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    gradient = value_and_grad(tx, lambda model, x: jnp.mean((model(x) - 1) ** 2))

    def step(tree):
        nnx.update((model, optimizer), tree)
        loss, grads = gradient(model, X)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return nnx.state((model, optimizer)), step


def train(tree, step, steps=2):
    losses = []
    for _ in range(steps):
        tree, loss = step(tree)
        losses.append(float(loss))
    return tree, losses


@pytest.mark.parametrize(
    ("loop", "stage"),
    quick_or_slow(
        list(itertools.product((of_pair, of_train_state, of_module), (1, 3))),
        [(of_pair, 1), (of_train_state, 3), (of_module, 3)],
    ),
)
def test_a_loop_goes_on_in_another_layout(loop, stage, tmp_path):
    tx, other = transformation(3, 8), transformation(stage, 3)
    tree, step = loop(tx)
    tree, _ = train(tree, step)
    saved(tmp_path, tree, step=2, tx=tx)
    _, losses = train(tree, step)
    like, step = loop(other)
    restored = Checkpointer(tmp_path, read_only=True, tx=other).restore(like)
    assert (restored.step, jax.tree.structure(restored.state)) == (2, jax.tree.structure(like))
    np.testing.assert_allclose(train(restored.state, step)[1], losses, rtol=1e-5)


def tree_of(tx, fill=0.0):
    params = tx.shard(jax.tree.map(lambda x: x + fill, PARAMS))
    updates, opt_state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "average": tx.shard(params)}


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("options", [{"precision": Precision.bf16()}, {"offload": Offload(optimizer="host")}])
def test_master_weights_offloaded_leaves_and_averages_keep_every_bit(options, tmp_path):
    narrow, wide = transformation(1, 8, **options), transformation(3, 3)
    tree = tree_of(narrow)
    saved(tmp_path / "a", tree, step=1, tx=narrow)
    there = Checkpointer(tmp_path / "a", read_only=True, tx=wide).restore(tree_of(wide, 5.0)).state
    for part in ("params", "average"):
        expected = narrow.weights(tree[part], tree["opt_state"]) if part == "params" else tree[part]
        assert_equal(logical(there[part]), logical(expected))
    saved(tmp_path / "b", there, step=1, tx=wide)
    back = Checkpointer(tmp_path / "b", read_only=True, tx=narrow).restore(tree_of(narrow, 5.0)).state
    assert_equal(back, tree)


def test_a_train_state_and_a_zero_state_have_the_same_names(tmp_path):
    tx, other = transformation(3, 8), transformation(1, 3)
    made = TrainState.create(apply_fn=None, params=tx.shard(PARAMS), tx=tx)
    tx.init({"w": made.params["w"]})  # the plan of a part of the parameters is not that of the tree
    like = other.create(jax.eval_shape(lambda: PARAMS))
    found = saved(tmp_path / "a", made.replace(step=7)).restore(like).state
    assert (int(found.step), float(found.scaling.scale)) == (7, 1.0)
    assert_equal(logical(found.params), PARAMS)
    restored = saved(tmp_path / "b", other.train_step(loss_fn)(found, X)[0]).restore(made).state
    assert (type(restored.step), restored.step, restored.tx) == (int, 8, tx)
    assert_equal(logical(restore_params(tmp_path / "b", made.params)), logical(restored.params))


def test_a_top_leaf_named_step_is_the_step(tmp_path):
    tx = transformation(3, 8)
    tree = {"step": jnp.int32(4), **tree_of(tx)}
    assert saved(tmp_path, tree, tx=tx).latest() == 4


def test_a_checkpoint_without_a_loss_scale_keeps_that_of_a_live_state(tmp_path):
    tx = transformation(3, 8)
    like = transformation(1, 3, precision=Precision(compute=jnp.float16, loss_scale="dynamic")).create(PARAMS)
    restored = saved(tmp_path, of_pair(tx)[0][:2], step=3, tx=tx).restore(like).state
    assert (int(restored.step), float(restored.scaling.scale)) == (3, float(like.scaling.scale))
    assert restored.scaling.scale is not like.scaling.scale


def test_trees_whose_layout_is_not_known_are_refused(tmp_path):
    tx, other = transformation(3, 8), transformation(3, 8)
    params, theirs = tx.shard(PARAMS), other.shard({"x": jnp.ones((7, 3))})
    pair, second, small = (params, tx.init(params)), (theirs, other.init(theirs)), transformation(3, 4)
    donated = tx.shard(PARAMS)
    jax.tree.map(lambda x: x.delete(), donated)
    for tree, given, error, named in (
        (pair, None, TypeError, r"A tuple does not name it.*Checkpointer\(..., tx=tx\)"),
        (pair, other, ValueError, "no parameters with an optimizer state of this transformation"),
        ((PARAMS, pair[1]), tx, ValueError, r"0/v is stored with shape \(11, 5\), and the plan has \(16, 5\)"),
        ((*pair, params), tx, ValueError, "Several parts.*: 0 with 1, 2 with 1"),
        ({"params": PARAMS, "average": params, "state": pair[1]}, tx, ValueError, r"params/v is stored .*\(11, 5\)"),
        ({"a": pair, "b": pair}, tx, ValueError, "Several parts.*a/0 with a/1"),
        ({"a": pair, "b": second}, tx, ValueError, "another sharded optimizer state"),
        ((small.shard(params), pair[1]), tx, ValueError, r"0/v is stored .*\(12, 5\)"),
        ((*pair, 0.5), tx, TypeError, r"state\[2\] is a float"),
        ((*pair, jnp.tanh), tx, TypeError, r"state\[2\] is a .*eqx.filter"),
        ((donated, pair[1]), tx, ValueError, r"state\[0\]\['b'\] was used up"),
    ):
        with Checkpointer(tmp_path, tx=given) as checkpoints, pytest.raises(error, match=named):
            checkpoints.save(tree, step=1)
    with Checkpointer(tmp_path, tx=tx) as checkpoints, pytest.raises(TypeError, match="step= is None"):
        checkpoints.save(pair)
