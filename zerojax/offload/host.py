"""Find a backend's kind of host memory, check that there is enough of it, and copy arrays to it and back."""

import contextlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.comm.processes import Processes
from zerojax.units import format_bytes

# In order of preference. A device reads pinned memory without an intermediate copy.
KINDS = ("pinned_host", "unpinned_host")
# The CUDA backend can pin at most this many gigabytes, unless the environment variable sets another limit.
CAP_VARIABLE, CAP_GB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
FITS = "fits"  # the message of a process whose host has enough memory


def host_kind(mesh: Mesh) -> str:
    """Return the kind of host memory that the mesh's devices can access, or raise a `ValueError` if there is none."""
    device = mesh.devices.flat[0]
    # The device of a topology, for which programs are compiled ahead of time, does not list its memories.
    kinds = [memory.kind for memory in getattr(device, "addressable_memories", lambda: ())()] or list(KINDS)
    for kind in KINDS:
        if kind in kinds:
            return kind
    raise ValueError(
        f"The {device.platform} backend has no host memory that its devices reach: it has {', '.join(kinds)}, and one "
        f"of {', '.join(KINDS)} is required. Train without Offload, with more devices or microbatches (accumulate=)."
    )


def host_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind=host_kind(mesh))


def to_memory(x: jax.Array, kind: str) -> jax.Array:
    """Copy an array to memory of this `kind`, asynchronously. Return it unchanged if it is there already."""
    return x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind))


def check_host_memory(mesh: Mesh, bytes_per_device: int, what: str) -> None:
    """Raise a `MemoryError` on all processes if the host of any process has less memory than the host's devices need.

    `what` names the arrays in the error. If a process does not call this function, the others raise a `TimeoutError`.
    """
    problems = Processes("host memory").exchange("allocate", _host_memory_problem(mesh, bytes_per_device, what) or FITS)
    found = {index: problem for index, problem in enumerate(problems) if problem != FITS}
    if own := found.get(jax.process_index()):
        raise MemoryError(own)
    for index, problem in found.items():
        raise MemoryError(f"On process {index}: {problem}")


def _host_memory_problem(mesh: Mesh, bytes_per_device: int, what: str) -> str | None:
    """Explain why the memory of this process's host does not suffice, or return None if it suffices."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    needed, available = bytes_per_device * len(local), available_bytes()
    text = f"{what} needs {format_bytes(needed)} of host memory on this host ({len(local)} devices)"
    free = "an unknown amount" if available is None else format_bytes(available)
    if available is not None and needed > available:
        return (
            f"{text}, and {free} is free. Offload less (Offload(fraction=)), to disk "
            f'(optimizer="disk"), or use more hosts.'
        )
    if not (local and local[0].platform in ("gpu", "cuda", "rocm")):
        return None
    if needed > (cap := pinned_cap()):
        return f"{text}, and JAX pins {format_bytes(cap)} at most. Set {pinned_limit(needed)}; {free} is free."
    # XLA's allocator of pinned memory takes regions of 2 MiB, 4 MiB and so on, up to the cap in all.
    if available is not None and (taken := min(cap, 2 * needed)) > available:
        return (
            f"{text}. JAX doubles the regions that it pins, so it would take up to {format_bytes(taken)}, and {free} "
            f"is free. Set {pinned_limit(needed)}, so that it takes no more than it needs."
        )
    return None


def pinned_cap() -> int:
    """Return the limit, in bytes, of the host memory that JAX pins for the GPUs of this process."""
    return int(os.environ.get(CAP_VARIABLE) or CAP_GB) * 10**9


def pinned_limit(needed: int) -> str:
    """Return the text, for a message, of the setting with which JAX pins little more than `needed` bytes."""
    return f"{CAP_VARIABLE}={-(-needed * 11 // 10**10)} before JAX starts"


def available_bytes(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return how many bytes can be allocated without swapping in this container, or None if that is not known."""
    limits: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path(meminfo).read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) << 10)
    with contextlib.suppress(OSError, ValueError):
        limit, used = (Path(cgroup, name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            limits.append(int(limit) - int(used))
    return min(limits, default=None)


def compute_on_host(fn: Callable) -> Callable:
    """Return a function that runs `fn` on the CPU of the host. Up to jax 0.11, `compute_on` is a decorator."""
    from jax.experimental import compute_on

    of_jax: Any = compute_on.compute_on
    if "out_memory_spaces" in inspect.signature(of_jax).parameters:
        return of_jax(fn, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    return of_jax("device_host")(jax.jit(fn))
