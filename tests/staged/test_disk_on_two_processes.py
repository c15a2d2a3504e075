"""Two processes train with parameters on disk as one process does in memory, each with its own folder."""

import pickle

import jax
import numpy as np
import pytest
import several
from disk_models import model_params, sharded
from disk_runs import DEVICES, RUNS, results, trained

from zerojax.checkpoint import Checkpointer, import_params

pytestmark = pytest.mark.slow
RTOL = 1e-11  # float64 rounds at 1e-16; steps amplify it


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which two processes have written their results, a checkpoint and an export."""
    folder = tmp_path_factory.mktemp("two")
    several.run("disk_processes_child.py", folder, devices=DEVICES // 2)
    return folder


def assert_equal(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=RTOL, atol=RTOL * np.abs(y).max())


def of_process(folder, process, name):
    return pickle.loads((folder / f"process {process}" / f"{name}.pickle").read_bytes())


@pytest.mark.parametrize("name", RUNS)
def test_both_processes_have_the_results_of_one_process_in_memory(folder, name):
    run = RUNS[name]
    tx = sharded(run.tx(), DEVICES, **run.config)
    losses, state = trained(tx, run)
    for process in range(2):
        found = of_process(folder, process, name)
        assert_equal(found["losses"], losses)
        assert_equal(found["results"], results(tx, state))


def test_their_checkpoint_and_export_are_read_in_memory(folder):
    run = RUNS["loop"]
    tx = sharded(run.tx(), DEVICES, **run.config)
    found = of_process(folder, 0, "loop")
    with Checkpointer(folder / "saved") as saved:
        restored = saved.restore(tx.create(jax.eval_shape(model_params))).state
    assert_equal(results(tx, restored), found["results"])
    assert_equal(trained(tx, run, restored, steps=3)[0], found["more"])
    read = tx.unshard(import_params(folder / "exported", tx.shard(jax.eval_shape(model_params))))
    assert_equal(jax.tree.leaves(jax.device_get(read)), found["results"][: len(jax.tree.leaves(read))])
