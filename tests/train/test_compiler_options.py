"""A step takes compiler options from the user. With hybrid sharding on GPUs, two collectives may run at once."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent_gpus import aot
from conftest import mesh_of

import zerojax
from zerojax import Offload, Tuning, zero_shard
from zerojax.config import tuning
from zerojax.config.tuning import OVERLAP, SMALL_KERNEL
from zerojax.gpus.devices import absent_mesh

BATCH = jnp.ones((8, 4))
LEVEL = {"xla_backend_optimization_level": 0}


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def begun(mesh, **options):
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=0))
    return tx.train_step(loss, **options), tx.create({"w": jnp.ones((4, 8))})


def test_the_users_options_reach_the_compiler_and_the_report(mesh):
    step, state = begun(mesh, compiler_options=LEVEL)
    assert step.compiler_options == LEVEL
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        begun(mesh, compiler_options={"no_such_option": 1})[0](state, BATCH)
    step, state = begun(mesh, compiler_options=LEVEL)
    state, _ = step(state, BATCH)
    assert "xla_backend_optimization_level=0" in str(zerojax.report(state, step))
    assert "xla_backend" not in str(zerojax.report(state))


def test_the_update_of_offloaded_state_has_the_options(mesh):
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, offload=Offload(optimizer="host", update="device"))
    step, state = tx.train_step(loss, compiler_options={"no_such_option": 1}), tx.create({"w": jnp.ones((64, 256))})
    update, *_ = step.lower_update(state)
    assert len(step.trace(state, jnp.ones((8, 64))).out_info) == 3  # a state, metrics, and what the update needs
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        update.compile()


def test_a_step_that_offloads_nothing_is_one_program(mesh):
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh, offload=Offload(optimizer="host"))
    step, state = tx.train_step(loss), tx.create({"w": jnp.ones((4, 8))})
    assert len(step.trace(state, BATCH).out_info) == 2
    assert step.lower_update(state) == []


def test_a_step_of_many_programs_takes_no_options(mesh, tmp_path):
    offload = Offload(params="disk", optimizer="disk", path=tmp_path)
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh, offload=offload)
    with pytest.raises(ValueError, match="XLA_FLAGS"):
        tx.train_step(loss, compiler_options=LEVEL)


def test_a_step_with_an_option_of_the_mesh_runs_within_another_program(monkeypatch):
    hybrid = Tuning(shard_axis="gpu", persist_below=0)
    tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh_of(2, 4), axis=("host", "gpu"), tuning=hybrid)
    step, state = tx.train_step(loss), tx.create({"w": jnp.ones((4, 8))})
    monkeypatch.setattr(tuning, "options_of_mesh", lambda config: LEVEL)
    assert step.compiled_with == ("Compiled with the options xla_backend_optimization_level=0.",)
    assert tx.train_step(loss, compiler_options={}).compiler_options == {}
    jax.jit(step).trace(state, BATCH)


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def scanned(params, x):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0].astype(jnp.float32) ** 2)


def planned(topology, **options):
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    mesh = absent_mesh(topology, axes=("host", "gpu"))
    tx = zero_shard(optax.sgd(1e-3), stage=3, mesh=mesh, axis=("host", "gpu"), tuning=Tuning(shard_axis="gpu"))
    state = tx.create({"up": shape(6, 2048, 8192), "down": shape(6, 8192, 2048)})
    return zerojax.plan(tx.train_step(scanned, **options), state, shape(128, 512, 2048), topology=topology)


@aot
@pytest.mark.slow
def test_with_hybrid_sharding_two_collectives_run_at_once():
    chosen, plain = planned("h200:2x8"), planned("h200:2x8", compiler_options={})
    assert chosen.compiler_options == {OVERLAP: 2}
    assert plain.compiler_options == {}
    assert sum(chosen.waits.values()) < sum(plain.waits.values())
    assert chosen.hidden >= plain.hidden - 1e-3
    assert f"Compiled with the options {OVERLAP}=2" in str(chosen)
    assert "the options" not in str(plain)


@aot
@pytest.mark.slow
def test_microbatches_on_more_than_32_gpus_compile():
    """XLA of jax 0.12 would end the process: its kernel for small all-reduces cannot sum the loss of a microbatch."""

    def begun(topology):
        tx = zero_shard(optax.sgd(1e-2), stage=3, mesh=absent_mesh(topology), tuning=Tuning(persist_below=0))
        return tx.train_step(loss, accumulate=2), tx.create({"w": jax.ShapeDtypeStruct((64, 8), jnp.float32)})

    assert begun("h100:4x8")[0].compiler_options == {}
    step, state = begun("h100:8x8")
    assert step.compiler_options == ({SMALL_KERNEL: ""} if jax.__version_info__[:2] == (0, 12) else {})
    found = zerojax.plan(step, state, jax.ShapeDtypeStruct((128, 64), jnp.float32), topology="h100:8x8")
    sums = [one for one in found.collectives.of("all-reduce") if one.times == 2]
    assert [array.shape for one in sums for array in one.arrays] == [()]
