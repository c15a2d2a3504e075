"""Run by test_process_layouts.py: two stages and both views on one layout of processes, and others' checkpoints.

python process_layouts_child.py PROCESSES FOLDER [OTHER...] PORT PROCESS
"""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

processes, folder, *others, port, process = sys.argv[1:]
processes, process = int(processes), int(process)
folder, others = Path(folder), [Path(name) for name in others]
if processes > 1:
    jax.distributed.initialize(f"localhost:{port}", num_processes=processes, process_id=process)

from models import awkward_batches, awkward_loss, awkward_params, floats_only  # noqa: E402

from zerojax import zero_shard  # noqa: E402
from zerojax.checkpoint import Checkpointer  # noqa: E402
from zerojax.data import shard_batches  # noqa: E402

STEPS, SAVED = 20, 15
optimizer = floats_only(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


def own_rows(batch):
    share = lambda x: x[process * (len(x) // processes) :][: len(x) // processes]
    return jax.tree.map(share, batch)


def trained(tx, step, state, start=0, saved=None):
    """`(losses, state)`; with `saved`, the state of step `SAVED` goes there."""
    losses, batches = [], map(own_rows, awkward_batches(STEPS)[start:])
    for number, batch in enumerate(shard_batches(batches, tx, rows="process"), start + 1):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if saved is not None and number == SAVED:
            with Checkpointer(saved) as checkpoints:
                checkpoints.save(state, step=number)
    return losses, state


def weights(tx, state):
    """Numbers of the parameters, for comparison."""
    return [float(np.abs(np.asarray(x, np.float64)).sum()) for x in jax.tree.leaves(tx.unshard(state.params))]


for view, stage in (("global", 3), ("device", 1))[: 1 if folder.name == "again" else 2]:
    tx = zero_shard(optimizer, stage=stage, persist_below=50, view=view)
    name, step = f"{view}-{stage}", tx.train_step(awkward_loss)
    create = functools.partial(tx.create, awkward_params())
    found = {"name": name, "restored": {}}
    if folder.name != "again":  # which restores alone
        found["losses"], state = trained(tx, step, create(), saved=folder / name)
        found["weights"] = weights(tx, state)
    for other in others if view == "global" else ():
        with Checkpointer(other / name, read_only=True) as checkpoints:
            restored = checkpoints.restore(create())
        found["restored"][other.name], _ = trained(tx, step, restored.state, start=restored.step)
    print(json.dumps(found), flush=True)
