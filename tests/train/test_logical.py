"""A padded parameter cannot be mapped into nonsense, and `zerojax.logical` gives the arrays that a user expects."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from flat_options import tuned

import zerojax
from zerojax import Offload, Padded, Tuning, collectives, zero_shard
from zerojax.layout.leaf import is_padded


def model():
    w = jax.random.normal(jax.random.key(0), (20, 12)) + 1
    return {"w": w, "layers": [{"u": jnp.arange(1.0, 24).reshape(1, 23)}], "b": jnp.ones(3)}


def transformation(**options):
    return zero_shard(optax.adam(1e-2), **tuned(**{"stage": 3, "mesh": mesh_of(7), "persist_below": 10, **options}))


@pytest.fixture(scope="module")
def stored():
    tree = transformation().shard(model())
    assert isinstance(tree["w"], Padded), "the test is of padded leaves"
    return tree


NONSENSE = {
    "mean": jnp.mean,
    "NumPy's minimum": np.min,
    "mean along the padded dim": lambda x: x.mean(0, keepdims=True),
    "row": lambda x: x[0],
    "rows": lambda x: x[:3],
    "transpose": lambda x: x.T,
    "twice as long": lambda x: jnp.concatenate([x, x]),
    "position of the maximum": jnp.argmax,
    "flattened": jnp.ravel,
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", NONSENSE)
def test_what_a_function_makes_of_storage_is_refused(name, stored):
    for mapped in (jax.tree.map, jax.jit(jax.tree.map, static_argnums=0)):
        with pytest.raises(ValueError, match=r"is padded to \[.*gave an array of shape.*zerojax\.logical\(tree\)"):
            mapped(NONSENSE[name], stored)


TREES = {
    "None": lambda x: None,
    "flag": lambda x: x.ndim > 1,
    "label": lambda x: "decay",
    "axis": lambda x: 0,
    "learning rate": lambda x: 0.1,
    "sharding": lambda x: x.sharding,
    "PRNG key": lambda x: jax.random.key(0),
    "raw key": lambda x: jax.random.PRNGKey(0),
    "whether any is negative": lambda x: jnp.any(x < 0),
    "shape": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "stack": lambda x: jnp.stack([x, x]),
    "batch along another dim": lambda x: jnp.stack([x, x], 1),
    "other type": lambda x: x.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", TREES)
def test_other_trees_of_the_same_structure_are_made_as_before(name, stored):
    found = jax.tree.map(TREES[name], stored)
    assert isinstance(found["w"], Padded)
    assert found["w"].shape == (20, 12)


@pytest.mark.slow
def test_transformations_of_jax_go_through_storage(stored):
    """They unflatten batches, bases, types, axes and shardings."""
    stack = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), stored)
    total = lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))
    axes = jax.tree.map(lambda _: 0, stored)
    np.testing.assert_allclose(jax.vmap(total, in_axes=(axes,))(stack), [total(stored), 4 * total(stored)], rtol=1e-6)
    doubled = jax.lax.scan(lambda c, p: (jax.tree.map(jnp.add, c, p), p["b"]), stored, stack)[0]
    chex.assert_trees_all_close(zerojax.logical(doubled), jax.tree.map(lambda x: 4 * x, model()), rtol=1e-6)
    rows = lambda p: p["w"][0, :2] ** 2
    expected = jax.jacrev(lambda p: p["w"][0, :2] ** 2)(model())["w"]
    for jacobian in (jax.jacrev(rows), jax.jacfwd(rows)):
        np.testing.assert_allclose(jacobian(stored)["w"].logical(), expected)
    same = jax.jit(lambda p: p, out_shardings=jax.tree.map(lambda x: x.sharding, stored))(stored)
    chex.assert_trees_all_equal(zerojax.logical(same), model())


def test_sums_to_which_zeros_add_nothing_stay_those_of_optax(stored):
    np.testing.assert_allclose(optax.tree.norm(stored), optax.tree.norm(model()), rtol=1e-6)
    np.testing.assert_allclose(optax.tree.vdot(stored, stored), optax.tree.vdot(model(), model()), rtol=1e-6)
    clipped, _ = optax.clip_by_global_norm(0.5).update(stored, optax.EmptyState())
    np.testing.assert_allclose(optax.tree.norm(clipped), 0.5, rtol=1e-6)
    with pytest.raises(ValueError, match=r"zerojax\.logical"):
        optax.tree.min(stored)


STATISTICS = (jnp.mean, jnp.min, jnp.std, jnp.size, lambda x: jnp.mean(jnp.cos(x)), jnp.argmax)


def statistics(tree):
    return [jax.tree.map(statistic, tree) for statistic in STATISTICS]


def test_statistics_of_logical_parameters_are_those_of_plain_jax(stored):
    for found in (statistics(zerojax.logical(stored)), jax.jit(lambda p: statistics(zerojax.logical(p)))(stored)):
        chex.assert_trees_all_close(found, statistics(model()), rtol=1e-5)
    compiled = jax.jit(lambda p: jax.tree.map(jnp.mean, zerojax.logical(p))).lower(stored).compile()
    assert {one.kind for one in collectives(compiled)} <= {"all-reduce"}, "the slice gathers the parameter"


def loss(params, batch):
    hidden = jnp.tanh(batch @ params["w"])
    return jnp.mean(hidden**2) * params["b"].sum() + jnp.mean(params["layers"][0]["u"] ** 2)


BATCH = jax.random.normal(jax.random.key(1), (14, 20))


def test_a_clip_around_zero_shard_clips_padded_gradients_as_on_one_device(stored):
    inner = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh_of(7), tuning=Tuning(persist_below=10))

    def trained(tx, gradient, params):
        @jax.jit
        def step(params, state):
            _, grads = gradient(params, BATCH)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step(*step(params, tx.init(params)))[0]

    clip = optax.clip_by_global_norm(1.0)
    found = trained(optax.chain(clip, inner), inner.value_and_grad(loss), stored)
    expected = trained(optax.chain(clip, optax.sgd(0.1)), jax.value_and_grad(loss), model())
    chex.assert_trees_all_close(zerojax.logical(found), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"offload": Offload(optimizer="host")}], ids=["device", "host"])
def test_states_and_gradients_are_logical_too(options, stored):
    tx, plain = transformation(**options), optax.adam(1e-2)
    state, _ = tx.train_step(loss)(tx.create(model()), BATCH)
    grads = jax.grad(loss)(model(), BATCH)
    updates, opt_state = plain.update(grads, plain.init(model()))
    found = zerojax.logical({"run": state, "step": 3})
    assert found["step"] == 3
    chex.assert_trees_all_equal_shapes(found["run"].opt_state, opt_state)
    chex.assert_trees_all_close(found["run"].opt_state, opt_state, atol=1e-6)
    chex.assert_trees_all_close(found["run"].params, optax.apply_updates(model(), updates), atol=1e-4)
    if not options:
        jitted = jax.jit(lambda state: statistics(zerojax.logical(state).opt_state))(state)
        chex.assert_trees_all_close(jitted, statistics(opt_state), rtol=1e-4, atol=1e-7)
        _, found = tx.value_and_grad(loss)(stored, BATCH)
        chex.assert_trees_all_close(zerojax.logical(found), grads, atol=1e-6)
    with pytest.raises(ValueError, match="does not belong to these parameters"):
        tx.train_step(loss)(found["run"] if options else zerojax.logical(state), BATCH)


def test_shapes_and_explicit_meshes(stored):
    shapes = zerojax.logical(transformation().shard(jax.eval_shape(model)))
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, model())
    on_host, plain = transformation(offload=Offload(optimizer="host")), optax.adam(1e-2).init(model())
    state = zerojax.logical(on_host.create(jax.eval_shape(model)))
    chex.assert_trees_all_equal_shapes_and_dtypes(state.opt_state, plain)
    chex.assert_trees_all_equal(jax.device_get(zerojax.logical(on_host.create(model())).opt_state), plain)
    mesh = mesh_of(7, kind=jax.sharding.AxisType.Explicit)
    on_explicit = transformation(mesh=mesh).shard(model())
    for found in (zerojax.logical(on_explicit), jax.jit(zerojax.logical)(on_explicit)):
        chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(model()))


def test_a_padded_parameter_passes_assertions_about_its_shape(stored):
    w = stored["w"]
    assert (w.size, w.ndim, w.shape) == (240, 2, (20, 12))
    chex.assert_shape(w, (20, 12))
    chex.assert_rank(w, 2)
    chex.assert_size(w, 240)
    chex.assert_equal_shape([w, model()["w"]])
    chex.assert_tree_all_finite(stored)
    count = sum(x.size for x in jax.tree.leaves(stored, is_leaf=is_padded))
    assert count == sum(x.size for x in jax.tree.leaves(zerojax.logical(stored))) == 240 + 23 + 3
    with pytest.raises(ValueError, match="stack and batch parameters along dim 0"):
        zerojax.logical(jax.tree.map(lambda x: jnp.stack([x, x], 1), stored))


@pytest.mark.parametrize("stage", [1, 3])
def test_updates_are_those_of_optax_bit_for_bit(stage):
    params, grads = ({"w": jax.random.normal(jax.random.key(key), (16, 8))} for key in (0, 1))
    tx, plain = zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh_of(4)), optax.adam(1e-3)
    stored = tx.shard(params)
    updates, _ = jax.jit(tx.update)(tx.shard(grads), tx.init(stored), stored)
    expected, _ = jax.jit(plain.update)(grads, plain.init(params), params)
    assert (updates["w"] == expected["w"]).all()
