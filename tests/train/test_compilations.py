"""Compiled programs are kept in a folder: the second start of a run compiles none."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several

from zerojax import Offload, Tuning, cache_compilations, zero_shard
from zerojax.checkpoint import Checkpointer


def train(programs, checkpoints, where):
    """Print how many programs were compiled and how many were read, and the loss at the end."""
    jax.jit(lambda x: x + 1)(1)  # compiled before the folder is known
    cache_compilations(programs)
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    offload = None if where == "device" else Offload(optimizer=where)
    tx = zero_shard(optax.adamw(1e-2), stage=3, tuning=Tuning(persist_below=0), offload=offload)
    state = tx.create(tx.init_params(lambda key: {"w": jax.random.normal(key, (16, 8))}, jax.random.key(0)))
    loss, batch = (lambda p, x: jnp.mean((x @ p["w"]) ** 2)), np.ones((8, 16), np.float32)
    step = tx.train_step(loss)
    with Checkpointer(checkpoints) as files:
        if files.latest() is not None:
            state = files.restore(state).state
        for _ in range(2):
            state, _ = step(state, batch)
        files.save(state)
    value = float(tx.eval_step(loss)(state.params, batch))
    print(json.dumps({"misses": events["cache_misses"], "hits": events["cache_hits"], "loss": value}))


@pytest.mark.slow
@pytest.mark.parametrize(("where", "processes"), [("device", 1), ("host", 2)])
def test_the_second_start_of_a_run_compiles_nothing(tmp_path, where, processes):
    def run(name):
        options = {"processes": processes, "devices": 4 // processes}
        outs = several.run(train, tmp_path / "programs", tmp_path / name, where, **options)
        return [several.printed(out)[-1] for out in outs]

    first, second = run("a"), run("b")
    assert [one["loss"] for one in first] == [one["loss"] for one in second]
    # On CPUs, JAX keeps only the programs of process 0.
    assert first[0]["misses"] > 5
    assert (second[0]["misses"], second[0]["hits"]) == (0, first[0]["misses"])


def test_no_room_is_refused(tmp_path):
    for folder, size, message in (
        (tmp_path, 0, "max_bytes=.=0 is no size"),
        (tmp_path, "lots", "is no size"),
        ("", 9, "no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_compilations(folder, max_bytes=size)
    with pytest.raises(TypeError, match="is a number of bytes or a size"):
        cache_compilations(tmp_path, max_bytes=[1])
