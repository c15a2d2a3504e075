"""Compiled programs are kept in a folder: the second start of a run compiles none."""

import functools
import json
import os
import socket
import subprocess
import sys

import pytest

import zerojax

RUN = """
import collections, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
from zerojax import Offload, cache_compilations, zero_shard
from zerojax.checkpoint import Checkpointer

if sys.argv[4:]:
    jax.distributed.initialize(f"localhost:{sys.argv[5]}", num_processes=2, process_id=int(sys.argv[4]))
jax.jit(lambda x: x + 1)(1)  # compiled before the folder is known
cache_compilations(sys.argv[1])
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
offload = Offload(optimizer=sys.argv[2]) if sys.argv[2] else None
tx = zero_shard(optax.adamw(1e-2), stage=3, persist_below=0, offload=offload)
state = tx.create(tx.init_params(lambda key: {"w": jax.random.normal(key, (16, 8))}, jax.random.key(0)))
loss, batch = (lambda p, x: jnp.mean((x @ p["w"]) ** 2)), np.ones((8, 16), np.float32)
step = tx.train_step(loss)
with Checkpointer(sys.argv[3]) as checkpoints:
    if checkpoints.latest() is not None:
        state = checkpoints.restore(state).state
    for _ in range(2):
        state, metrics = step(state, batch)
    checkpoints.save(state)
print(json.dumps([events["cache_misses"], events["cache_hits"], float(tx.eval_step(loss)(state.params, batch))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("offload", "processes"), [("", 1), ("host", 2)])
def test_the_second_start_of_a_run_compiles_nothing(tmp_path, offload, processes):
    env = {key: x for key, x in os.environ.items() if not key.startswith("JAX_COMPILATION")}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}"}

    def run(checkpoints):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-c", RUN, tmp_path / "programs", offload, tmp_path / checkpoints]
        start = functools.partial(subprocess.Popen, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        children = [start([*command, *([str(i), port] if processes > 1 else [])]) for i in range(processes)]
        printed = [(*child.communicate(timeout=300), child.returncode) for child in children]
        assert not any(status for *_, status in printed), printed
        return [json.loads(out.splitlines()[-1]) for out, *_ in printed]  # the other lines are Gloo's

    first, second = run("a"), run("b")
    assert [loss for *_, loss in first] == [loss for *_, loss in second]
    (misses, *_), (again, hits, _) = first[0], second[0]  # On CPUs, JAX keeps only the programs of process 0.
    assert misses > 5
    assert (again, hits) == (0, misses)


def test_no_room_is_refused(tmp_path):
    for folder, size, message in (
        (tmp_path, 0, "max_bytes=.=0 is no size"),
        (tmp_path, "lots", "is no size"),
        ("", 9, "no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            zerojax.cache_compilations(folder, max_bytes=size)
    with pytest.raises(TypeError, match="is a number of bytes or a size"):
        zerojax.cache_compilations(tmp_path, max_bytes=[1])
