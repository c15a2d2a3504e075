"""Two processes save and restore together, leave when one of them is told to, and name the one that dies."""

import itertools
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several
from conftest import mesh_of

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import (
    Checkpointer,
    CheckpointError,
    export,
    import_params,
    importing,
    on_preemption,
    restore_params,
)
from zerojax.checkpoint.manifest import read_manifest
from zerojax.checkpoint.saving import Save

pytestmark = pytest.mark.slow


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
    with pytest.raises(CheckpointError, match="exists already and is not empty"):  # on every process
        export(tx.shard(params), folder, mapping=mapping)
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


def tree_of_a_loop(tx, directory):
    """A key that each process has made for itself, and an int, are in the tree; the first process names the best."""
    params = tx.shard({"w": np.arange(45.0).reshape(5, 9)})
    tree = {"params": params, "opt_state": tx.init(params), "key": jax.random.key(7), "epoch": 3}
    with Checkpointer(directory, tx=tx, best_fn=lambda metrics: metrics["loss"], best_mode="min") as checkpoints:
        for step, loss in ((1, 1.0), (2, 2.0)):
            checkpoints.save(tree, step=step, metrics={"loss": jnp.float32(loss)})
        assert checkpoints.best() == 1
        found = checkpoints.restore(tree).state
    assert found["epoch"] == 3
    assert jax.random.key_data(found["key"]).tolist() == [0, 7]
    assert steps_told(restore_params(directory, params)["w"] * 0) == {0}


def save_and_restore(tx, directory, index):
    checkpoints = Checkpointer(directory)
    for step in (1, 2):
        checkpoints.save(state_of(tx, step), {"process": index}, step=step)
    restored = checkpoints.restore(state_of(tx, 0))
    assert steps_told(restored.state) == {2}
    assert restored.data == {"process": index}
    checkpoints.close()
    weights_through_a_mapping(tx, directory / "weights")
    tree_of_a_loop(tx, directory / "loop")


def leave(tx, directory):
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


def die(tx, directory, index):
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


def live(folder):
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=3, tuning=Tuning(persist_below=16))
    folder, index = Path(folder), jax.process_index()
    assert tx.config.mesh.size == 4
    save_and_restore(tx, folder / "lives", index)
    leave(tx, folder / "preempted")
    die(tx, folder / "dies", index)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of two processes that have ended, and what each printed."""
    folder = tmp_path_factory.mktemp("two")
    children = several.start(live, folder)
    for child in children:
        while line := child.stdout.readline():  # Gloo prints, too
            if line == "begun\n":
                break
        else:
            raise AssertionError(child.communicate()[1][-3000:])
    children[1].send_signal(signal.SIGTERM)
    outcomes = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 1], outcomes
    return folder, [out for out, _ in outcomes]


def test_two_processes_save_and_restore_together(ran):
    folder = ran[0] / "lives"
    checkpoints = Checkpointer(folder, read_only=True)
    assert checkpoints.verify() == [1, 2]
    found = {str(p.relative_to(folder / "step_00000002")) for p in folder.glob("step_00000002/**/*") if p.is_file()}
    assert found == set(read_manifest(folder / "step_00000002").files) | {"manifest.json", "manifest.sha256"}
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=2, mesh=mesh_of(8))
    with pytest.warns(UserWarning, match="saved by 2 processes, each with a position that differs"):
        restored = checkpoints.restore(tx.create(jax.eval_shape(lambda: state_of(tx, 0).params)))
    assert steps_told(restored.state) == {2}


def test_two_processes_leave_at_the_same_step_when_one_is_told_to(ran):
    folder, printed = ran
    line = f"left after step {Checkpointer(folder / 'preempted', read_only=True).latest()}\n"
    assert all(line in said for said in printed)


def test_a_process_that_dies_while_saving_is_named_in_time(ran):
    folder, (said, _) = ran
    assert "Process 1 of 2 did not answer within 5 s" in said
    assert "The newest checkpoint is that of step 1" in said
    assert Checkpointer(folder / "dies", read_only=True).verify() == [1]
    assert not list((folder / "dies").glob(".tmp*"))
