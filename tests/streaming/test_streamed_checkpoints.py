"""Offloaded state in checkpoints: into any other way of offloading, and through kills."""

import asyncio
import collections
import os
import pickle
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest
from conftest import HELPERS, mesh_of
from models import awkward_batches, awkward_loss, awkward_params
from orbax.checkpoint._src.serialization import limits

from zerojax import Offload, Precision, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, export, saving
from zerojax.checkpoint.state_leaves import state_leaves
from zerojax.layout.chunked import is_chunked
from zerojax.offload import close
from zerojax.offload.disk import DiskStateError
from zerojax.offload.folder import DiskError
from zerojax.placement.chunking import joined
from zerojax.placement.storage import in_logical_shape

CHILD = HELPERS / "offload_child.py"
PRECISIONS = {"fp32": None, "bf16": Precision.bf16()}


def transformation(way, folder, stage=3, count=8, precision=None):
    offload = None
    if way != "none":
        path = folder / f"{way}{random.random()}" if way == "disk" else None
        offload = Offload(optimizer=way, path=path, chunk_bytes=200, update="device")
    mesh = mesh_of(count)
    return zero_shard(optax.adamw(1e-2), stage=stage, mesh=mesh, persist_below=20, offload=offload, precision=precision)


def trained(tx):
    state, step = tx.create(awkward_params()), tx.train_step(awkward_loss)
    state, metrics = step(state, awkward_batches(1)[0])
    float(metrics["loss"])
    return state, step


def leaves_of(state):
    """Every logical leaf on the host, by name."""
    arrays = {n: (joined(s.array) if is_chunked(s.array) else s.array, s.leaf) for n, s in state_leaves(state).items()}
    return {name: np.asarray(in_logical_shape(x, leaf)) for name, (x, leaf) in arrays.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].tobytes() == x.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["disk", "none", "host"])
def test_every_way_of_offloading_restores_into_every_other(way, precision, tmp_path, monkeypatch):
    if precision == "fp32":  # no leaf is packed; in the other all are
        monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    state, _ = trained(transformation(way, tmp_path, precision=PRECISIONS[precision]))
    expected = leaves_of(state)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        for other, other_stage, other_count in (("none", 0, 2), ("host", 1, 3), ("disk", 2, 8), ("host", 3, 1)):
            like = transformation(other, tmp_path, other_stage, other_count, PRECISIONS[precision])
            found = checkpoints.restore(like.create(awkward_params())).state
            assert any(map(is_chunked, jax.tree.leaves(found.opt_state, is_leaf=is_chunked))) == (other != "none")
            assert_same(leaves_of(found), expected)
            if other == "disk":
                shapes = like.create(jax.eval_shape(awkward_params))
                del found
                assert_same(leaves_of(checkpoints.restore(shapes).state), expected)


@pytest.mark.slow
def test_writes_share_no_lock(tmp_path, monkeypatch):
    # asyncio's locks are of one event loop, and orbax writes the leaves of each `serialize` in a loop of their own.
    loops = collections.defaultdict(set)

    async def wait_for_bytes(limiter, _):
        loops[limiter].add(asyncio.get_running_loop())

    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    monkeypatch.setattr(limits.LimitInFlightBytes, "wait_for_bytes", wait_for_bytes)
    monkeypatch.setattr(limits.LimitInFlightBytes, "release_bytes", wait_for_bytes)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(transformation("host", tmp_path).create(awkward_params()), step=0)
    assert all(len(used) == 1 for used in loops.values())


@pytest.mark.slow
def test_what_is_saved_is_the_state_at_the_call_while_training_goes_on(tmp_path):
    tx = transformation("host", tmp_path)
    state, step = trained(tx)
    expected = leaves_of(state)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, step=1)
        for batch in awkward_batches(3):
            state, metrics = step(state, batch)
            float(metrics["loss"])
        assert_same(leaves_of(checkpoints.restore(tx.create(awkward_params())).state), expected)


@pytest.mark.slow
def test_stock_orbax_lists_and_reads_what_was_offloaded(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    state, _ = trained(transformation("disk", tmp_path))
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, step=1)
    name = "opt_state.0.mu.tied"
    found = ocp.PyTreeCheckpointer().restore(
        tmp_path / "checkpoints" / "step_00000001" / "arrays",
        args=ocp.args.PyTreeRestore(
            item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
        ),
    )
    expected = leaves_of(state)["opt_state[0].mu['tied']"]
    np.testing.assert_array_equal(np.asarray(found[name])[:24, :13], expected)


@pytest.mark.slow
def test_master_weights_on_disk_are_exported(tmp_path):
    from safetensors.numpy import load_file

    state, _ = trained(transformation("disk", tmp_path, precision=Precision.bf16()))
    (file,) = export(state, tmp_path / "parameters")
    expected = leaves_of(state)["params['tied']"]
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(load_file(file)["tied"], expected)


def run(folder, steps, kill_after=None):
    """Run the child, to its end or until it is killed; its output."""
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    folder.mkdir(exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, CHILD, folder, str(steps)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if kill_after is not None:
        if child.stdout.readline():
            time.sleep(kill_after)
        child.send_signal(signal.SIGKILL)
    out, err = child.communicate()
    assert kill_after is not None or not child.returncode, err[-3000:]
    return out


@pytest.mark.slow
def test_a_killed_run_restores_its_checkpoint_and_goes_on_bit_for_bit(tmp_path):
    """Whatever its files on disk have: the next run removes them. For parameters on disk, see test_disk_kills.py."""
    moments, steps = random.Random(0), 120
    for _ in range(5):
        run(tmp_path / "killed", steps, kill_after=moments.uniform(0.0, 0.4))
    run(tmp_path / "killed", steps)
    run(tmp_path / "straight", steps)
    for name in ("parameters/model.safetensors", "moments.npy"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def chunk_files(state):
    files = next(x for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked) if is_chunked(x)).store.files
    files._store.flush()
    return sorted(files.path.glob("chunk_*"))


def test_a_torn_file_is_named_and_the_checkpoint_mends_it(tmp_path):
    tx = transformation("disk", tmp_path)
    state, step = trained(tx)
    expected = leaves_of(state)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        torn = chunk_files(state)[3]
        torn.write_bytes(torn.read_bytes()[:-512])
        with pytest.raises(DiskStateError, match=torn.name):
            step(state, awkward_batches(1)[0])
        like = tx.create(jax.eval_shape(awkward_params))
        del state
        assert_same(leaves_of(checkpoints.restore(like).state), expected)


def test_a_folder_that_cannot_hold_the_state_is_refused_before_training(tmp_path):
    def create(path):
        offload = Offload(optimizer="disk", path=path, chunk_bytes=200)
        return zero_shard(optax.adamw(1e-2), stage=3, mesh=mesh_of(8), persist_below=20, offload=offload).create(
            awkward_params()
        )

    with pytest.raises(DiskError, match="parent folder exists"):
        create(tmp_path / "no" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="cannot be offloaded to"):
        create(tmp_path / "file")
    kept = create(tmp_path / "state")
    with pytest.raises(DiskError, match="is in use by this process"):
        create(tmp_path / "state")
    del kept


@pytest.mark.slow
def test_a_copy_of_a_state_whose_files_have_changed_is_refused(tmp_path):
    """Otherwise it would train older parameters with newer moments."""
    state, step = trained(transformation("disk", tmp_path))
    copied = jax.tree.map(lambda x: x.copy(), state)
    assert_same(leaves_of(copied), leaves_of(state))
    step(state, awkward_batches(1)[0])
    with pytest.raises(ValueError, match="has version 3, and this state has version 2"):
        step(copied, awkward_batches(1)[0])
    checkpoints = Checkpointer(tmp_path / "checkpoints")
    checkpoints.save(copied, step=1)
    with pytest.raises(CheckpointError, match="has version 3, and this state has version 2"):
        checkpoints.close()


def small(path):
    return zero_shard(
        optax.adam(1e-2), stage=3, mesh=mesh_of(2), persist_below=4, offload=Offload(optimizer="disk", path=path)
    )


def test_a_state_can_be_closed_after_an_interrupt(tmp_path, monkeypatch):
    """Its folder is locked by this process for as long as anything refers to the state."""
    tx = small(tmp_path / "state")
    state, params = tx.create({"w": np.ones((8, 8), np.float32)}), {"w": np.ones((8, 8), np.float32)}
    step = tx.train_step(lambda params, batch: (batch @ params["w"]).mean())

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("zerojax.streaming.stream.UpdateQueue.update", interrupt)
        patched.setattr("zerojax.streaming.stores.DiskStateStore.abandon", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            step(state, np.ones((2, 8), np.float32))
    with pytest.raises(DiskError, match=r"in use by this process. First close .* zerojax.offload.close\(state\)"):
        tx.create(params)
    close(state)
    close(state)
    step(tx.create(params), np.ones((2, 8), np.float32))


def test_the_folder_does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    state = small("state").create({"w": np.ones((8, 8), np.float32)})
    small("~/state").create({"w": np.ones((8, 8), np.float32)})
    assert (tmp_path / "home" / "state").is_dir()
    monkeypatch.chdir(tmp_path / "other")
    leaves_of(state)
    assert not os.listdir()
    with pytest.raises(ValueError, match="names no folder"):
        Offload(optimizer="disk", path="")


def test_an_offloaded_state_is_not_pickled(tmp_path):
    state = small(tmp_path / "state").create({"w": np.ones((8, 8), np.float32)})
    with pytest.raises(TypeError, match=r"opt_state.*mu.* is offloaded, and cannot be pickled, .*Checkpointer"):
        pickle.dumps(state)
