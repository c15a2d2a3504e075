"""The transformation as other code handles it: copied, rebuilt, given extra arguments and other forms."""

import copy
import functools
import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from conftest import mesh_of
from models import awkward_params

from zerojax import Tuning, zero_shard
from zerojax.comm.mesh import wait_if_simulated
from zerojax.layout.tree import layout_of
from zerojax.optim import logical_state, mismatch
from zerojax.optim.returned_state import as_planned
from zerojax.optim.update import check_params, check_state
from zerojax.optim.wrapped import FlatUpdate, UpdatedLeaves, with_extra_args
from zerojax.train import eval_step
from zerojax.train import step as train_step
from zerojax.train.tree_api import TreeForm

UNEVEN = {"w": jax.random.normal(jax.random.key(0), (13, 7)), "b": jnp.ones(5)}
X = jax.random.normal(jax.random.key(1), (56, 13))


def mean_square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"] ** 2)


def test_it_is_an_optax_transformation_that_can_be_rebuilt(mesh):
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    for other in (copy.copy(tx), copy.deepcopy(tx), jax.tree.map(lambda f: f, tx), tx._replace(init=tx.init)):
        assert other.config.stage == 3
        assert "stage=3" in repr(other)


def test_a_plan_survives_pickling_in_another_process_s_hash(mesh):
    plan = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh).create(jax.eval_shape(awkward_params)).plan
    hash(plan)
    copied = copy.copy(plan)
    object.__setattr__(copied, "_hash", 0)  # as if another process had computed it
    state = copied.__getstate__()
    assert "_hash" not in state
    assert type(plan)(**state) == plan
    assert pickle.loads(pickle.dumps(plan.grads)) == plan.grads


def test_a_state_that_fits_is_compared_without_the_module_of_errors(mesh, monkeypatch):
    tx = zero_shard(optax.adam(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=10))
    state = tx.create(UNEVEN)
    called = []
    monkeypatch.setattr(mismatch, "check_leaves_of_state", lambda *args, **options: called.append("state"))
    monkeypatch.setattr(mismatch, "check_plan", lambda *args: called.append("plan"))
    check_state(state.plan, state.opt_state)
    check_params(tx.config, state.plan, state.params)
    assert not called
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float16), tree)
    check_state(state.plan, narrow(state.opt_state))
    check_params(tx.config, state.plan, narrow(state.params))
    assert called == ["state", "plan"]


def test_none_is_the_state_of_a_transformation_without_a_state(mesh):
    plans = [zero_shard(tx, stage=1, mesh=mesh).create(UNEVEN).plan for tx in (optax.scale(0.1), optax.trace(0.9))]
    assert [as_planned(plan, None) for plan in plans] == [optax.scale(0.1).init({}), None]


def test_owners_are_for_leaves_that_are_divided():
    cases = {("sharded", 8, "auto"): True, ("sharded", 8, "owner"): True, ("sharded", 8, "sharded"): False}
    for (kind, shards, updates), expected in {
        **cases,
        ("sharded", 1, "auto"): False,
        ("flat", 8, "auto"): False,
    }.items():
        leaf, config = SimpleNamespace(kind=kind, shards=shards), SimpleNamespace(matrix_updates=updates)
        assert FlatUpdate(config, None, UpdatedLeaves((leaf,), (), ()), None).may_have_owners == expected


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("count", [2, 7])
def test_parameters_in_another_storage_are_read_by_their_logical_shape(stage, count, mesh):
    stored = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=10)).shard(UNEVEN)
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh_of(count), tuning=Tuning(persist_below=10))
    moved = jax.device_get(stored)
    loss, _ = tx.value_and_grad(mean_square)(moved, np.asarray(X))
    np.testing.assert_allclose(loss, mean_square(UNEVEN, X), rtol=1e-5)
    back = tx.unshard(tx.create(moved).params)
    jax.tree.map(np.testing.assert_array_equal, back, UNEVEN)


def test_a_weight_beyond_float16_leaves_its_gradients_alone(mesh):
    tx = zero_shard(optax.sgd(0.1), stage=2, mesh=mesh)
    rows = jnp.ones((80_000, 1), jnp.float16)
    loss = lambda p, b: (jnp.sum((b * p["w"]).astype(jnp.float32)), jnp.float32(b.shape[0]))
    _, grads = tx.value_and_grad(loss, weighted=True)({"w": jnp.ones(1, jnp.float16)}, rows)
    np.testing.assert_allclose(np.float32(grads["w"]), 1.0, rtol=5e-3)  # 1/80,000 is subnormal in float16


@pytest.mark.parametrize(("platform", "count", "waits"), [("cpu", 8, 1), ("cpu", 1, 0), ("cuda", 8, 0)])
def test_only_simulated_devices_finish_before_the_next_program(platform, count, waits, monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    devices = np.array([SimpleNamespace(platform=platform)] * count)
    wait_if_simulated(SimpleNamespace(size=count, devices=devices), "state")
    assert waited == ["state"] * waits


def test_what_reads_a_state_waits_for_the_step_before_on_simulated_devices_alone(mesh, monkeypatch):
    """Two programs in flight share one pool of threads there, and XLA may abort."""
    waited = []
    for module in (train_step, eval_step, logical_state):
        monkeypatch.setattr(module, "wait_if_simulated", lambda mesh, arrays: waited.append(jax.tree.leaves(arrays)))
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: pytest.fail("waits"))
    tx = zero_shard(optax.trace(0.9), stage=3, mesh=mesh, tuning=Tuning(persist_below=10))
    state, step = tx.create(UNEVEN), tx.train_step(mean_square)
    states = [state, step(state, X)[0]]
    step(states[1], X)
    assert [[*map(id, found)] for found in waited] == [[*map(id, jax.tree.leaves(x))] for x in states]
    state = tx.create(UNEVEN)
    waited.clear()
    tx.eval_step(mean_square)(state.params, X)
    tx.as_params(state.opt_state.trace, state.params)
    assert len(waited) == 2
    assert all(any(x is y for y in given) for given in waited for x in jax.tree.leaves(state.params))


def test_a_batch_committed_to_one_device_is_spread(mesh):
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=10))
    batch = jax.device_put(X, jax.devices()[3])
    loss, _ = tx.value_and_grad(mean_square)(tx.shard(UNEVEN), batch)
    np.testing.assert_allclose(loss, mean_square(UNEVEN, X), rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("make", [lambda: optax.adam(0.1), lambda: optax.sgd(0.1)])
def test_gradients_wider_than_their_parameters_stay_so(stage, make):
    """The difference that float32 gradients make to narrow parameters would be lost in bfloat16."""
    params = {"w": jnp.ones((15, 8), jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}
    grads = jax.tree.map(lambda x: jnp.linspace(1, 1.001, x.size).reshape(x.shape), params)
    tx = zero_shard(make(), stage=stage, mesh=mesh_of(8), tuning=Tuning(persist_below=10))
    sharded = tx.shard(params)
    state, plain = tx.init(sharded), make().init(params)
    for _ in range(2):  # by the second, Adam's moments are wide
        found, state = tx.update(tx.shard(grads), state, sharded)
        expected, plain = make().update(grads, plain, params)
    found = tx.unshard(found)
    rounding = 1e-6  # of float32; bfloat16's would be 4e-3
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rounding), found, expected)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)


def test_a_transformation_with_other_arguments_is_called_again_without_the_loss():
    seen = []

    def update(grads, state, params=None, *, other=None):
        seen.append(other)

    both = with_extra_args(optax.GradientTransformationExtraArgs(lambda params: (), update))
    both.update({}, (), value=3, other=4)
    assert seen == [4]
    with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
        both.update({}, (), value=3, third=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'third'"):
        both.update({}, (), third=5)


def test_a_type_error_of_the_transformation_is_raised_by_the_first_call():
    calls = []

    def update(grads, state, params=None, **extra):
        calls.append(extra)
        raise TypeError("mine")

    with pytest.raises(TypeError) as found:
        with_extra_args(optax.GradientTransformationExtraArgs(lambda params: (), update)).update({}, (), value=3)
    assert str(found.value) == "mine"
    assert calls == [{"value": 3}]


@pytest.mark.parametrize(("stage", "sharded"), [(0, set()), (1, set()), (2, {"even"}), (3, {"even", "odd"})])
def test_gradients_are_sharded_if_their_form_allows_it(stage, sharded):
    """At stage 2 the parameter of a padded gradient is a plain array, so the gradient is one, too."""
    params = {"even": jnp.ones((8, 3)), "odd": jnp.ones((7, 5)), "small": jnp.ones(3)}
    tx = zero_shard(optax.sgd(1.0), stage=stage, mesh=mesh_of(4), tuning=Tuning(persist_below=10))
    stored = tx.shard(params)
    loss = lambda params, rows: rows.mean() * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    _, grads = tx.value_and_grad(loss)(stored, jnp.ones(4))
    is_sharded = lambda x: not jax.tree.leaves(x)[0].sharding.is_fully_replicated
    assert {name for name, x in grads.items() if is_sharded(x)} == sharded
    specs = {name: sharding.spec for name, sharding in tx.shardings(params).grads.items()}
    assert {name for name, spec in specs.items() if any(spec)} == sharded


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_gradients_are_sharded_like_the_optimizer_state_over_all_axes(sizes):
    """Each host stores all parameters, but only its part of the gradients and of the optimizer state."""
    tuning = Tuning(params_axis="gpu", persist_below=1)
    tx = zero_shard(optax.sgd(1.0), stage=3, mesh=mesh_of(*sizes), axis=("host", "gpu"), tuning=tuning)
    layout = layout_of(tx.config, {"w": jnp.ones((16, 3))})
    (grad,) = TreeForm(tx.config, layout, (None,)).grads
    assert (grad.axes, grad.shards, grad.dim) == (layout.grads[0].axes, 8, 0)
