"""Where leaves live: pure arithmetic, tested for more devices than any machine has."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of, shape
from flax import linen as nn
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from models import awkward_params

from zerojax import Padded, Tuning, report, zero_shard
from zerojax.config import Config, DataMesh, LayoutPolicy
from zerojax.layout.annotations import axes_of_last_plan, is_stored_as
from zerojax.layout.leaf import shard_extent
from zerojax.layout.tree import best_dim, lay_out

SHAPES = st.lists(st.integers(0, 5000), max_size=4).map(tuple)


def rules(stage=3, shards=8, persist_below=100):
    return LayoutPolicy(stage, DataMesh.for_stage({"data": shards}, ("data",), stage), persist_below)


@given(st.integers(1, 10**9), st.integers(1, 4096))
def test_extents_cover_the_dim_and_waste_less_than_one_shard(size, shards):
    extent, pad = shard_extent(size, shards)
    assert extent * shards == size + pad
    assert 0 <= pad < shards


@given(SHAPES, st.integers(1, 1024), st.integers(0, 3))
@example((3,), 1, 3)
def test_every_leaf_is_whole_or_shared_evenly(dims, shards, stage):
    layout = lay_out(shape(*dims), rules(stage, shards))
    for leaf in (*layout.params, *layout.grads):
        assert math.prod(leaf.storage_shape) >= math.prod(dims)
        if leaf.kind == "replicated":
            assert leaf.local_shape == leaf.storage_shape == dims
            assert leaf.reason, "a leaf is not divided and nothing says why"
        else:
            assert shards > 1 or leaf.kind == "sharded"
            assert math.prod(leaf.local_shape) * shards == math.prod(leaf.storage_shape)
    assert layout.params[0].kind == ("sharded" if stage == 3 and layout.grads[0].kind == "sharded" else "replicated")


@pytest.mark.parametrize(
    ("dims", "shards", "dim"),
    [
        ((2048, 8192), 8, 1),  # the longest dim that divides
        ((8192, 2048), 8, 0),
        ((50257, 768), 8, 1),  # the longest does not divide, another does
        ((4096, 4096), 12, 0),  # none divides: the one that pads least, then the first
        ((5, 4096, 7), 6, 1),
        ((24, 2048), 1000, 1),
    ],
)
def test_the_dim_that_is_cut(dims, shards, dim):
    assert best_dim(dims, list(range(len(dims))), shards) == dim


@pytest.mark.parametrize("bad", [(0, 4), (4, 0), (-1, 2)])
def test_an_extent_needs_elements_and_shards(bad):
    with pytest.raises(ValueError, match="at least 1"):
        shard_extent(*bad)


@pytest.mark.parametrize(("stage", "count"), [(0, 1), (1, 2), (2, 3), (3, 8)])
def test_every_device_holds_the_same_bytes(stage, count):
    tx = zero_shard(optax.adamw(1e-3), stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=50))
    found = report(tx.create(awkward_params()))
    assert list(found.per_device.values()) == [found.total] * count


def test_state_keeps_the_transformations_own_structure(mesh):
    inner = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    tx = zero_shard(inner, stage=3, mesh=mesh, tuning=Tuning(persist_below=50))
    state = tx.init(awkward_params())
    trained = {**awkward_params(), "count": optax.MaskedNode()}  # integers are not trained
    assert jax.tree.structure(state) == jax.tree.structure(inner.init(trained))
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 1e-3)
    assert optax.tree_utils.tree_get(state, "mu")["tied"].sharding.spec == PartitionSpec("data")


def test_state_of_another_shape_than_its_parameter_is_divided_too(mesh):
    tx = zero_shard(
        optax.adafactor(1e-3, min_dim_size_to_factor=8), stage=2, mesh=mesh, tuning=Tuning(persist_below=16)
    )
    state = tx.init({"w": jnp.ones((64, 256))})
    rows = {x.shape: x.sharding.spec for x in jax.tree.leaves(state) if x.ndim and x.size > 1}
    assert rows == {(64,): PartitionSpec("data"), (256,): PartitionSpec("data")}


def test_shapes_give_the_layout_of_live_arrays(mesh):
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, tuning=Tuning(persist_below=50))
    shardings, shapes = tx.shardings(jax.eval_shape(awkward_params)), tx.create(jax.eval_shape(awkward_params))
    live = tx.create(awkward_params())
    assert jax.tree.structure(shapes) == jax.tree.structure(live)
    assert jax.tree.map(lambda x: (x.shape, x.sharding), shapes) == jax.tree.map(lambda x: (x.shape, x.sharding), live)
    stored = jax.tree.map(
        lambda x: x.storage if isinstance(x, Padded) else x, live.params, is_leaf=lambda x: isinstance(x, Padded)
    )
    assert jax.tree.map(lambda x: x.sharding, stored) == shardings.params
    assert jax.tree.map(lambda x: x.sharding, live.opt_state) == shardings.opt_state
    assert shardings.grads["layer"]["w"].spec == PartitionSpec(None, "data")


@pytest.mark.parametrize("stage", [1, 3])
def test_another_axis_keeps_its_dim(stage):
    mesh = mesh_of(4, 2, names=("data", "model"))
    params = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 16))}
    specs = {"a": PartitionSpec(None, "model"), "b": PartitionSpec("model")}
    laid = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    tx = zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh, tuning=Tuning(persist_below=20))
    state, step = tx.create(laid), tx.train_step(lambda p, x: jnp.mean((x @ p["a"] @ p["b"]) ** 2))
    for _ in range(2):
        state, _ = step(state, jnp.ones((8, 16)))
        both = {"a": PartitionSpec("data", "model"), "b": PartitionSpec("model", "data")}
        assert jax.tree.map(lambda x: x.sharding.spec, state.opt_state[0].mu) == both
        expected = both if stage == 3 else {"a": PartitionSpec(None, "model"), "b": PartitionSpec("model")}
        assert jax.tree.map(lambda x: x.sharding.spec, state.params) == expected
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    plan = state.plan.along_others(mesh.shape)
    assert held == sum(leaf.local_bytes for leaf in (*plan.layout.params, *plan.state))


RULES = (("mlp", "model"), ("embed", "data"))


@pytest.mark.parametrize(
    ("names", "own", "context"),
    [((None, "model"), (), ()), (("embed", "mlp"), RULES, ()), (("embed", "mlp"), (), RULES)],
    ids=["axes", "rules of the box", "rules of the context"],
)
def test_metadata_of_linen_and_nnx_names_the_other_axis(names, own, context):
    """Of logical names, a dim over a data axis is left to the layout."""
    mesh = mesh_of(4, 2, names=("data", "model"))
    init, expected = nn.initializers.lecun_normal(), PartitionSpec("data", "model")
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=20))
    logical = functools.partial(nn.with_logical_partitioning, rules=own or None)
    dense = nn.Dense(64, kernel_init=(logical if own or context else nn.with_partitioning)(init, names))
    model = lambda: dense.init(jax.random.key(0), jnp.ones((1, 16)))["params"]
    with nn.logical_axis_rules(context):
        assert tx.init_params(model)["kernel"].value.sharding.spec == expected
    annotated = nnx.with_partitioning(init, names, **({"sharding_rules": own} if own else {}))
    with nnx.logical_axis_rules(context), jax.set_mesh(mesh):
        layer = nnx.Linear(16, 64, kernel_init=annotated, rngs=nnx.Rngs(0))
        shardings = tx.shardings(jax.eval_shape(lambda: nnx.state(layer, nnx.Param))).params
    assert jax.tree.leaves(shardings["kernel"])[0].spec == expected


@pytest.mark.parametrize(
    ("stage", "spec", "of_param", "words"),
    [
        (0, ("data", None), (), "'data', an axis of the mesh. Use stage=1 or higher"),  # stage 0 replicates the state
        (3, (None, "model"), (), "'model', an axis of the mesh. Use stage=1 or higher"),
        (3, ("embed", None), (), "'embed', which is no axis of the mesh. Name an axis by nnx.logical_axis_rules"),
        (1, ("data", None), (), ""),
        (1, ("data", "model"), (None, "model"), ""),
    ],
)
def test_an_annotation_of_the_optimizer_state_is_kept_or_refused(stage, spec, of_param, words):
    mesh = mesh_of(4, 2, names=("data", "model"))
    tx = zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh, axis="data", tuning=Tuning(persist_below=100))
    with jax.set_mesh(mesh):
        kernel = nnx.Param(jnp.ones((16, 32)), optimizer_sharding=spec, out_sharding=of_param or None)
    if words:
        with pytest.raises(ValueError, match=rf"\['kernel'\] has optimizer_sharding=.* over {words}.*or drop the"):
            tx.shardings({"kernel": kernel})
        return
    (moment,) = jax.tree.leaves(optax.tree_utils.tree_get(tx.shardings({"kernel": kernel}).opt_state, "mu"))
    assert math.prod(moment.shard_shape((16, 32))) == 16 * 32 // (8 if of_param else 4)


def test_experts_divide_their_dim_evenly():
    data = DataMesh.for_stage({"data": 2, "expert": 4}, ("data", "expert"), 3, expert_axes=("expert",))
    placed = lambda count: lay_out({"up": shape(5, count, 8)}, LayoutPolicy(3, data, 1), others=[(None, "expert")])
    assert placed(8).params[0].spec == PartitionSpec(None, "expert", "data")
    with pytest.raises(ValueError, match=r"\['up'\] has 5 experts on dim 1, which axis 'expert' with 4.*Use 8 experts"):
        placed(5)


def test_a_traced_array_has_the_axes_of_the_last_plan_that_fits_it():
    """The plan must have the array's shape and, if it shows one, its sharding."""
    mesh = mesh_of(4, 2, names=("data", "model"))
    config, found = Config(optax.sgd(1.0), 3, mesh, axis=("data",)), []
    for dims, others in {(16, 4): (None, "model"), (4, 16): ("model",), (4, 8): ()}.items():
        config.plans[lay_out(shape(*dims), config.layout_policy, others=[others])] = None
    jax.eval_shape(lambda x: found.extend(axes_of_last_plan(config, x)), shape(4, 16))
    assert found == [("model",)]
    assert axes_of_last_plan(config, shape(4, 16)) == (), "an array shows its own sharding"
    leaf = lay_out(shape(7, 4), rules(persist_below=0), others=[()]).params[0]
    put = lambda *spec: jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh_of(8), PartitionSpec(*spec)))
    for x, fits in ((put("data"), True), (put("data", None), True), (put(None), False), (jnp.ones((8, 4)), False)):
        assert is_stored_as(Padded(x, (7, 4), 0), leaf) == fits
        assert not is_stored_as(x, leaf)
    assert is_stored_as(np.ones((7, 4)), leaf)
