"""Meshes with Explicit axes: the same numbers, on the caller's mesh, under `jax.set_mesh` or not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from explicit_models import AUTO, EXPLICIT, P, context
from explicit_models import mesh_of as explicit_mesh
from flax import nnx
from jax.sharding import NamedSharding
from parity import train_plain

import zerojax
from zerojax import Offload, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, export, import_params
from zerojax.flax_nnx import shard_module, value_and_grad

ADAM = optax.adam(1e-2)
STEPS = 2


def data_mesh():
    return explicit_mesh(EXPLICIT)


def params():
    """A leaf that is sharded, one that is padded, and one that is small."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32) / 4
    return {"w": draw(16, 24), "v": draw(7, 11), "b": draw(24)}


def batch():
    return {"x": np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)}


def loss_fn(params, batch):
    h = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((h[:, :7] @ params["v"]) ** 2) + jnp.mean(h[:, 7:] ** 2)


@pytest.fixture(scope="module")
def expected():
    """Parameters and losses of plain optax on one device."""
    return train_plain(ADAM, loss_fn, params(), [batch()] * STEPS)


def sharded(mesh, stage=3, **options):
    return zero_shard(ADAM, stage=stage, mesh=mesh, tuning=Tuning(persist_below=64), **options)


def given_params(mesh):
    """Parameters of the caller; where the mesh has a model axis, one leaf is sharded over it."""
    model = "model" in mesh.axis_names
    return params() | ({"w": jax.device_put(params()["w"], NamedSharding(mesh, P(None, "model")))} if model else {})


def assert_on(mesh, tree):
    assert all(x.sharding.mesh is mesh for x in jax.tree.leaves(tree)), jax.tree.map(lambda x: x.sharding, tree)


def assert_sharded(tree, shardings):
    """On the mesh of the shardings, and so sharded."""
    for x, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.mesh is sharding.mesh
        assert x.sharding.is_equivalent_to(sharding, len(x.shape))


def assert_params(tx, found, expected):
    full = tx.unshard(found)
    assert_on(tx.config.user_mesh, full)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), full, expected)


def with_train_step(tx, params):
    """The state is donated, and its later use noticed."""
    state, step = tx.create(params), tx.train_step(loss_fn)
    first, losses = state, []
    for _ in range(STEPS):
        state, metrics = step(state, batch())
        losses.append(metrics["loss"])
    assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    with pytest.raises(ValueError, match="used up"):
        step(first, batch())
    assert jax.tree.structure(state) == jax.tree.structure(first)
    assert_sharded(state.opt_state, tx.shardings(params).opt_state)
    return state.params, losses, (state, metrics)


def with_own_loop(tx, params, jit=lambda f: f):
    """`optax.apply_updates` is the caller's own Explicit code."""
    gradient = tx.value_and_grad(loss_fn)

    @jit
    def step(params, state, batch):
        loss, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    stored = tx.shard(params)
    state, losses = tx.init(stored), []
    for _ in range(STEPS):
        stored, state, loss = step(stored, state, batch())
        losses.append(loss)
    return stored, losses, (state, losses)


def with_jitted_loop(tx, params):
    return with_own_loop(tx, params, jax.jit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "stage", "set_mesh", "train"),
    [
        ((EXPLICIT, EXPLICIT), 3, True, with_jitted_loop),
        ((EXPLICIT,), 1, True, with_train_step),
        ((AUTO, EXPLICIT), 2, False, with_own_loop),
    ],
)
def test_trains_as_on_one_device(kinds, stage, set_mesh, train, expected):
    mesh = explicit_mesh(*kinds)
    with context(mesh, set_mesh):
        tx = sharded(mesh, stage)
        found, losses, others = train(tx, given_params(mesh))
        assert_on(mesh, (found, others))
        np.testing.assert_allclose(losses, expected[1], rtol=1e-5)
        assert_params(tx, found, expected[0])


def test_results_compose_with_the_callers_explicit_code():
    """In which the type of an array says how it is sharded."""
    mesh = data_mesh()
    with jax.set_mesh(mesh):
        tx = sharded(mesh)
        state = tx.create(params())
        assert jax.typeof(state.params["w"]).sharding.spec == P(None, "data")
        squared = jax.jit(lambda w: jax.sharding.reshard(w * w, P("data")))(state.params["w"])
        assert jax.typeof(squared).sharding.spec == P("data", None)

        @jax.jit
        def gradient(stored, rows):
            loss = lambda params, batch: (loss_fn(params, batch), (batch["x"].mean(), jnp.tanh(batch["x"])))
            (loss, (mean, by_row)), grads = tx.value_and_grad(loss, has_aux=True)(stored, rows)
            assert jax.typeof(grads["w"]).sharding.spec == P(None, "data")
            assert jax.typeof(by_row).sharding.spec == P("data", None)
            return loss + mean, grads

        rows = jax.device_put(batch(), NamedSharding(mesh, P("data")))
        value, _ = gradient(state.params, rows)
        np.testing.assert_allclose(value, loss_fn(params(), batch()) + batch()["x"].mean(), rtol=1e-5)


def test_arrays_whose_types_say_reduced_or_unreduced():
    """A reduced array is replicated. An unreduced one is partial sums, which JAX refuses on Auto axes."""
    mesh, full = data_mesh(), params()["w"]
    copies = [jax.device_put(full, device) for device in mesh.devices.flat]

    def found(spec):
        x = jax.make_array_from_single_device_arrays(full.shape, NamedSharding(mesh, spec), copies)
        return sharded(mesh).shard({"w": x})["w"]

    np.testing.assert_array_equal(found(P(reduced={"data"})), full)
    with pytest.raises(ValueError, match="Unreduced axes"):
        found(P(unreduced={"data"}))


def test_initialises_with_the_callers_explicit_code():
    mesh = data_mesh()
    with jax.set_mesh(mesh):
        draw = lambda key: {"w": jax.random.normal(key, (16, 24), out_sharding=P("data")), "b": jnp.zeros(24)}
        tx, key = sharded(mesh), jax.random.key(0)
        stored = tx.init_params(draw, key)
        traced = jax.jit(lambda key: tx.init_params(draw, key))(key)
        shapes = tx.create(jax.eval_shape(draw, key)).params
        for found in (stored, traced, shapes):
            assert_sharded(found, tx.shardings(stored).params)
        np.testing.assert_allclose(tx.unshard(traced)["w"], draw(key)["w"], rtol=1e-6)
    assert_sharded(jax.jit(tx.create)(params()).opt_state, tx.shardings(params()).opt_state)  # outside of `set_mesh`


@pytest.mark.slow
def test_offloaded(expected):
    mesh = data_mesh()
    with jax.set_mesh(mesh):
        tx = sharded(mesh, offload=Offload(optimizer="host", params="host", update="device"))
        state, step = tx.create(params()), tx.train_step(loss_fn)
        for _ in range(STEPS):
            state, _ = step(state, batch())
        assert_on(mesh, state)
        assert state.params["w"].sharding.memory_kind != "device"
        assert_params(tx, state.params, expected[0])


def test_checkpoints(tmp_path):
    """Saved on Auto axes, restored onto Explicit ones, and saved from there."""
    mesh = data_mesh()
    saved, shapes = sharded(mesh_of(8), 1), jax.eval_shape(params)
    with jax.set_mesh(mesh), Checkpointer(tmp_path / "run", keep=None) as checkpoints:
        checkpoints.save(saved.create(params()), {"epoch": 3})
        restored = checkpoints.restore(sharded(mesh).create(shapes))
        assert restored.data == {"epoch": 3}
        assert_on(mesh, restored.state)
        assert_params(sharded(mesh), restored.state.params, params())
        checkpoints.save(restored.state, step=1)
        again = checkpoints.restore(sharded(mesh_of(8)).create(shapes))
        assert again.step == 1
        assert_params(sharded(mesh_of(8)), again.state.params, params())
        export(restored.state, tmp_path / "exported")
        assert_params(sharded(mesh), import_params(tmp_path / "exported", restored.state), params())


@pytest.mark.slow
def test_reports_and_plans():
    mesh = data_mesh()
    tx, auto = sharded(mesh), sharded(mesh_of(8))
    with jax.set_mesh(mesh):
        state = tx.create(params())
        assert zerojax.check(tx.train_step(loss_fn), state, batch()).ok
        assert zerojax.compare(tx.train_step(loss_fn), state, batch(), stages=3).ok
        bytes_here = zerojax.report(state).total
        estimated = zerojax.estimate(params(), tx=ADAM)
        lowered = tx.train_step(loss_fn).lower(tx.create(jax.eval_shape(params)), batch())
        assert "all_gather" in lowered.as_text()
    assert bytes_here == zerojax.report(auto.create(params())).total
    assert [row.total for row in estimated.rows] == [row.total for row in zerojax.estimate(params(), tx=ADAM).rows]


@pytest.mark.slow
def test_a_module_of_flax():
    mesh = data_mesh()
    with jax.set_mesh(mesh):
        module = nnx.Linear(16, 24, rngs=nnx.Rngs(0))
        tx = sharded(mesh)
        loss = lambda module, batch: jnp.mean(module(batch["x"]) ** 2)
        expected = np.mean((batch()["x"] @ np.asarray(module.kernel[...])) ** 2)
        shard_module(module, tx)
        optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
        found, grads = value_and_grad(tx, loss)(module, batch())
        optimizer.update(module, grads)
        assert_on(mesh, (nnx.state(module), grads, found))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_loss_that_closes_over_an_explicit_array():
    mesh = data_mesh()
    tx = sharded(mesh)
    table = jax.device_put(np.arange(24.0, dtype=np.float32), NamedSharding(mesh, P()))
    loss = lambda p, b: jnp.mean((b["x"] @ p["w"]) * table)
    found, _ = tx.value_and_grad(loss)(tx.shard(params()), batch())
    np.testing.assert_allclose(found, loss(params(), batch()), rtol=1e-4)
    device = sharded(mesh, view="device")
    with pytest.raises((NotImplementedError, ValueError), match=r"Closing over inputs|should match the aval mesh"):
        device.value_and_grad(loss)(device.shard(params()), batch())


@pytest.mark.quick(1)
@pytest.mark.parametrize("train", [with_train_step, with_jitted_loop])
def test_under_a_mesh_that_a_library_has_set(train, expected):
    """With another axis than the optimizer's. Some libraries call `jax.set_mesh` when they are imported."""
    tx = sharded(explicit_mesh(AUTO))
    with jax.set_mesh(jax.make_mesh((8,), ("chains",), axis_types=(AUTO,))):
        found, losses, _ = train(tx, params())
    np.testing.assert_allclose(losses, expected[1], rtol=1e-5)
    assert_params(tx, found, expected[0])
