"""Offloaded state in checkpoints: into any other way of offloading; and its files."""

import asyncio
import collections
import os
import random

import jax
import numpy as np
import optax
import pytest
from checkpoints import assert_same, logical_leaves
from conftest import mesh_of
from models import awkward_batches, awkward_loss, awkward_params
from orbax.checkpoint._src.serialization import limits

from zerojax import Offload, Precision, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, export, saving
from zerojax.layout.leaf import is_chunked
from zerojax.offload import close
from zerojax.offload.folder import DiskError

ONES = {"w": np.ones((8, 8), np.float32)}
PRECISIONS = {"fp32": None, "bf16": Precision.bf16()}


def transformation(way, folder, stage=3, count=8, precision=None):
    offload = None
    if way != "none":
        path = folder / f"{way}{random.random()}" if way == "disk" else None
        offload = Offload(optimizer=way, path=path, chunk_bytes=200, update="device")
    options = {"stage": stage, "mesh": mesh_of(count), "precision": precision}
    return zero_shard(optax.adamw(1e-2), tuning=Tuning(persist_below=20), offload=offload, **options)


def trained(tx):
    state, step = tx.create(awkward_params()), tx.train_step(awkward_loss)
    return step(state, awkward_batches(1)[0])[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["disk", "none", "host"])
def test_every_way_of_offloading_restores_into_every_other(way, precision, tmp_path, monkeypatch):
    if precision == "fp32":  # no leaf is packed; in the other all are
        monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    state = trained(transformation(way, tmp_path, precision=PRECISIONS[precision]))
    expected = logical_leaves(state)
    with Checkpointer(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        for other, other_stage, other_count in (("none", 0, 2), ("host", 1, 3), ("disk", 2, 8), ("host", 3, 1)):
            like = transformation(other, tmp_path, other_stage, other_count, PRECISIONS[precision])
            found = checkpoints.restore(like.create(awkward_params())).state
            assert any(map(is_chunked, jax.tree.leaves(found.opt_state, is_leaf=is_chunked))) == (other != "none")
            assert_same(logical_leaves(found), expected)
            if other == "disk":
                shapes = like.create(jax.eval_shape(awkward_params))
                del found
                assert_same(logical_leaves(checkpoints.restore(shapes).state), expected)


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
def test_master_weights_on_disk_are_exported(tmp_path):
    from safetensors.numpy import load_file

    state = trained(transformation("disk", tmp_path, precision=Precision.bf16()))
    (file,) = export(state, tmp_path / "parameters")
    expected = logical_leaves(state)["params['tied']"]
    assert expected.dtype == np.float32
    np.testing.assert_array_equal(load_file(file)["tied"], expected)


def small(path):
    offload = Offload(optimizer="disk", path=path)
    return zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(2), tuning=Tuning(persist_below=4), offload=offload)


def test_a_state_can_be_closed_after_an_interrupt(tmp_path, monkeypatch):
    """Its folder is locked by this process for as long as anything refers to the state."""
    tx = small(tmp_path / "state")
    state = tx.create(ONES)
    step = tx.train_step(lambda params, batch: (batch @ params["w"]).mean())

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("zerojax.streaming.stream.UpdateQueue.update", interrupt)
        patched.setattr("zerojax.streaming.stores.DiskStateStore.abandon", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            step(state, np.ones((2, 8), np.float32))
    with pytest.raises(DiskError, match=r"in use by this process. First close .* zerojax.offload.close\(state\)"):
        tx.create(ONES)
    close(state)
    close(state)
    step(tx.create(ONES), np.ones((2, 8), np.float32))


def test_the_folder_does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "other").mkdir()
    state = small("state").create(ONES)
    small("~/state").create(ONES)
    assert (tmp_path / "home" / "state").is_dir()
    monkeypatch.chdir(tmp_path / "other")
    logical_leaves(state)
    assert not os.listdir()
