"""The loss scale moves by its rules, and a step that overflows anywhere leaves everything as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from models import awkward_batches, awkward_loss, awkward_params, floats_only

from zerojax import DynamicScale, Precision, Tuning, zero_shard
from zerojax.train.loss import init_scaling
from zerojax.train.loss_scaling import update_scaling


def scales(rule, overflows):
    """The scale each step uses, for a pattern of clean steps (.) and overflows (x)."""
    precision = Precision.fp16(loss_scale=rule)
    scaling, used = init_scaling(precision, 1), []
    for step in overflows:
        used.append(float(scaling.scale))
        scaling = update_scaling(scaling, precision, finite=jnp.array([step == "."]), weights_valid=jnp.array(True))
    return [*used, float(scaling.scale)]


@pytest.mark.parametrize(
    ("rule", "steps", "expected"),
    [
        ({}, "..........", [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192]),
        ({}, "x.x..", [256, 128, 128, 64, 64, 128]),
        ({}, "xxxxxxxxxx", [256, 128, 64, 32, 16, 8, 4, 4, 4, 4, 4]),  # down to the floor, and no further
        ({"hysteresis": 2}, "xxx", [256, 256, 128, 64]),
        ({"hysteresis": 2}, "x.x", [256, 256, 256, 128]),  # clean steps alone do not forgive
        ({"hysteresis": 2}, "x..xx", [256, 256, 256, 512, 512, 256]),  # but a raised scale does
        ({"factor": 4.0}, "..x", [256, 256, 1024, 256]),
        ({"initial": 2.0**127}, "..", [2.0**127] * 3),  # never infinite
    ],
)
def test_the_scale_follows_its_rule(rule, steps, expected):
    assert scales(DynamicScale(**{"initial": 256.0, "growth_interval": 2, "floor": 4.0, **rule}), steps) == expected


def test_the_default_starts_at_two_to_the_sixteenth():
    assert Precision.fp16().loss_scale == DynamicScale()
    assert scales("dynamic", ".x") == [2.0**16, 2.0**16, 2.0**15]


def test_a_step_that_grows_the_scale_unscales_by_the_one_it_used(mesh):
    rule = DynamicScale(initial=256.0, growth_interval=2)
    tx = zero_shard(optax.sgd(1.0), stage=2, mesh=mesh, precision=Precision.fp16(loss_scale=rule))
    state, step = tx.create({"w": jnp.zeros(4)}), tx.train_step(lambda p, b: (p["w"].sum() * b).mean())
    used = []
    for i in range(10):
        state, metrics = step(state, jnp.ones(8))
        used.append(float(metrics["loss_scale"]))
        np.testing.assert_allclose(state.opt_state.master["w"][0], -(i + 1), rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], 2.0)
    assert used == [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]


def overflowing(params, batch):
    """Finite, until one row of the batch blows up."""
    return awkward_loss(params, batch) * jnp.where(jnp.any(batch["bomb"] > 0), jnp.inf, 1.0)


def bombs(rows=24, at=()):
    batches = awkward_batches(6, rows)
    return [{**b, "bomb": jnp.zeros(rows).at[5].set(1.0 if i in at else 0.0)} for i, b in enumerate(batches)]


def everything(state):
    return jax.device_get((state.step, state.params, state.opt_state, state.mutable))


# The default starts at 2^16, which is infinite in float16: the first step of a mean over all rows would be skipped.
FP16 = Precision.fp16(loss_scale=DynamicScale(initial=2.0**14))
PRECISIONS = {"fp16": FP16, "bf16": Precision.bf16(), "fp32": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "name", "accumulate"), [(0, "bf16", 1), (1, "fp16", 3), (2, "fp16", 1), (3, "fp32", 3)]
)
def test_an_overflow_on_one_device_leaves_every_bit(stage, name, accumulate, mesh):
    """And what follows is as if that batch had never been."""
    precision = PRECISIONS[name]
    schedule = optax.linear_schedule(1e-2, 1e-3, 5)
    make = lambda: floats_only(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))
    tx = zero_shard(make(), stage=stage, mesh=mesh, tuning=Tuning(persist_below=50), precision=precision)
    step = tx.train_step(overflowing, skip_nonfinite=True, accumulate=accumulate)
    state, clean = tx.create(awkward_params()), tx.create(awkward_params())
    for i, batch in enumerate(bombs(at=(1, 3))):
        before = everything(state)
        state, metrics = step(state, batch)
        assert metrics["skipped"] == (i in (1, 3))
        if metrics["skipped"]:
            jax.tree.map(np.testing.assert_array_equal, everything(state), before)
        else:
            clean, _ = step(clean, batch)
    assert state.step == 4
    if precision is None or precision.loss_scale is None:
        jax.tree.map(np.testing.assert_array_equal, everything(state), everything(clean))
    else:  # with another scale other gradients underflow
        assert state.scaling.scale == 2.0**12


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_skipped_step_keeps_mutable_state_and_overwritten_values_too(count):
    def loss(params, seen, batch):
        mean = batch["x"].mean()  # what `taken` is overwritten with
        return overflowing(params, batch) + params["taken"] * mean, seen + mean

    options = {"tuning": Tuning(persist_below=50), "overwrite": lambda path, _: path == "taken"}
    tx = zero_shard(floats_only(optax.adam(1e-2)), stage=3, mesh=mesh_of(count), **options)
    step = tx.train_step(loss, mutable=True, skip_nonfinite=True)
    state = tx.create(awkward_params() | {"taken": jnp.float32(7)}, mutable=jnp.float32(0))
    state, _ = step(state, bombs()[0])
    assert state.params["taken"] == state.mutable != 0
    before = everything(state)
    state, metrics = step(state, bombs(at=(1,))[1])
    assert metrics["skipped"]
    jax.tree.map(np.testing.assert_array_equal, everything(state), before)


def test_too_many_skips_raise_with_the_leaves_that_began_it(mesh):
    tx = zero_shard(optax.sgd(0.1), stage=3, mesh=mesh, tuning=Tuning(persist_below=4))
    loss = lambda p, b: (p["good"] * b).mean() + (p["bad"] * jnp.where(b > 1, jnp.nan, 0)).sum()
    state = tx.create({"bad": jnp.ones(8), "good": jnp.ones(8)})
    step = tx.train_step(loss, skip_nonfinite=True, max_skips=2)
    for value in (1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 2.0):
        state, _ = step(state, jnp.full(64, value).reshape(8, 8))
    with pytest.raises(FloatingPointError, match=r"3 steps in a row.*max_skips=2.*params\['bad'\]\.") as caught:
        step(state, jnp.ones((8, 8)))
    assert "good" not in str(caught.value)
    assert "zerojax.compare" in str(caught.value)
    assert state.step == 2  # and the state can still be used
    state, metrics = step(state.reset_skips(), jnp.ones((8, 8)))
    assert not metrics["skipped"]
    assert state.scaling.skips == 0


@pytest.mark.parametrize(
    ("options", "skips"),
    [({}, 0), ({"weighted": True}, 0), ({"skip_nonfinite": True}, 1), ({"max_skips": 0}, 1)],
    ids=["none", "weights", "skip_nonfinite", "max_skips"],
)
def test_steps_are_skipped_where_an_option_says_so(options, skips, mesh):
    loss = lambda p, b, *weight: ((p["w"] * b).sum(), *weight) if weight else (p["w"] * b).sum()
    weight = (jnp.float32(8),) if "weighted" in options else ()
    tx = zero_shard(optax.sgd(0.1), stage=2, mesh=mesh)
    step = tx.train_step(loss, **options)
    state, metrics = step(tx.create({"w": jnp.ones(1)}), jnp.full(8, jnp.nan), *weight)
    assert np.isnan(metrics["grad_norm"])
    assert (metrics["skipped"], state.step) == (skips, 1 - skips)
    if "max_skips" in options:
        with pytest.raises(FloatingPointError, match="1 steps in a row"):
            step(state, jnp.ones(8))
    for invalid in (0.0, -1.0) if weight else ():
        assert step(tx.create({"w": jnp.ones(1)}), jnp.ones(8), jnp.float32(invalid))[1]["skipped"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_static_scale_stays(stage, mesh):
    tx = zero_shard(optax.sgd(0.1), stage=stage, mesh=mesh, precision=Precision.fp16(loss_scale=1024))
    step, state = tx.train_step(lambda p, b: (p["w"] * b).mean()), tx.create({"w": jnp.ones(1)})
    for value in (1.0, jnp.inf, 1.0):
        state, metrics = step(state, jnp.full(8, value))
        assert metrics["loss_scale"] == 1024
    assert state.step == 2
