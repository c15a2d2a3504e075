"""Checkpoints: a run goes on bit for bit, at any stage, number of devices and precision."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import assert_same, logical_leaves, saved, stored
from conftest import mesh_of, quick_or_slow
from flat_options import tuned
from models import awkward_batches, awkward_loss, awkward_params

from zerojax import Offload, Precision, zero_shard
from zerojax.checkpoint import Checkpointer, saving
from zerojax.checkpoint.state_leaves import state_leaves

PRECISIONS = {"none": None, "bf16": Precision.bf16(), "fp16": Precision.fp16()}
SHAPES = jax.eval_shape(awkward_params)


def transformation(stage, count=8, precision=None, *, tx=None, persist_below=64, **options):
    """With `persist_below=64`, the awkward model has leaves that are sharded, padded, flat and replicated."""
    inner = optax.adamw(1e-2) if tx is None else tx
    mesh = options.pop("mesh", None) or mesh_of(count)
    return zero_shard(
        inner, stage=stage, mesh=mesh, precision=precision, **tuned(persist_below=persist_below, **options)
    )


def trained(tx, steps=2, params=None, loss=awkward_loss):
    state, step = tx.create(awkward_params() if params is None else params), tx.train_step(loss)
    for batch in awkward_batches(steps):
        state, metrics = step(state, batch)
        float(metrics["loss"])
    return state, step


def assert_padding_is_zero(state):
    for name, slot in state_leaves(state).items():
        if slot.leaf.padding:
            assert np.count_nonzero(np.asarray(stored(slot))) == np.count_nonzero(logical_leaves(state)[name]), name


@pytest.fixture(scope="module")
def a_run(request, tmp_path_factory):
    """A run at stage 3 on 8 devices, saved: the folder, its logical leaves, its precision."""
    precision, directory = PRECISIONS[request.param], tmp_path_factory.mktemp(request.param)
    state, _ = trained(transformation(3, precision=precision))
    with pytest.MonkeyPatch.context() as patched, Checkpointer(directory) as checkpoints:
        if request.param in ("none", "fp16"):  # no leaf is packed; in the others all are
            patched.setattr(saving, "SMALL_BYTES", 0)
        checkpoints.save(state, {"batch": 2})
    return directory, logical_leaves(state), precision


LAYOUTS = [(0, 8, 64), (1, 8, 64), (2, 8, 64), (3, 8, 64), (3, 4, 64), (1, 2, 10**6), (2, 3, 0), (3, 1, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("a_run", PRECISIONS, indirect=True)
def test_every_layout_is_restored_and_saved_and_restored_into_another(a_run, tmp_path):
    directory, expected, precision = a_run
    likes = [transformation(stage, count, precision, persist_below=n).create(SHAPES) for stage, count, n in LAYOUTS]
    for i, like in enumerate(likes):
        state = Checkpointer(directory, read_only=True).restore(like).state
        back = saved(tmp_path / str(i), state).restore(likes[i - 1]).state
        for found, wanted in ((state, like), (back, likes[i - 1])):
            assert_same(found, expected)
            assert_padding_is_zero(found)
            assert jax.tree.map(lambda x: x.dtype, found.params) == jax.tree.map(lambda x: x.dtype, wanted.params)


def test_restores_onto_a_mesh_with_another_axis(tmp_path):
    params = {"w": jnp.arange(16.0 * 24).reshape(16, 24), "b": jnp.ones(5)}
    state = transformation(3).create(params)
    mesh = mesh_of(4, 2, names=("data", "model"))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    divided = {"w": jax.device_put(params["w"], where), "b": params["b"]}
    like = transformation(3, mesh=mesh).create(divided)
    found = saved(tmp_path, state).restore(like).state
    assert_same(found, state)
    assert found.params["w"].sharding == like.params["w"].sharding


# --- restart -----------------------------------------------------------------------------------------------------


def dropout_params():
    keys = jax.random.split(jax.random.key(5), 2)
    return {"w": jax.random.normal(keys[0], (16, 24)) / 4, "v": jax.random.normal(keys[1], (24, 1)), "b": jnp.zeros(3)}


def dropout_loss(params, mutable, batch, key):
    h = jnp.tanh(batch["x"] @ params["w"])
    h = h * jax.random.bernoulli(key, 0.8, h.shape)
    return jnp.mean((h @ params["v"] + params["b"].sum() - batch["y"][:, :1]) ** 2), {"mean": jnp.float32(h.mean())}


class Batches:
    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        keys = jax.random.split(jax.random.fold_in(jax.random.key(7), self.position))
        return {"x": jax.random.normal(keys[0], (24, 16)), "y": jax.random.normal(keys[1], (24, 8))}

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def run(tx, step, directory, until):
    """Train up to a step, from the newest checkpoint if there is one."""
    state, batches, key, losses = tx.create(dropout_params(), mutable={"mean": 0.0}), Batches(), jax.random.key(9), []
    with Checkpointer(directory, every=10) as checkpoints:
        if checkpoints.latest() is not None:
            state, data, *_ = checkpoints.restore(state, data={"batches": batches, "key": key, "losses": losses})
            key, losses = data["key"], data["losses"]
        while int(state.step) < until:
            key, sub = jax.random.split(key)
            state, metrics = step(state, next(batches), sub)
            losses.append(float(metrics["loss"]))
            checkpoints.save(state, {"batches": batches, "key": key, "losses": losses})
    return state, losses


@pytest.mark.parametrize(
    ("stage", "count", "precision"), [(3, 8, None), pytest.param(2, 3, Precision.fp16(), marks=pytest.mark.slow)]
)
def test_a_restart_changes_no_bit(stage, count, precision, tmp_path):
    tx = transformation(stage, count, precision)
    step = tx.train_step(dropout_loss, mutable=True)
    straight, losses = run(tx, step, tmp_path / "straight", 20)
    run(tx, step, tmp_path / "restarted", 10)
    restarted, losses_restarted = run(tx, step, tmp_path / "restarted", 20)
    assert len(losses) >= 20  # float16 skips some steps at first
    assert losses_restarted == losses
    assert_same(restarted, straight)


def test_a_restored_state_needs_no_new_program(tmp_path):
    tx = transformation(2, precision=Precision.bf16())
    step, batch = tx.train_step(dropout_loss, mutable=True), next(Batches())
    state = tx.create(dropout_params(), mutable={"mean": 0.0})
    for key in range(2):
        state, _ = step(state, batch, jax.random.key(key))
    restored = saved(tmp_path, state).restore(state).state
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert np.array_equal(np.asarray(x), np.asarray(y))  # storage, padding and narrow copies too
    before = step._executor.whole._cache_size()
    jax.block_until_ready(step(restored, batch, jax.random.key(2)))
    assert step._executor.whole._cache_size() == before


# --- what is saved -----------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    tx = transformation(3)
    state, step = trained(tx)
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        expected = {}
        for i in range(3):
            expected[i] = logical_leaves(jax.tree.map(jnp.copy, state))  # a look at the state itself would hold it
            assert checkpoints.save(state, step=i)
            for batch in awkward_batches(3):  # the steps donate what was just saved, while it is written
                state, _ = step(state, batch)
            jax.block_until_ready(state)
        for i, leaves in expected.items():
            assert_same(checkpoints.restore(tx.create(SHAPES), step=i).state, leaves)


def test_keep_every_and_force(tmp_path):
    state = transformation(1).create({"w": jnp.ones(4)})
    with Checkpointer(tmp_path, keep=2, every=3) as checkpoints:
        assert checkpoints.latest() is None
        begun = [checkpoints.save(state, step=i) for i in range(1, 11)]
        assert begun == [i % 3 == 0 for i in range(1, 11)]
        assert checkpoints.save(state, step=10, force=True)
        assert not checkpoints.save(state, step=10, force=True)  # it is saved already
        checkpoints.wait()
        assert checkpoints.steps() == [9, 10]
        assert checkpoints.latest() == 10
        assert checkpoints.verify() == [9, 10]


def test_keys_mutable_state_and_frozen_leaves_come_back(tmp_path):
    params = {**awkward_params(), "key": jax.random.key(3, impl="rbg")}
    frozen = lambda path, _: path not in ("frozen", "count", "empty", "key")
    tx = transformation(3, trainable=frozen)
    mutable = {"keys": jax.random.split(jax.random.key(4), 3), "mean": jnp.arange(5, dtype=jnp.bfloat16)}
    state = tx.create(params, mutable=mutable)
    checkpoints = saved(tmp_path, state)
    for other in (state, tx.create(jax.eval_shape(lambda: params), mutable=jax.eval_shape(lambda: mutable))):
        found = checkpoints.restore(other).state
        assert_same(found, state)
        assert found.mutable["keys"].dtype == mutable["keys"].dtype


def test_a_frozen_leaf_is_rounded_where_the_stage_keeps_it_narrow(tmp_path):
    """As `create` does; the other way is exact. Anything else that loses digits is refused."""
    options = {"precision": Precision.bf16(), "trainable": lambda path, _: path != "frozen"}
    params = {"w": jnp.linspace(0, 1, 100), "frozen": jnp.linspace(1, 2, 300)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(transformation(3, **options).create(params))
        like = transformation(1, **options).create(params)
        restored = checkpoints.restore(like)
        assert restored.cast == ("params['frozen']",)
        assert_same(restored.state, like)
        checkpoints.save(restored.state, step=1)
        back = checkpoints.restore(transformation(3, **options).create(params))
        assert not back.cast
        expected = params["frozen"].astype(jnp.bfloat16).astype(jnp.float32)
        assert np.array_equal(logical_leaves(back.state)["params['frozen']"], expected)


def test_data_of_every_kind_comes_back(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Node:
        a: object
        b: object

    data = {
        "plain": [1, 2.5, "text", None, True, (b"bytes", {3: "three"})],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "wide": jnp.ones(2, jnp.bfloat16),
        "node": Node(7, {"inner": np.float32(1.5)}),
    }
    state = transformation(1).create({"w": jnp.ones(4)})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, data)
        found = checkpoints.restore(state, data=data).data
        assert isinstance(found["node"], Node)
        assert found["node"].b["inner"] == 1.5
        assert found["plain"] == data["plain"]
        assert found["array"].dtype == np.int16
        assert (found["array"] == data["array"]).all()
        assert found["wide"].dtype == jnp.bfloat16
        assert checkpoints.restore(state).data["node"][0] == 7  # without a template, its children


# --- mismatches --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A small checkpoint of adam, and its parameters."""
    params = {"w": jnp.arange(12.0).reshape(4, 3), "b": jnp.ones(3)}
    directory = tmp_path_factory.mktemp("plain")
    return saved(directory, transformation(2, tx=optax.adam(1e-2)).create(params)), params


@pytest.mark.parametrize(
    ("change", "tx", "named"),
    [
        ({"extra": jnp.ones(2)}, optax.adam(1e-2), r"params\['extra'\]: nothing is there, float32\[2\] is wanted"),
        ({"b": None}, optax.adam(1e-2), r"params\['b'\]: float32\[3\] is there, nothing is wanted"),
        ({"w": jnp.ones((3, 4))}, optax.adam(1e-2), r"params\['w'\]: float32\[4, 3\] is there, float32\[3, 4\] is w"),
        ({"w": jnp.ones((4, 3), jnp.bfloat16)}, optax.adam(1e-2), r"\['w'\]: float32\[4, 3\] is there, bfloat16\[4"),
        ({}, optax.sgd(1e-2, momentum=0.9), r"opt_state\[0\]\.trace\['b'\]: nothing is there, float32\[3\] is"),
    ],
    ids=["more", "fewer", "shape", "type", "optimizer"],
)
def test_another_tree_shape_type_or_optimizer_is_named(plain, change, tx, named):
    checkpoints, params = plain
    other = {k: v for k, v in (params | change).items() if v is not None}
    like = transformation(3, tx=tx).create(other)
    with pytest.raises(ValueError, match=named):
        checkpoints.restore(like)
    with pytest.warns(UserWarning, match=r"step 0 and the optimizer's counts among them.*partial=\"params\"") as said:
        found = checkpoints.restore(like, partial=True)
    assert said[0].filename == __file__
    assert found.missing or found.unused
    old, new, kept = (logical_leaves(x) for x in (transformation(3, tx=tx).create(other), found.state, like))
    for name in found.missing:
        assert np.array_equal(new[name], kept[name])
    assert all(name in found.missing or name in new for name in old)
    if "w" not in change:
        assert np.array_equal(new["params['w']"], params["w"])


OFFLOADS = [None, Offload(optimizer="host"), "disk"]


@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    quick_or_slow(
        [(stage, *rest) for stage in range(4) for rest in itertools.product([None, Precision.bf16()], OFFLOADS)],
        [(0, Precision.bf16(), None), (3, None, OFFLOADS[1])],
    ),
)
def test_weights_of_another_run_begin_at_step_0(stage, precision, offload, tmp_path):
    if offload and not stage:
        pytest.skip("stage 0 shards nothing, so nothing is offloaded")
    weights = {"w": jnp.linspace(0.1, 1, 12).reshape(4, 3), "head": jnp.ones(3)}
    loss = lambda p, mutable, x: (jnp.mean((x @ p["w"] + p["head"]) ** 2), {"mean": mutable["mean"] + 1})
    with Checkpointer(tmp_path / "runs") as checkpoints:
        before = transformation(3, tx=optax.adam(1e-2))
        state = before.create(weights, mutable={"mean": jnp.zeros(())})
        state, _ = before.train_step(loss, mutable=True)(state, np.ones((8, 4), np.float32))
        checkpoints.save(state)
        offload = Offload(optimizer="disk", path=tmp_path / "files") if offload == "disk" else offload
        options = {"precision": precision, "offload": offload, "persist_below": 1}
        tx = transformation(stage, tx=optax.adamw(optax.linear_schedule(1e-2, 0, 9)), **options)
        like = tx.create({"w": weights["w"], "other": jnp.ones(2)}, mutable={"mean": jnp.zeros(())})
        have, was = logical_leaves(like), logical_leaves(state)
        found = checkpoints.restore(like, partial="params")
        names = logical_leaves(found.state)
    assert {name for name in names if name not in found.missing} == {"params['w']", "mutable['mean']"}
    assert int(found.state.step) == 0 < found.step
    for name in names:
        np.testing.assert_array_equal(names[name], (have if name in found.missing else was)[name])
    step = tx.train_step(lambda p, m, x: (jnp.mean((x @ p["w"]) ** 2), m), mutable=True)
    assert int(step(found.state, np.ones((8, 4), np.float32))[0].step) == 1


def test_a_wider_type_takes_a_narrower_one(tmp_path):
    params = {"w": jnp.linspace(0, 1, 7, dtype=jnp.bfloat16)}
    checkpoints = saved(tmp_path, transformation(3, tx=optax.sgd(1.0)).create(params))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    found = checkpoints.restore(transformation(1, tx=optax.sgd(1.0)).create(wide)).state
    assert np.array_equal(np.asarray(found.params["w"]), wide["w"])


def test_stock_orbax_reads_the_arrays(tmp_path):
    import orbax.checkpoint as ocp

    """All but those that are packed."""
    state = transformation(0).create({"w": jnp.arange(2.0**16).reshape(256, 256), "b": jnp.ones(3)})
    saved(tmp_path, state)
    names = ("params.w", "opt_state.0.mu.w")
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    found = ocp.PyTreeCheckpointer().restore(
        tmp_path / "step_00000000" / "arrays",
        args=ocp.args.PyTreeRestore(item=dict.fromkeys(names, 0), restore_args=how, partial_restore=True),
    )
    assert np.array_equal(np.asarray(found["params.w"]), np.arange(2.0**16).reshape(256, 256))
