"""Run by test_disk_on_two_processes.py, twice: train with parameters on disk, where each process has its own folder.

python disk_processes_child.py FOLDER PORT PROCESS
"""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np

process, folder = int(sys.argv[3]), Path(sys.argv[1])
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"localhost:{sys.argv[2]}", num_processes=2, process_id=process)

from disk_models import model_params, on_disk  # noqa: E402
from disk_runs import DEVICES, RUNS, results, trained  # noqa: E402

from zerojax import offload  # noqa: E402
from zerojax.checkpoint import Checkpointer, export  # noqa: E402
from zerojax.data import shard_batches  # noqa: E402

assert jax.device_count() == DEVICES


def own_rows(tx):
    """A function that places this process's half of a batch."""

    def place(batch):
        half = jax.tree.map(lambda x: np.array_split(x, 2)[process], batch)
        return next(iter(shard_batches([half], tx, rows="process")))

    return place


own = folder / f"process {process}"
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
