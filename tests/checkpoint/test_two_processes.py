"""Two processes save and restore together, leave when one of them is told to, and name the one that dies."""

import signal

import jax
import optax
import pytest
import several
from checkpoint_child import state_of, steps_told
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.manifest import read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of two processes that have ended, and what each printed."""
    folder = tmp_path_factory.mktemp("two")
    children = several.start("checkpoint_child.py", folder)
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
