"""A step that takes longer than it may ends its process, which says what it waits for."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax import zero_shard
from zerojax.train.watchdog import EXIT_STATUS

HANGS = """
import time, jax, jax.numpy as jnp, numpy as np, optax
from zerojax import zero_shard

def loss(params, batch):
    jax.debug.callback(lambda x: time.sleep(60 * (x > 1)), batch[0, 0])
    return jnp.mean((batch @ params["w"]) ** 2)

tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
step, state = tx.train_step(loss, timeout=1), tx.create({"w": jnp.ones((4, 16))})
for number in range(5):
    state, metrics = step(state, np.full((8, 4), number, np.float32))
jax.block_until_ready(state)
"""


def test_a_step_that_hangs_ends_the_process():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == EXIT_STATUS, done.stderr
    assert "zerojax: step 2 did not end within timeout=1 s on process 0 of 1." in done.stderr
    assert 'File "<string>", line 6 in <lambda>' in done.stderr  # the stacks of all threads
    assert "zerojax: the first collective of a step is gather of ['w'] <string>:" in done.stderr


@pytest.mark.slow
def test_it_names_the_process_it_waits_for_and_the_others_end_too():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    child = [sys.executable, Path(__file__).parent / "watchdog_child.py"]
    flags = "--xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    options = {"env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen([*child, str(i), port], **options) for i in range(2)]
    begun = time.monotonic()
    out, errors = children[0].communicate(timeout=120)
    assert children[0].returncode == EXIT_STATUS, errors
    assert "step 3 did not end within timeout=4 s on process 0 of 2" in errors
    assert "process 1 was last seen in step 2 with <lambda>: process 0 waits for it in a collective" in errors
    assert "the first collective of a step is gather of ['w']" in errors
    assert out.splitlines()[-1] == "done 2"
    _, errors = children[1].communicate(timeout=120)  # ended by jax, whose coordination service is gone
    assert children[1].returncode not in (0, None), errors
    said = "zerojax: process 0 of 2 ended, and JAX's coordination service with it, after: step 3 did not end within"
    assert said in errors
    assert time.monotonic() - begun < 120


def test_steps_in_time_are_left_alone_and_the_thread_ends_with_the_step():
    tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
    step, state = (
        tx.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), timeout=0.5),
        tx.create({"w": jnp.ones((4, 16))}),
    )
    for _ in range(3):
        state, metrics = step(state, np.ones((8, 4), np.float32))
        time.sleep(0.3)
    jax.block_until_ready(metrics)
    time.sleep(1)  # no step is in progress, so nothing is late
    (thread,) = [one for one in threading.enumerate() if one.name == "zerojax watchdog"]
    with pytest.raises(ValueError, match="used up"):
        step(tx.create({"w": jnp.ones((4, 16))}).replace(step=donated()), np.ones((8, 4), np.float32))
    del step
    thread.join(10)
    assert not thread.is_alive()


def donated():
    x = jnp.zeros((), jnp.int32)
    x.delete()
    return x


@pytest.mark.parametrize(
    ("timeout", "error", "message"), [("10", TypeError, "is a number of seconds"), (0, ValueError, "above 0 seconds")]
)
def test_what_is_no_time_is_refused(timeout, error, message):
    with pytest.raises(error, match=message):
        zero_shard(optax.sgd(1e-2), stage=1).train_step(lambda p, x: 0.0, timeout=timeout)
