"""Run by test_two_processes.py, twice: save, restore, are told to leave, and one dies.

python checkpoint_child.py FOLDER PORT PROCESS
"""

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


def weights_through_a_mapping(tx, folder):
    """Two processes export, and import: of what is sharded each reads the half that its devices hold."""
    params = {"stack": np.arange(2 * 16 * 24.0).reshape(2, 16, 24), "odd": np.arange(45.0).reshape(5, 9)}
    params = jax.tree.map(np.float32, params | {"scale": 3})
    mapping = {"h.{i}.w": ("stack", "out in -> in out"), "odd": ("odd", "b a -> a b"), "scale": "scale"}
    export(tx.shard(params), folder, mapping=mapping)
    multihost_utils.sync_global_devices("exported")
    read, view = {}, importing.view

    def counting(header, section, index):
        x = view(header, section, index)
        read[section.leaf] = read.get(section.leaf, 0) + x.nbytes
        return x

    importing.view = counting
    found = import_params(folder, tx.shard(jax.eval_shape(lambda: params)), mapping=mapping)
    for name, x in tx.unshard(found).items():
        np.testing.assert_array_equal(np.asarray(x), params[name])
    assert read[sorted(params).index("stack")] == params["stack"].nbytes // 2


def lives(tx, directory, index):
    """Save and restore."""
    checkpoints = Checkpointer(directory)
    for step in (1, 2):
        checkpoints.save(state_of(tx, step), {"process": index}, step=step)
    restored = checkpoints.restore(state_of(tx, 0))
    assert steps_told(restored.state) == {2}
    assert restored.data == {"process": index}
    checkpoints.close()
    weights_through_a_mapping(tx, directory / "weights")


def preempted(tx, directory):
    """Train until one of the processes is told to end."""
    with Checkpointer(directory, every=10**6) as checkpoints, on_preemption() as preemption:
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


def dies(tx, directory, index):
    """The second process dies while saving."""
    checkpoints = Checkpointer(directory, timeout=5)
    checkpoints.save(state_of(tx, 1), step=1)
    checkpoints.wait()
    if index == 1:
        Save._write = lambda *args: os._exit(1)
    checkpoints.save(state_of(tx, 2), step=2)
    try:
        checkpoints.wait()
    except CheckpointError as error:
        print(error, flush=True)
    os._exit(0)  # jax.distributed would wait for the one that died


def main(directory, port, index):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=3, persist_below=16)
    assert tx.config.mesh.size == 4
    lives(tx, directory / "lives", index)
    preempted(tx, directory / "preempted")
    dies(tx, directory / "dies", index)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
