"""`zerojax.statistics` describes what NumPy describes of logical arrays, and sends nothing but sums of shards."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import zerojax
import zerojax.flax
from zerojax import Offload, collectives, zero_shard
from zerojax.layout.padded import is_padded

DRAW = np.random.default_rng(0)
PARAMS = {
    "layer": {"w": DRAW.normal(1, 2, (20, 257)).astype("float32"), "b": DRAW.normal(3, 1, 23).astype("float32")},
    "small": DRAW.normal(-5, 1, (3, 5)).astype("float32"),
    "odd": DRAW.normal(2, 1, (9, 51)).astype("float32"),
    "ids": np.arange(4),
}
FLOATS = {"layer/w": PARAMS["layer"]["w"], "layer/b": PARAMS["layer"]["b"]}
FLOATS |= {"small": PARAMS["small"], "odd": PARAMS["odd"]}
BINS = 7


def expected(*arrays):
    x = np.concatenate([np.ravel(x).astype("float64") for x in arrays])
    names = {"norm": np.linalg.norm(x), "rms": np.sqrt(np.mean(x**2)), "mean": x.mean(), "std": x.std()}
    return names | {"min": x.min(), "max": x.max()}


def assert_describes(found, arrays, names=()):
    wanted = expected(*arrays)
    assert found.keys() == wanted.keys() | set(names)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def norms_loss(params, batch):
    return batch.mean() * sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))


def transformation(**options):
    return zero_shard(optax.adam(1e-2), **{"stage": 3, "mesh": mesh_of(7), "persist_below": 10, **options})


@pytest.fixture(scope="module")
def state():
    """After one step, so that the moments are no zeros."""
    tx = transformation()
    loss = lambda params, batch: norms_loss(jax.tree.leaves(params)[1:], batch)
    return tx.train_step(loss)(tx.create(PARAMS), jnp.ones((7, 1)))[0]


def test_leaves_are_described_without_their_padding():
    stored = transformation().shard(PARAMS)
    assert sum(map(is_padded, jax.tree.leaves(stored, is_leaf=is_padded))) > 1
    stored = jax.tree.map(lambda x: x + 10, stored)  # the padding too, which then changes every sum
    found = zerojax.statistics(stored, bins=BINS)
    assert found.keys() == FLOATS.keys()
    for name, x in FLOATS.items():
        assert_describes(found[name], [x + 10], ["counts", "edges"])
        counts, edges = np.histogram(x + 10, BINS)
        np.testing.assert_allclose(found[name]["edges"], edges, rtol=1e-5)
        assert int(np.abs(np.asarray(found[name]["counts"], int) - counts).sum()) <= 2  # an edge is rounded otherwise
        assert int(found[name]["counts"].sum()) == x.size


def test_modules_are_described_as_one():
    stored = transformation().shard(PARAMS)
    whole, modules = (zerojax.statistics(stored, depth=depth, bins=BINS) for depth in (0, 1))
    assert whole.keys() == {"all"}
    assert modules.keys() == {"layer", "small", "odd"}
    assert_describes(whole["all"], FLOATS.values(), ["counts", "edges"])
    assert_describes(modules["layer"], PARAMS["layer"].values(), ["counts", "edges"])
    assert int(whole["all"]["counts"].sum()) == sum(x.size for x in FLOATS.values())


def test_only_sums_of_shards_are_sent(state):
    """Not even where a leaf is flat, or padded along a dim that a slice would divide otherwise."""
    program = jax.jit(lambda state: zerojax.statistics(state, bins=BINS))
    compiled = program.lower(state).compile()
    found = collectives(compiled)
    assert found
    assert {one.kind for one in found} == {"all-reduce"}
    assert max(array.bytes for one in found for array in one.arrays) <= 4 * BINS
    results = program(state)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(results))
    leaves = jax.tree.leaves_with_path(jax.device_get(zerojax.logical(state)))
    wanted = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}
    assert results.keys() == {name for name, x in wanted.items() if np.issubdtype(x.dtype, np.floating)}
    assert any("mu" in name for name in results)
    for name, one in results.items():
        assert_describes(one, [wanted[name]], ["counts", "edges"])


def test_ratios_of_updates_to_parameters():
    """A leaf without an update, because it is frozen, is no part of its module's ratio."""
    params = transformation().shard(PARAMS)
    updates = {"layer": {"w": jax.tree.map(lambda x: x / 8, params["layer"]["w"])}, "small": params["small"]}
    found = zerojax.statistics(updates, of=params, depth=1)
    assert {name: float(one["ratio"]) for name, one in found.items()} == pytest.approx({"layer": 1 / 8, "small": 1})
    with pytest.raises(ValueError, match=r"small of shape \[3, 5\] is .* there is no such leaf in of="):
        zerojax.statistics(updates, of={"layer": params["layer"]})
    with pytest.raises(ValueError, match=r"small of .* it has shape \[9, 51\] in of="):
        zerojax.statistics(updates, of=params | {"small": params["odd"]})


def test_states_of_flax():
    tx, model = transformation(), nnx.Linear(5, 23, rngs=nnx.Rngs(0))
    wanted = jax.device_get({"kernel": model.kernel[...], "bias": model.bias[...]})
    zerojax.flax.shard_module(model, tx)
    for tree in (model, nnx.state(model, nnx.Param)):
        found = zerojax.statistics(tree)
        assert found.keys() == wanted.keys()
        assert_describes(found["kernel"], [wanted["kernel"]])
    train = TrainState.create(apply_fn=None, params=tx.shard(PARAMS["layer"]), tx=tx)
    found = zerojax.statistics(train.replace(opt_state=jax.tree.map(lambda x: x + 1, train.opt_state)))
    assert_describes(found["params/w"], [PARAMS["layer"]["w"]])
    # Every element is 1 and so is the padding, which no norm counts.
    assert float(found["opt_state/0/mu/w"]["norm"]) == pytest.approx(np.sqrt(20 * 257))
    assert float(found["opt_state/0/nu/b"]["norm"]) == pytest.approx(np.sqrt(23))


def test_arrays_on_explicit_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    state = transformation(mesh=mesh).create({"odd": PARAMS["odd"]})
    for describe in (zerojax.statistics, jax.jit(zerojax.statistics, static_argnames="bins")):
        assert_describes(describe(state)["params/odd"], [PARAMS["odd"]])
        with jax.set_mesh(mesh):
            found = describe(state.params, bins=BINS)["odd"]
        assert_describes(found, [PARAMS["odd"]], ["counts", "edges"])
        assert int(found["counts"].sum()) == PARAMS["odd"].size


def test_what_is_not_finite_shows_and_has_no_bin():
    found = zerojax.statistics({"x": jnp.array([1.0, 2.0, jnp.nan, jnp.inf])}, bins=2)["x"]
    assert np.isnan(found["norm"])
    assert np.isnan(found["max"])
    np.testing.assert_array_equal(found["counts"], [1, 1])
    np.testing.assert_array_equal(found["edges"], [1, 1.5, 2])
    np.testing.assert_array_equal(zerojax.statistics({"x": jnp.ones(3)}, bins=2)["x"]["counts"], [0, 3])


@pytest.mark.parametrize("place", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_offloaded_leaves_are_loaded_or_refused_by_name(place, tmp_path):
    offload = Offload(optimizer="host") if place == "host" else Offload(optimizer="disk", path=tmp_path)
    state = transformation(offload=offload).create(PARAMS)
    found = zerojax.statistics(state)
    assert_describes(found["params/layer/w"], [PARAMS["layer"]["w"]])
    assert float(found["opt_state/0/mu/layer/w"]["norm"]) == 0
    with pytest.raises(TypeError, match=r"opt_state/0/mu/layer/\w is offloaded"):
        jax.jit(zerojax.statistics)(state)


def test_what_has_no_values_is_refused_by_name():
    with pytest.raises(TypeError, match="layer/b is a shape"):
        zerojax.statistics(jax.eval_shape(lambda: {"layer": {"b": jnp.ones(3)}}))
    with pytest.raises(ValueError, match="bins"):
        zerojax.statistics(PARAMS, bins=-1)


def test_a_step_tells_how_far_each_parameter_moved():
    """A step that is skipped moves none."""
    kept = optax.masked(optax.set_to_zero(), {"w": False, "b": True, "small": False})
    tx = optax.chain(optax.sgd(0.1), optax.add_noise(0.01, 0.5, 3), kept)
    tx = zero_shard(tx, stage=3, mesh=mesh_of(7), persist_below=10)
    start = {"w": PARAMS["odd"], "b": PARAMS["layer"]["b"], "small": PARAMS["small"]}
    step, state = tx.train_step(norms_loss, leaf_norms=True, skip_nonfinite=True), tx.create(start)
    for batch, is_skipped in ((jnp.ones((7, 1)), False), (jnp.full((7, 1), jnp.inf), True)):
        before = tx.unshard(state.params)
        state, metrics = step(state, batch)
        after = tx.unshard(state.params)
        assert metrics["skipped"] == is_skipped
        for name, old in before.items():
            np.testing.assert_allclose(metrics["param_norms"][name], np.linalg.norm(old), rtol=1e-5)
            moved = np.linalg.norm(np.asarray(after[name]) - old)
            np.testing.assert_allclose(metrics["update_norms"][name], moved, rtol=1e-4)
            assert (moved > 0) == (name != "b" and not is_skipped)
    found = collectives(step.lower(state, batch).compile())
    assert found
    assert max(array.elements for one in found for array in one.arrays) <= 16  # of this loss, a step sends only sums


def test_two_leaves_of_one_path_are_refused_and_not_joined():
    with pytest.raises(ValueError, match="Two leaves or modules have the path a/b"):
        zerojax.statistics({"a/b": jnp.ones(3), "a": {"b": jnp.zeros(4)}})


def test_modules_of_one_name_are_refused_and_not_joined():
    tree = {"a/b": {"c": jnp.ones(3)}, "a": {"b": {"d": jnp.zeros(4)}}}
    assert zerojax.statistics(tree, depth=1).keys() == {"a/b", "a"}
    with pytest.raises(ValueError, match="Two leaves or modules have the path a/b"):
        zerojax.statistics({"a/b": jnp.ones(3), "a": {"b": {"d": jnp.zeros(4)}}}, depth=2)
    with pytest.raises(ValueError, match="depth"):
        zerojax.statistics(tree, depth=-1)
