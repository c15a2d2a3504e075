"""Measure the speeds of the link and of host memory, for `zerojax doctor`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from zerojax import compat
from zerojax.offload.host import host_kind, host_sharding, to_memory

ELEMENTS = 4 << 20
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Speed:
    """The bandwidth of one device of a mesh while all devices transfer or compute at once."""

    link: float  # bytes per second between host and device, per direction, while both directions are busy
    host: float  # bytes that an update in host memory reads and writes per second


def measure(mesh: Mesh, axes: tuple[str, ...]) -> Speed:
    """Measure transfers and an update in host memory, on all devices at once. This takes about a second."""
    spec, count = PartitionSpec(axes), math.prod(mesh.shape[axis] for axis in axes)
    host = host_sharding(mesh, spec)
    on_host = jax.device_put(jnp.zeros(ELEMENTS * count, jnp.float32), host)
    on_device = to_memory(on_host, "device")
    both_ways = timed(lambda: (to_memory(on_host, "device"), to_memory(on_device, host_kind(mesh))))
    update = jax.jit(compat.on_host(lambda m, g: 0.9 * m + 0.1 * g), donate_argnums=0, out_shardings=host)
    state = to_memory(on_device, host_kind(mesh))

    def once() -> Any:
        nonlocal state
        state = update(state, on_host)
        return state

    return Speed(link=4 * ELEMENTS / both_ways, host=12 * ELEMENTS / timed(once))


def timed(work: Callable[[], Any]) -> float:
    """Return the median time of some calls of `work` in seconds, after one warm-up call."""
    jax.block_until_ready(work())
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
