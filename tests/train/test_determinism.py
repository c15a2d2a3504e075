"""Runs of a deterministic step agree bit for bit; options and choices that would differ between runs are refused."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax import Offload, zero_shard
from zerojax.gpus.topology import absent_mesh, installed
from zerojax.train import determinism
from zerojax.train.determinism import FLAG, OPTIONS, SENTENCE, check_devices

BATCH = np.arange(32, dtype=np.int32).reshape(8, 4) % 13


def loss(params, tokens):
    x = params["embed"][tokens]
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"].T - 1) ** 2)


def begun(mesh, *, offload=None, **options):
    tx = zero_shard(optax.adamw(1e-2), stage=3, mesh=mesh, persist_below=0, offload=offload)
    shapes = {"embed": jax.ShapeDtypeStruct((16, 64), jnp.float32), "w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    return tx, tx.train_step(loss, deterministic=True, **options), tx.create(shapes)


def test_a_flag_that_differs_between_runs_is_refused(mesh):
    """The other errors are in test_followed_remedies.py."""
    with pytest.raises(ValueError, match=f"{FLAG}.*or give True"):
        begun(mesh, compiler_options={FLAG: False})


def test_options_that_do_not_contradict_are_added(mesh, monkeypatch):
    more = {FLAG: True, "xla_backend_optimization_level": 0}
    _, step, _ = begun(mesh, compiler_options=more)
    assert step.compiler_options == more
    monkeypatch.setattr(determinism, "is_gpu", lambda config: True)
    assert step.compiler_options == OPTIONS | more


def test_all_programs_are_compiled_with_the_options(mesh, monkeypatch):
    """An option that XLA does not know, so that each program that takes it cannot be compiled."""
    monkeypatch.setattr(determinism, "is_gpu", lambda config: True)
    monkeypatch.setattr(determinism, "OPTIONS", {"no_such_option": True})
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    tx, step, state = begun(mesh, offload=Offload(optimizer="host", update="device"))
    update, *_ = step.lower_update(state)
    evaluate = tx.eval_step(loss, deterministic=True)
    live = tx.init_params(lambda: {"embed": jnp.ones((16, 64)), "w": jnp.ones((64, 64))})
    for compiled in (update.compile, step.lower(state, BATCH).compile, lambda: evaluate(live, BATCH)):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
            compiled()
    for traced in (step, evaluate):
        with pytest.raises(TypeError, match=r"deterministic=True.*no_such_option"):
            jax.jit(traced).trace(state if traced is step else live, BATCH)
    assert "no_such_option=True" in step.compiled_with[0]
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --{FLAG}=true")
    assert tx.train_step(loss, deterministic=True).compiled_with == (SENTENCE,)


def test_gpus_that_add_in_another_order_are_refused(mesh, monkeypatch, tmp_path):
    tx, *_ = begun(mesh)
    check_devices(tx.config)  # CPUs
    monkeypatch.setattr(determinism, "is_gpu", lambda config: True)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    for algorithms in ("", "^Ring", "Ring,NVLSTree"):
        monkeypatch.setenv("NCCL_ALGO", algorithms)
        with pytest.raises(ValueError, match="NCCL_NVLS_ENABLE=0"):
            check_devices(tx.config)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    check_devices(tx.config)
    jax.config.update("jax_enable_pgle", True)
    try:
        with pytest.raises(ValueError, match="jax_enable_pgle"):
            check_devices(tx.config)
    finally:
        jax.config.update("jax_enable_pgle", False)
    offload = Offload(params="disk", optimizer="disk", path=tmp_path)
    on_disk = zero_shard(optax.adamw(1e-2), stage=3, mesh=mesh, offload=offload)
    with pytest.raises(ValueError, match=f"XLA_FLAGS=--{FLAG}=true"):
        check_devices(on_disk.config)


@pytest.mark.slow
@pytest.mark.skipif(not installed() or jax.__version_info__ < (0, 11), reason="needs the extra aot, of the newest jax")
def test_gpus_sort_before_they_scatter():
    mesh = absent_mesh("h200:8")
    tx, step, state = begun(mesh, offload=Offload(optimizer="host", update="device"))
    shape = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype)
    plan = zerojax.plan(step, state, shape, topology="h200:8")
    assert plan.compiler_options == OPTIONS
    assert SENTENCE in str(plan)
    text, default = (
        one.lower(state, shape).compile().as_text() for one in (step, tx.train_step(loss, compiler_options={}))
    )
    assert "scatter(" in text
    assert "scatter(" in default
    assert "unique_indices=true" in text
    assert "unique_indices=true" not in default
    assert "__cublas$lt$matmul" in text  # not autotuned
    assert "__triton" in default
    assert all(one.compile() for one in step.lower_update(state))


RUN = """
import hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from zerojax import Offload, zero_shard
from zerojax.checkpoint import Checkpointer

def init(key):
    a, b = jax.random.split(key)
    return {"embed": jax.random.normal(a, (16, 64)), "w": jax.random.normal(b, (64, 64))}

def loss(params, tokens, key):
    x = params["embed"][tokens]
    x = jnp.tanh(x @ params["w"]) * jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.mean((x @ params["w"].T - 1) ** 2)

BATCH = np.arange(64, dtype=np.int32).reshape(16, 4) % 13
host = Offload(optimizer="host", update="host", chunk_bytes=4096)
CONFIGURATIONS = {
    "stage 1": ({"stage": 1}, {"accumulate": 2}),
    "stage 3": ({"stage": 3, "offload": host}, {}),
}
found = {}
for name, (sharded, options) in CONFIGURATIONS.items():
    tx = zero_shard(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), persist_below=0, **sharded)
    step = tx.train_step(loss, deterministic=True, **options)

    def ends(state, steps):
        for i in steps:
            state, metrics = step(state, BATCH, jax.random.fold_in(jax.random.key(1), i))
        leaves = jax.tree.leaves((tx.unshard(state.params), tx.unshard(state.opt_state, state.params), metrics))
        return state, hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()

    begun = lambda: tx.create(tx.init_params(init, jax.random.key(0)))
    with Checkpointer(f"{sys.argv[1]}/{name}") as checkpoints:
        if checkpoints.latest() is None:
            state, _ = ends(begun(), range(2))
            checkpoints.save(state, step=2)
            found[name] = ends(state, range(2, 4))[1]
        else:
            resumed = ends(checkpoints.restore(begun()).state, range(2, 4))[1]
            found[name] = [ends(begun(), range(4))[1], resumed]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_other_processes_and_resumed_runs_agree_bit_for_bit(tmp_path):
    """Compiled as users compile, by processes that hash strings differently, and without a cache of programs."""
    env = {key: x for key, x in os.environ.items() if not key.startswith(("JAX_COMPILATION", "JAX_DISABLE"))}
    env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

    def run(seed):
        command = [sys.executable, "-c", RUN, tmp_path]
        done = subprocess.run(command, env=env | {"PYTHONHASHSEED": seed}, check=True, capture_output=True, timeout=300)
        return json.loads(done.stdout)

    first, second = run("1"), run("2")
    assert len(set(first.values())) == 2
    assert second == {name: [digest, digest] for name, digest in first.items()}
