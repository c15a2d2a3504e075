"""Run by test_killed_saves.py in processes of their own: they are killed, or are several."""

import itertools
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, export, import_params, importing, on_preemption
from zerojax.checkpoint.saving import Save


def parameters():
    return {"w": jnp.zeros((48, 8)), "b": jnp.zeros(8)}


def state_of(tx, step):
    """A state whose parameters all tell its step, made on the devices."""
    state = tx.create(jax.eval_shape(parameters))

    def fill(x):
        part = lambda index: np.full([len(range(*s.indices(n))) for s, n in zip(index, x.shape, strict=True)], step)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: part(index).astype(x.dtype))

    return jax.tree.map(fill, state)


def steps_told(state):
    """The steps that the numbers of a state tell: one, if it is consistent."""
    parts = (s.data for x in jax.tree.leaves(state) if x.dtype != bool for s in x.addressable_shards)
    return {int(n) for part in parts for n in np.asarray(part).ravel()}


def save_for_ever(directory):
    """Save step after step until killed; first check what an earlier process left."""
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=3, persist_below=16)
    with Checkpointer(directory, keep=2) as checkpoints:
        begun, warm = checkpoints.latest() or 0, False
        if begun:
            assert steps_told(checkpoints.restore(state_of(tx, 0)).state) == {begun}
        for step in itertools.count(begun + 1):
            checkpoints.save(state_of(tx, step), {"step": step}, step=step)
            if step % 4 == 0:  # replaces what is there, too
                checkpoints.wait()
                checkpoints._last_save = None
                checkpoints.save(state_of(tx, step), {"step": step}, step=step)
            if not warm:
                checkpoints.wait()
                print("begun", flush=True)
                warm = True


def weights_through_a_mapping(tx, folder):
    """Two processes export, and import: of what is sharded each reads the half that its devices hold."""
    params = {"stack": np.arange(2 * 16 * 24.0).reshape(2, 16, 24), "odd": np.arange(45.0).reshape(5, 9)}
    params = jax.tree.map(np.float32, params | {"scale": 3})
    mapping = {"h.{i}.w": ("stack", "out in -> in out"), "odd": ("odd", "b a -> a b"), "scale": "scale"}
    export(tx.shard(params), folder, mapping=mapping)
    multihost_utils.sync_global_devices("exported")
    read, view = {}, importing.view

    def counting(files, name, section, index):
        x = view(files, name, section, index)
        read[section.leaf] = read.get(section.leaf, 0) + x.nbytes
        return x

    importing.view = counting
    found = import_params(folder, tx.shard(jax.eval_shape(lambda: params)), mapping=mapping)
    for name, x in tx.unshard(found).items():
        np.testing.assert_array_equal(np.asarray(x), params[name])
    assert read[sorted(params).index("stack")] == params["stack"].nbytes // 2


def together(directory, index, port, dies):
    """Two processes save and restore; with `dies` the second one dies while saving."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=3, persist_below=16)
    assert tx.config.mesh.size == 4
    checkpoints = Checkpointer(directory, timeout=3)
    checkpoints.save(state_of(tx, 1), {"process": index}, step=1)
    if not dies:
        checkpoints.save(state_of(tx, 2), {"process": index}, step=2)
        restored = checkpoints.restore(state_of(tx, 0))
        assert steps_told(restored.state) == {2}
        assert restored.data == {"process": index}
        checkpoints.close()
        weights_through_a_mapping(tx, Path(directory) / "weights")
        print("done", flush=True)
        return
    checkpoints.wait()
    if index == 1:
        Save._write = lambda *args: os._exit(1)
    checkpoints.save(state_of(tx, 2), {"process": index}, step=2)
    try:
        checkpoints.wait()
    except CheckpointError as error:
        print(error, flush=True)
    os._exit(0)  # jax.distributed would wait for the one that died


def preempted(directory, index, port):
    """Two processes train until one of them is told to end."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=3, persist_below=16)
    with Checkpointer(directory, every=10**6, timeout=20) as checkpoints, on_preemption() as preemption:
        for i in itertools.count(1):
            time.sleep(0.02)
            stop = preemption.reached(i)
            if stop:
                checkpoints.save(state_of(tx, i), step=i, force=True)
            if i == 1:
                print("begun", flush=True)
            if stop:
                break
    print("left after step", i, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save_for_ever(Path(sys.argv[2]))
    elif sys.argv[5] == "preempted":
        preempted(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        together(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "dies")
