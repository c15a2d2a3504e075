"""Two processes train with parameters on disk as one process does in memory, each with its own folder."""

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import several
from disk_models import LOSSES, batch_of, model_params, on_disk, sharded

from zerojax import offload
from zerojax.checkpoint import Checkpointer, export, import_params
from zerojax.data import shard_batches

pytestmark = pytest.mark.slow
RTOL = 1e-11  # float64 rounds at 1e-16; steps amplify it
DEVICES = 4


@dataclasses.dataclass(frozen=True)
class Run:
    loss: Callable
    steps: int = 3
    tx: Callable = lambda: optax.adamw(1e-2)
    config: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)


def weighted(params, batch):
    weight = batch["tokens"].sum().astype(params["uneven"].dtype)
    return LOSSES["remat_loop"](params, batch) * weight, weight


RUNS = {
    "loop": Run(LOSSES["loop"], steps=20),
    "clipped, frozen, and weights of microbatches": Run(
        weighted,
        tx=lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        config={"trainable": lambda path, _: "w" not in path},
        options={"weighted": True, "accumulate": 2},
    ),
    "whole leaves": Run(LOSSES["one_by_one"], tx=lambda: optax.lamb(1e-2)),
}


def trained(tx, run, state=None, place=lambda batch: batch, steps=None):
    """The loss of each step, and the last state. Without a `state`, parameters are initialised into storage."""
    step, losses = tx.train_step(run.loss, **run.options), []
    state = tx.create(tx.init_params(model_params)) if state is None else state
    for seed in range(steps or run.steps):
        state, metrics = step(state, place(batch_of(seed)))
        losses.append(float(metrics["loss"]))
    return losses, state


def results(tx, state):
    """The logical parameters and optimizer state, and what an evaluation returns."""
    loss = tx.eval_step(lambda params, batch: {"loss": LOSSES["loop"](params, batch), "rows": params["embed"][:3]})
    found = tx.unshard(state.params), tx.unshard(state.opt_state, state.params), loss(state.params, batch_of())
    return jax.tree.leaves(jax.device_get(found))


def own_rows(tx):
    """A function that places this process's half of a batch."""

    def place(batch):
        half = jax.tree.map(lambda x: np.array_split(x, 2)[jax.process_index()], batch)
        return next(iter(shard_batches([half], tx, rows="process")))

    return place


def train(folder):
    """With parameters on disk, where each process has its own folder."""
    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == DEVICES
    folder = Path(folder)
    own = folder / f"process {jax.process_index()}"
    own.mkdir()
    for name, run in RUNS.items():
        tx = on_disk(own / name, run.tx(), DEVICES, **run.config)
        losses, state = trained(tx, run, place=own_rows(tx) if name == "loop" else lambda batch: batch)
        found = {"losses": losses, "results": results(tx, state)}
        if name == "loop":
            with Checkpointer(folder / "saved") as saved:
                saved.save(state, step=run.steps)
                saved.wait()
                again = on_disk(own / "again", run.tx(), DEVICES)
                restored = saved.restore(again.create(jax.eval_shape(model_params))).state
            found["more"], restored = trained(again, run, restored, steps=3)
            offload.close(restored)
            export(state, folder / "exported")
        (own / f"{name}.pickle").write_bytes(pickle.dumps(found))
        offload.close(state)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which two processes have written their results, a checkpoint and an export."""
    folder = tmp_path_factory.mktemp("two")
    several.run(train, folder, devices=DEVICES // 2)
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
