"""Many saves, in a process of its own: `many_saves.py FOLDER COUNT`; prints what it has at half time and after."""

import gc
import os
import re
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import optax

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import Checkpointer


def resources():
    """Descriptors, threads of Python, threads, and resident bytes.

    Not counted are those of TensorStore's pool, which has a limit and starts them when several wait at once.
    """
    gc.collect()
    resident = re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1]
    threads = threading.active_count(), sum(not in_pool(task) for task in Path("/proc/self/task").iterdir())
    return len(os.listdir("/proc/self/fd")), *threads, int(resident) << 10


def in_pool(task):
    """Whether a thread is of TensorStore's pool, or has ended since it was listed."""
    try:
        return (task / "comm").read_text().startswith("ts_pool_worker")
    except OSError:
        return True


def main(folder, count):
    tx = zero_shard(optax.adam(1e-2), stage=3, tuning=Tuning(persist_below=4))
    state = tx.create({"w": jnp.ones((256, 256)), "b": jnp.ones(5)})
    with Checkpointer(folder, keep=2) as checkpoints:
        for step in range(count):
            checkpoints.save(state, {"step": step}, step=step)
            if step in (count // 2, count - 1):
                checkpoints.wait()
                print(*resources(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
