"""Runs of equal programs agree bit for bit, in other processes and resumed ones."""

import json
import os
import subprocess
import sys

import pytest

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
    step = tx.train_step(loss, **options)

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
