"""A step takes compiler options from the user, or chooses those that its compiled program proves."""

import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Offload, zero_shard
from zerojax.gpus.topology import absent_mesh, installed
from zerojax.train import compiling
from zerojax.train.compiling import OVERLAP, Figures

HAS_GPUS = installed() and jax.__version_info__ >= (0, 11)


def aot(test):
    return pytest.mark.slow(pytest.mark.skipif(not HAS_GPUS, reason="needs the extra aot, of the newest jax")(test))


BATCH = jnp.ones((8, 4))
LEVEL = {"xla_backend_optimization_level": 0}


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def begun(mesh, **options):
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh, persist_below=0)
    return tx.train_step(loss, **options), tx.create({"w": jnp.ones((4, 8))})


def test_the_users_options_reach_the_compiler_and_the_report(mesh):
    step, state = begun(mesh, compiler_options=LEVEL)
    assert step.compiler_options(state, BATCH).options == LEVEL
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        begun(mesh, compiler_options={"no_such_option": 1})[0](state, BATCH)
    step, state = begun(mesh, compiler_options=LEVEL)
    state, _ = step(state, BATCH)
    assert "xla_backend_optimization_level=0" in str(zerojax.report(state, step))
    assert "xla_backend" not in str(zerojax.report(state))


def test_on_cpu_nothing_is_chosen_and_nothing_compiled(mesh, monkeypatch):
    monkeypatch.setattr(compiling.Figures, "of", lambda *_: pytest.fail("compared"))
    step, state = begun(mesh)
    assert not step.compiler_options(state, BATCH).options
    assert step.compiled_with == ()


def test_options_are_checked_where_they_are_given(mesh, tmp_path):
    with pytest.raises(TypeError, match='compiler_options is "auto", or a dict'):
        begun(mesh, compiler_options="O2")
    for wrong in {1: 2}, {"xla_backend_optimization_level": None}:
        with pytest.raises(TypeError, match=r"compiler_options has .* values are str, bool, int or float"):
            begun(mesh, compiler_options=wrong)
    step, state = begun(mesh, compiler_options=LEVEL)
    with pytest.raises(TypeError, match=r"Pass the options to the jax\.jit"):
        jax.jit(step)(state, BATCH)
    offload = Offload(params="disk", optimizer="disk", path=tmp_path)
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh, offload=offload)
    with pytest.raises(ValueError, match="XLA_FLAGS"):
        tx.train_step(loss, compiler_options=LEVEL)


@pytest.mark.parametrize(
    ("change", "better"),
    [
        ({}, True),
        ({"waits": 1.0}, False),
        ({"hidden": 0.8}, False),
        ({"products": 110}, False),  # XLA repeats products
        ({"kernels": 9.005}, True),
        ({"kernels": 9.1}, False),
        ({"peak": 90}, True),
        ({"peak": 110}, False),
    ],
)
def test_a_program_is_chosen_if_it_waits_less_and_is_not_worse_otherwise(change, better):
    before = Figures(peak=80, hidden=0.9, products=100, kernels=9.0, waits=1.0, groups=2)
    after = dataclasses.replace(before, **{"waits": 0.5, **change})
    assert after.is_better(before, memory=100) == better


class Gpu:
    """A GPU of this process with half of the memory of its kind, and no other figures."""

    def memory_stats(self):
        return {"bytes_limit": 40}


def test_the_memory_is_that_of_the_card_and_not_of_its_kind(mesh, monkeypatch):
    kind = types.SimpleNamespace(memory=80)
    assert compiling.memory_of(mesh, kind) == 80  # CPUs tell nothing
    gpu, other = Gpu(), Gpu()
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert compiling.memory_of(types.SimpleNamespace(devices=np.array([gpu, other])), kind) == 40
    assert compiling.memory_of(types.SimpleNamespace(devices=np.array([other])), kind) == 80  # not on this machine


def test_a_process_that_cannot_compile_tells_the_others(mesh, monkeypatch):
    choice = compiling.OptionChoice(zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh).config)
    before = Figures(peak=80, hidden=0.9, products=100, kernels=9.0, waits=1.0, groups=2)
    figures, told = iter([before]), []

    def compiled(*_):
        if (found := next(figures, None)) is None:
            raise jax.errors.JaxRuntimeError("no such option")
        return found

    monkeypatch.setattr(compiling.Figures, "of", compiled)
    monkeypatch.setattr(choice, "_agreed", lambda *, is_better: told.append(is_better) or is_better)
    changed, note = choice._compare(mock.MagicMock(), (), None, 100)
    assert told == [False]
    assert changed is None
    assert "does not compile" in note


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def scanned(params, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0].astype(jnp.float32) ** 2)


def planned(topology, *, shard_axis="gpu", **options):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    axes = ("host", "gpu") if shard_axis else ("data",)
    mesh = absent_mesh(topology, axes=axes)
    tx = zero_shard(optax.sgd(1e-3), stage=3, mesh=mesh, axis=axes, shard_axis=shard_axis)
    state = tx.create({"up": shape(6, 2048, 8192), "down": shape(6, 8192, 2048)})
    return zerojax.plan(tx.train_step(scanned, **options), state, shape(128, 512, 2048), topology=topology)


@aot
def test_with_hybrid_sharding_two_collectives_run_at_once():
    chosen, plain = planned("h200:2x8"), planned("h200:2x8", compiler_options={})
    assert chosen.compiler_options == {OVERLAP: 2}
    assert plain.compiler_options == {}
    assert sum(chosen.waits.values()) < sum(plain.waits.values())
    assert chosen.hidden >= plain.hidden - 1e-3
    assert f"The step chose the compiler options {OVERLAP}=2" in str(chosen)
    assert "compiler options" not in str(plain)


@aot
def test_an_xla_that_does_not_know_an_option_keeps_its_defaults(monkeypatch):
    monkeypatch.setattr(compiling, "CANDIDATE", {"xla_no_such_option": 2})
    plan = planned("h200:2x8")
    assert plan.compiler_options == {}
    assert any("no compiler options" in note for note in plan.notes)


@aot
def test_on_one_axis_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(compiling.Figures, "of", lambda *_: pytest.fail("compared"))
    assert planned("h200:8", shard_axis=None).compiler_options == {}
