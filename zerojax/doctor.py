"""Check versions, devices and bandwidths, and whether offloading is correct here, for the command `zerojax doctor`."""

from __future__ import annotations

import dataclasses
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import compat
from zerojax.comm.mesh import resolve_mesh
from zerojax.config import Offload, Precision
from zerojax.offload.chunks import ChunkSpec
from zerojax.offload.disk import DiskStore
from zerojax.offload.host import host_kind, host_sharding
from zerojax.offload.measure import measure
from zerojax.offload.remat import remat_policy
from zerojax.planning.estimate import estimate
from zerojax.units import format_bytes

PACKAGES = ("zerojax", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
CHUNKS, CHUNK_BYTES, PREFETCH = 16, 16 << 20, 3
MOST_SECONDS = 5  # then no further chunk is written, so that a slow disk does not take long


@dataclasses.dataclass(frozen=True)
class Finding:
    """The name of a check, its result or error, and whether it passed."""

    name: str
    result: str
    ok: bool = True


def examine(path: Path) -> Iterator[Finding]:
    """Yield the result of each check. This takes some seconds, and 256 MiB of space in the folder `path`."""
    yield Finding("python", platform.python_version())
    yield from (Finding(name, version) for name in PACKAGES if (version := version_of(name)))
    yield from plugins()
    devices = jax.devices()
    yield Finding("devices", f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    kinds = sorted({memory.kind for memory in devices[0].addressable_memories()})
    yield Finding("memory kinds", ", ".join(kinds), ok="pinned_host" in kinds)
    yield run_check("link and host memory", bandwidths)
    yield run_check("update on the host", host_compute)
    yield run_check("offloaded activations", offloaded_activations)
    yield run_check(f"disk at {path}", lambda: disk_bandwidth(path))


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def plugins() -> Iterator[Finding]:
    """Check that the CUDA plugins have jaxlib's version. JAX ignores a plugin of another version, or fails late."""
    required = version_of("jaxlib")
    for name in PLUGINS:
        if version := version_of(name):
            ok = version.split(".post")[0] == (required or "").split(".post")[0]
            result = version if ok else f"{version}, but jaxlib is {required}: install the same version"
            yield Finding(name, result, ok)


def run_check(name: str, check: Callable[[], str]) -> Finding:
    """Return the result of a check. A check that raises an error did not pass."""
    try:
        return Finding(name, check())
    except Exception as error:
        return Finding(name, " ".join(f"{type(error).__name__}: {error}".split()), ok=False)


def bandwidths() -> str:
    """Measure the bandwidths of the link between host and device, and of host memory."""
    speed = measure(resolve_mesh(None, ("data",)), ("data",))
    return (
        f"{format_bytes(speed.link)}/s each way per device, {format_bytes(speed.host)}/s of host memory per device "
        f"in updates, all devices at once"
    )


def host_compute() -> str:
    """Check that a program over arrays in host memory gives correct results."""
    mesh = resolve_mesh(None, ("data",))
    on_host = host_sharding(mesh, jax.sharding.PartitionSpec())
    x = np.arange(1024, dtype=np.float32)
    affine = jax.jit(compat.on_host(lambda x: 2 * x + 1), out_shardings=on_host)
    if not np.array_equal(np.asarray(affine(jax.device_put(jnp.asarray(x), on_host))), 2 * x + 1):
        raise ArithmeticError("2 x + 1 in host memory is not 2 x + 1. Use Offload(update='device').")
    return f"correct, in {host_kind(mesh)} memory"


def offloaded_activations() -> str:
    """Check that this backend and jaxlib can offload activations."""
    remat_policy("any_name")
    return "supported here"


def disk_bandwidth(path: Path) -> str:
    """Measure the bandwidths of a disk, and compute the least time of a step with parameters on this disk."""
    written, read = chunk_bandwidths(path)
    offload = Offload(params="disk", optimizer="disk", path=path)
    row = estimate(1e9, tx=optax.adamw(1e-3), devices=1, stages=(3,), precision=Precision(), offload=offload)[3]
    seconds = row.read / read + row.written / written  # of one step, per 1e9 parameters
    tokens = seconds * 1e12 / (8 * 1e9)  # 8 FLOPs per parameter and token, with recomputation
    return (
        f"writes {format_bytes(written)}/s, reads {format_bytes(read)}/s; a step of AdamW with float32 parameters on "
        f"disk takes {seconds:.3g} s or more per billion parameters; the disk is the limit below {tokens:,.0f} tokens "
        f"per step for each TFLOP/s of this machine's devices"
    )


def chunk_bandwidths(path: Path) -> tuple[float, float]:
    """Return the bytes per second at which offloaded chunks are written to a folder, and read from it."""
    data = np.random.default_rng(0).random(CHUNK_BYTES // 4, np.float32)
    spec = ChunkSpec("probe", (((CHUNK_BYTES // 4,), data.dtype),))
    with (
        tempfile.TemporaryDirectory(dir=path) as folder,
        DiskStore(Path(folder, "probe"), [spec] * CHUNKS) as store,
    ):
        count, begin = 0, time.perf_counter()
        while count < CHUNKS and (count == 0 or time.perf_counter() - begin < MOST_SECONDS):
            store.write(count, [data], version=0)
            count += 1
        store.flush()
        written = time.perf_counter()
        reads = [store.read(i, version=0) for i in range(min(PREFETCH, count))]
        for i in range(count):
            reads[i].result().release()
            if i + PREFETCH < count:
                reads.append(store.read(i + PREFETCH, version=0))
        done = time.perf_counter()
    size = count * CHUNK_BYTES
    return size / (written - begin), size / (done - written)
