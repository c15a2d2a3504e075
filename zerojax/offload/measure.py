"""Measure the speeds of the link and of host memory, and choose where the update of offloaded state runs."""

from __future__ import annotations

import dataclasses
import functools
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
# Per parameter, an update reads a float32 gradient and parameter, and writes the parameter, in addition to its state.
BESIDE_STATE_BYTES = 12
GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Speed:
    """The bandwidth of one device of a mesh while all devices transfer or compute at once."""

    link: float  # bytes per second between host and device, per direction, while both directions are busy
    host: float  # bytes that an update in host memory reads and writes per second


@dataclasses.dataclass(frozen=True)
class Choice:
    """The place where the update runs, `"device"` or `"host"`, and the reason, as a text for the report."""

    update: str
    why: str


def choose(speed: Speed, state_bytes: float) -> Choice:
    """Return where the update is faster, for `state_bytes` bytes of offloaded state per parameter."""
    device = state_bytes / speed.link
    host = max((2 * state_bytes + BESIDE_STATE_BYTES) / speed.host, GRADIENT_BYTES / speed.link)
    faster = "device" if device <= host else "host"
    return Choice(
        faster,
        f"measured: the device takes {device * 1e9:.2f} ns a parameter ({state_bytes:.1f} bytes of state each way at "
        f"{speed.link / 1e9:.1f} GB/s), the host {host * 1e9:.2f} ns ({speed.host / 1e9:.1f} GB/s of host memory)",
    )


@functools.lru_cache(maxsize=4)
def measure(mesh: Mesh, axes: tuple[str, ...]) -> Speed:
    """Measure transfers and an update in host memory, on all devices at once. This takes about a second per mesh.

    All processes use the speeds that the first process measured, so that they make the same choice.
    """
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

    figures = Speed(link=4 * ELEMENTS / both_ways, host=12 * ELEMENTS / timed(once))
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        told = multihost_utils.broadcast_one_to_all(jnp.asarray([figures.link, figures.host]))
        return Speed(float(told[0]), float(told[1]))
    return figures


def timed(work: Callable[[], Any]) -> float:
    """Return the median time of some calls of `work` in seconds, after one warm-up call."""
    jax.block_until_ready(work())
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
