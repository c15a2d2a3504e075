"""Processes that die while they save, and several that save together."""

import os
import random
import signal
import socket
import subprocess
import sys
import time

import jax
import optax
import pytest
from checkpoint_child import state_of, steps_told
from conftest import HELPERS, mesh_of

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.manifest import read_manifest

CHILD = HELPERS / "checkpoint_child.py"


def start(devices, *args):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    return subprocess.Popen(
        [sys.executable, CHILD, *map(str, args)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_what_a_killed_save_leaves_is_a_committed_step(tmp_path):
    """Each process first restores what the one before left; a state that mixes two steps would be found."""
    moments, seen = random.Random(0), 0
    for _ in range(20):
        child = start(1, "save", tmp_path)
        begun = child.stdout.readline()
        assert begun.startswith("begun"), child.communicate()[1]
        time.sleep(moments.uniform(0.0, 0.5))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        # a moment between two renames may leave the newest step aside; the next run puts it back
        aside = [int(p.name[-8:]) for p in tmp_path.glob(".old-*")]
        newest = max([*Checkpointer(tmp_path, read_only=True).steps(), *aside], default=0)
        assert newest >= seen, "a committed step was lost"
        seen = newest
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=1, mesh=mesh_of(2))
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        assert not list(tmp_path.glob(".tmp*"))
        assert checkpoints.verify()
        restored = checkpoints.restore(state_of(tx, 0))
        assert steps_told(restored.state) == {restored.step} == {restored.data["step"]} == {seen}
        assert seen > 0


def two(directory, how):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [start(2, "together", directory, i, port, how) for i in range(2)]


@pytest.mark.slow
def test_two_processes_save_and_restore_together(tmp_path):
    outcomes = [child.communicate(timeout=120) for child in two(tmp_path, "lives")]
    for out, err in outcomes:
        assert "done" in out, err[-3000:]
    checkpoints = Checkpointer(tmp_path, read_only=True)
    assert checkpoints.verify() == [1, 2]
    found = {str(p.relative_to(tmp_path / "step_00000002")) for p in tmp_path.glob("step_00000002/**/*") if p.is_file()}
    assert found == set(read_manifest(tmp_path / "step_00000002").files) | {"manifest.json", "manifest.sha256"}
    tx = zero_shard(optax.sgd(1.0, momentum=0.9), stage=2, mesh=mesh_of(8))
    with pytest.warns(UserWarning, match="saved by 2 processes, each with a position that differs"):
        restored = checkpoints.restore(tx.create(jax.eval_shape(lambda: state_of(tx, 0).params)))
    assert steps_told(restored.state) == {2}


@pytest.mark.slow
def test_a_process_that_dies_while_saving_is_named_in_time(tmp_path):
    first, second = two(tmp_path, "dies")
    out, err = first.communicate(timeout=120)
    second.communicate(timeout=10)
    assert second.returncode == 1
    assert "Process 1 of 2 did not answer within 3 s" in out, err[-3000:]
    assert "The newest checkpoint is that of step 1" in out
    assert Checkpointer(tmp_path, read_only=True).verify() == [1]
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.slow
def test_two_processes_leave_at_the_same_step_when_one_is_told_to(tmp_path):
    children = two(tmp_path, "preempted")
    for child in children:
        assert child.stdout.readline() == "begun\n"
    children[1].send_signal(signal.SIGTERM)
    outcomes = [child.communicate(timeout=60) for child in children]
    lines = {out.strip() for out, _ in outcomes}
    assert len(lines) == 1, outcomes
    assert [child.returncode for child in children] == [0, 0]
    (line,) = lines
    assert line == f"left after step {Checkpointer(tmp_path, read_only=True).latest()}"
