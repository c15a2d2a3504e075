"""What the pieces of `gpu_work.py` share: peaks, batches and timed steps."""

import resource
import statistics
import time

import jax
import numpy as np
import yardstick
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def peak_device():
    """Of the fullest device so far; None where the backend does not say, as on CPU."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((x for x in found if x is not None), default=None)


def data_mesh():
    return Mesh(np.array(jax.devices()), ("data",))


def shapes_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def spread(values):
    """Median, least and most."""
    return [statistics.median(values), min(values), max(values)]


def batch_of(tx, size, rows, length):
    tokens = jax.random.randint(
        jax.random.key(1), (rows * jax.device_count(), length), 0, yardstick.SIZES[size].vocabulary
    )
    return jax.device_put(tokens, NamedSharding(tx.config.mesh, PartitionSpec("data")))


def timed_steps(taken, state, batch, rounds, finite=True):
    """Seconds of each of some steps, after two that are not counted. With `finite`, the loss must be."""
    seconds = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        state, metrics = taken(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
    if finite and not np.isfinite(metrics["loss"]):
        raise FloatingPointError(f"The loss is {metrics['loss']}.")
    return seconds[2:]


def peak_rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
