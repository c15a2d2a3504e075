"""Run by test_watchdog.py, twice: process 1 hangs in its data, or is killed, and process 0 has a watchdog.

python watchdog_child.py [killed] PORT PROCESS
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

*killed, port, process = sys.argv[1:]
process = int(process)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

from zerojax import zero_shard  # noqa: E402

tx = zero_shard(optax.sgd(1e-2), stage=3, persist_below=1)
step = tx.train_step(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2), timeout=4)
state = tx.create({"w": jnp.ones((4, 16))})
for number in range(10):
    if number == 3 and process == 1:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        print("hangs", flush=True)
        time.sleep(600)
    state, metrics = step(state, np.ones((8, 4), np.float32))
    jax.block_until_ready(metrics["loss"])
    print(f"done {number}", flush=True)
