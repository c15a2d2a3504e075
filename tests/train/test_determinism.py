"""Runs of equal programs agree bit for bit, in other processes and resumed ones."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several

from zerojax import Offload, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer

BATCH = np.arange(64, dtype=np.int32).reshape(16, 4) % 13
HOST = Offload(optimizer="host", update="host", chunk_bytes=4096)
CONFIGURATIONS = {"stage 1": ({"stage": 1}, {"accumulate": 2}), "stage 3": ({"stage": 3, "offload": HOST}, {})}


def init(key):
    a, b = jax.random.split(key)
    return {"embed": jax.random.normal(a, (16, 64)), "w": jax.random.normal(b, (64, 64))}


def loss(params, tokens, key):
    x = params["embed"][tokens]
    x = jnp.tanh(x @ params["w"]) * jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.mean((x @ params["w"].T - 1) ** 2)


def train(folder):
    """Print digests of runs: of one that is saved, and where there is a checkpoint, of a whole and a resumed one."""
    found = {}
    for name, (sharded, options) in CONFIGURATIONS.items():
        tx = zero_shard(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), tuning=Tuning(persist_below=0), **sharded
        )
        step = tx.train_step(loss, **options)

        def end(state, steps, tx=tx, step=step):
            for i in steps:
                state, metrics = step(state, BATCH, jax.random.fold_in(jax.random.key(1), i))
            leaves = jax.tree.leaves((tx.unshard(state.params), tx.unshard(state.opt_state, state.params), metrics))
            return state, hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()

        begun = lambda tx=tx: tx.create(tx.init_params(init, jax.random.key(0)))
        with Checkpointer(f"{folder}/{name}") as checkpoints:
            if checkpoints.latest() is None:
                state, _ = end(begun(), range(2))
                checkpoints.save(state, step=2)
                found[name] = end(state, range(2, 4))[1]
            else:
                resumed = end(checkpoints.restore(begun()).state, range(2, 4))[1]
                found[name] = [end(begun(), range(4))[1], resumed]
    print(json.dumps(found))


@pytest.mark.slow
def test_other_processes_and_resumed_runs_agree_bit_for_bit(tmp_path, monkeypatch):
    """Compiled as users compile, by processes that hash strings differently, and without a cache of programs."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    first, second = {}, {}
    for seed, found in (("1", first), ("2", second)):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        (out,) = several.run(train, tmp_path, processes=1, devices=4)
        found.update(several.printed(out)[0])
    assert len(set(first.values())) == 2
    assert second == {name: [digest, digest] for name, digest in first.items()}
