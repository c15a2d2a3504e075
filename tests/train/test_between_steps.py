"""Programs that change parameters, states, batches or keys between two steps, in ways that plain JAX allows.

Each program runs on a plain loop and on a sharded one, and their weights are equal.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from flat_options import tuned

from zerojax import Offload, Precision, offload, zero_shard
from zerojax.layout.leaf import is_chunked
from zerojax.train.moved_state import donatable

tree_get, tree_set = optax.tree_utils.tree_get, optax.tree_utils.tree_set
KEYS = jax.random.split(jax.random.key(0), 4)
SHAPES = {"w": (16, 24), "v": (16, 24), "u": (7, 3), "b": (5,)}
PARAMS = {name: jax.random.normal(key, shape) / 4 for (name, shape), key in zip(SHAPES.items(), KEYS, strict=True)}


def loss(params, x, key=None):
    wide = lambda a: a.astype(jnp.float32)
    h = jnp.tanh(wide(x) @ wide(params["w"])[:16] + jnp.cos(wide(x) @ wide(params["v"])))
    h = h if key is None else h * jax.random.bernoulli(key, 0.5, h.shape)
    return 20 * jnp.mean((h - 0.3) ** 2) + 3 * jnp.mean(wide(params["u"]) ** 2) + jnp.mean((wide(params["b"]) - 1) ** 2)


def batch(i, rows=8):
    return jax.random.normal(jax.random.key(100 + i), (rows, 16)).astype(jnp.bfloat16).astype(jnp.float32)


def adam():
    """With a large `eps`, an update is a smooth function of the gradient, so that roundings stay small."""
    return optax.inject_hyperparams(optax.adam)(learning_rate=0.05, eps=0.3)


class Plain:
    """A loop of plain JAX and optax on one device, in mixed precision."""

    def __init__(self):
        self.tx = adam()
        self.restart(PARAMS)

    def restart(self, params, opt_state=None):
        self.params, self.opt_state = params, self.tx.init(params) if opt_state is None else opt_state

    weights = property(lambda self: self.params)
    plain_state = property(lambda self: self.opt_state)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(self, params, x, key):
        narrow = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
        return jax.grad(lambda params: loss(narrow(params), narrow(x), key))(params)

    def step(self, x, *key):
        grads = self.gradient(self.params, jnp.asarray(x), *(key or (None,)))
        updates, self.opt_state = self.tx.update(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    def copied(self):
        return self.params, self.opt_state

    def go_back(self, copied):
        self.params, self.opt_state = copied


class Sharded:
    """The same loop with the step of zerojax."""

    def __init__(self, tx, step):
        self.tx, self.compiled = tx, step
        self.restart(PARAMS)

    def restart(self, params, opt_state=None):
        self.state = self.tx.create(params, opt_state=opt_state)

    params = property(lambda self: self.state.params, lambda self, x: self.replace(params=x))
    opt_state = property(lambda self: self.state.opt_state, lambda self, x: self.replace(opt_state=x))
    weights = property(lambda self: self.tx.unshard(self.tx.weights(self.params, self.opt_state)))
    plain_state = property(lambda self: self.tx.unshard(self.opt_state))

    def replace(self, **changes):
        self.state = self.state.replace(**changes)

    def step(self, *args):
        self.state, _ = self.compiled(self.state, *args)

    def copied(self):
        return jax.tree.map(jnp.copy, self.state)

    def go_back(self, copied):
        self.state = copied


def swapped(tree):
    return {**tree, "w": tree["v"], "v": tree["w"]}


def averaged(a, b):
    return jax.tree.map(lambda a, b: ((a + b) / 2).astype(a.dtype), a, b)


def swap_leaves_and_moments(loop):
    loop.params = swapped(loop.params)
    mu, nu = (tree_get(loop.opt_state, name) for name in ("mu", "nu"))
    loop.opt_state = tree_set(loop.opt_state, mu=swapped(mu), nu=swapped(nu))


def begin_the_optimizer_again_by_hand(loop):
    loop.opt_state = loop.tx.init(loop.params)


def grow_an_embedding(loop):
    weights, state = loop.weights, loop.plain_state
    grown = lambda tree, value: {**tree, "w": jnp.concatenate([tree["w"], jnp.full((8, 24), value)])}
    mu, nu = (grown(tree_get(state, name), 0.0) for name in ("mu", "nu"))
    loop.restart(grown(weights, 0.1), tree_set(state, mu=mu, nu=nu))


def average_two_states(loop):
    copied = loop.copied()
    loop.step(batch(3))
    loop.go_back(averaged(copied, loop.copied()))


def change_the_learning_rate_in_place(loop):
    getattr(loop.opt_state, "inner", loop.opt_state).hyperparams["learning_rate"] = jnp.float32(0.1)


def alias_two_leaves(loop):
    """Two parameters, and two moments, although a step donates every leaf."""
    loop.params = {**loop.params, "v": loop.params["w"]}
    loop.opt_state = tree_set(loop.opt_state, nu=tree_get(loop.opt_state, "mu"))


def donate_a_copy_and_go_back(loop):
    copied, kept = loop.copied(), loop.copied()
    loop.go_back(copied)
    loop.step(batch(9))
    loop.go_back(kept)


def repeat_and_change_keys(loop):
    for seed in (1, 1, 2):
        loop.step(batch(seed), jax.random.key(seed))


def change_rows_and_types_of_the_batch(loop):
    loop.step(batch(3, 16))
    loop.step(batch(4, 16).astype(jnp.bfloat16))
    loop.step(np.asarray(batch(5, 4), np.float64))


def normalise_rows_in_a_jitted_function(loop):
    unit = lambda x: (x / jnp.linalg.norm(x.astype(jnp.float32), axis=1, keepdims=True)).astype(x.dtype)
    loop.params = jax.jit(lambda params: {**params, "w": unit(params["w"])})(loop.params)


def give_arrays_of_numpy(loop):
    loop.params = jax.tree.map(lambda x: x * np.asarray(0.5, x.dtype), jax.device_get(loop.params))


def assign_to_the_dict(loop):
    loop.params["w"] = loop.params["w"] * 0.5


EQUAL = [
    *(swap_leaves_and_moments, begin_the_optimizer_again_by_hand, grow_an_embedding, average_two_states),
    *(change_the_learning_rate_in_place, alias_two_leaves, donate_a_copy_and_go_back, repeat_and_change_keys),
    *(change_rows_and_types_of_the_batch, normalise_rows_in_a_jitted_function, give_arrays_of_numpy),
    assign_to_the_dict,
]
PLACES = {"0": (0, None), "3": (3, None), "2-host": (2, "device"), "3-host": (3, "host")}


@pytest.fixture(scope="module", params=PLACES.values(), ids=list(PLACES))
def place(request):
    stage, update = request.param
    offload = None if update is None else Offload("host", update=update)
    options = {"precision": Precision.bf16(), "persist_below": 16, "mesh": mesh_of(2), "offload": offload}
    tx = zero_shard(adam(), stage=stage, **tuned(**options))
    return tx, tx.train_step(loss)


@pytest.mark.slow
@pytest.mark.parametrize("program", EQUAL, ids=lambda program: program.__name__)
def test_the_weights_are_those_of_plain_jax(place, program):
    found = []
    for loop in (Plain(), Sharded(*place)):
        loop.step(batch(0))
        loop.step(batch(1))
        program(loop)
        loop.step(batch(5))
        loop.step(batch(6))
        found.append(jax.device_get(loop.weights))
    # A change of narrow parameters is rounded to bfloat16 once, and `average_two_states` averages rounded copies.
    close = functools.partial(np.testing.assert_allclose, rtol=2.0**-7, atol=3e-3)
    jax.tree.map(lambda plain, sharded: close(sharded, plain), *found)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_an_array_that_occurs_twice_is_copied(tmp_path, place):
    """Except the version of files, which all leaves on disk share."""
    kept = Offload(place, path=tmp_path if place == "disk" else None)
    tx = zero_shard(optax.trace(0.9), **tuned(stage=3, mesh=mesh_of(2), persist_below=16, offload=kept))
    state = tx.create({"a": PARAMS["w"], "b": PARAMS["w"]})
    (a, _), structure = jax.tree.flatten(state.opt_state, is_leaf=is_chunked)
    aliased = dataclasses.replace(state, step=7, params={"a": state.params["a"], "b": state.params["a"]})
    if place == "host":
        aliased = dataclasses.replace(aliased, opt_state=structure.unflatten([a, a]))
    found, leaves = donatable(aliased), jax.tree.leaves(aliased)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(aliased))
    copied = [(x, y) for x, y in zip(leaves, jax.tree.leaves(found), strict=True) if x is not y]
    assert [getattr(x, "sharding", None) for x, _ in copied[1:]] == [y.sharding for _, y in copied[1:]]
    assert copied[0][0] == copied[0][1] == 7
    assert len(copied) == 2 + (len(a.chunks) if place == "host" else 0)
    if place == "disk":
        offload.close(state)
