"""One process with eight devices and four with two train to the same numbers, and read each other's checkpoints."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import several
from models import awkward_batches, awkward_loss, awkward_params, floats_only

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.data import shard_batches

LAYOUTS = {"1x8": (), "4x2": ("1x8",), "again": ("4x2",)}  # which others' are restored
STEPS, SAVED = 20, 15
OPTIMIZER = floats_only(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)))


def own_rows(batch):
    return jax.tree.map(lambda x: np.split(x, jax.process_count())[jax.process_index()], batch)


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


def train(folder, *others):
    """Two stages and both views, and others' checkpoints."""
    folder, others = Path(folder), [Path(name) for name in others]
    for view, stage in (("global", 3), ("device", 1))[: 1 if folder.name == "again" else 2]:
        tx = zero_shard(OPTIMIZER, stage=stage, tuning=Tuning(persist_below=50), view=view)
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


def run(folder, name, others):
    """What the first process of a layout said, by stage and view."""
    processes = {"4x2": 4}.get(name, 1)
    how = {"processes": processes, "devices": 8 // processes, "flags": "--xla_backend_optimization_level=0"}
    outs = several.run(train, folder / name, *(folder / other for other in others), **how)
    said = [several.printed(out) for out in outs]
    assert all(lines == said[0] for lines in said), "the processes do not say the same"
    return {line["name"]: line for line in said[0]}


@pytest.mark.slow
def test_every_layout_trains_alike_and_goes_on_from_the_others_checkpoints(tmp_path):
    found = {name: run(tmp_path, name, others) for name, others in LAYOUTS.items()}
    assert list(found["1x8"]) == ["global-3", "device-1"]
    for name, one in found["1x8"].items():
        assert len(one["losses"]) == STEPS
        assert one["losses"][-1] < 0.9 * one["losses"][0]
        four = found["4x2"][name]  # the same programs on the same devices; gloo sums in another order
        np.testing.assert_allclose(four["losses"], one["losses"], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(four["weights"], one["weights"], rtol=1e-5, err_msg=name)
    losses = found["1x8"]["global-3"]["losses"][SAVED:]
    for layout, others in LAYOUTS.items():
        restored = found[layout]["global-3"]["restored"]
        assert set(restored) == set(others)
        for other, again in restored.items():
            np.testing.assert_allclose(again, losses, rtol=2e-6, err_msg=f"{layout} from {other}")
