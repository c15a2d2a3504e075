"""What this machine has for training, and what is wrong with it: the command `zerojax doctor`."""

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

from zerojax import compat
from zerojax.comm.mesh import resolve_mesh
from zerojax.offload.chunks import ChunkSpec
from zerojax.offload.disk import DiskStore
from zerojax.offload.host import giga, host_kind, host_sharding
from zerojax.offload.measure import measure
from zerojax.offload.remat import remat_policy

PACKAGES = ("zerojax", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
CHUNKS, CHUNK_BYTES = 16, 16 << 20


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        found: What was found, in words.
        ok: Whether that is as it should be.
    """

    name: str
    found: str
    ok: bool = True


def examine(path: Path) -> Iterator[Finding]:
    """Look at versions, devices, memory, bandwidths, and whether offloading gives right numbers here.

    Takes some seconds, and for a moment 256 MiB of disk.

    Args:
        path: A folder on the disk whose speed is wanted.
    """
    yield Finding("python", platform.python_version())
    yield from (Finding(name, version) for name in PACKAGES if (version := version_of(name)))
    yield from plugins()
    devices = jax.devices()
    yield Finding("devices", f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    kinds = sorted({memory.kind for memory in devices[0].addressable_memories()})
    yield Finding("memory kinds", ", ".join(kinds), ok="pinned_host" in kinds)
    yield from attempted("link and host memory", bandwidths)
    yield from attempted("update on the host", host_computes)
    yield from attempted("offloaded activations", activations)
    yield from attempted(f"disk at {path}", lambda: disk_speed(path))


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def plugins() -> Iterator[Finding]:
    """CUDA plugins, which must be of jaxlib's version: another one is ignored or fails late."""
    wanted = version_of("jaxlib")
    for name in PLUGINS:
        if found := version_of(name):
            same = found.split(".post")[0] == (wanted or "").split(".post")[0]
            yield Finding(
                name, found if same else f"{found}, but jaxlib is {wanted}: install the same version", ok=same
            )


def attempted(name: str, look: Callable[[], str]) -> Iterator[Finding]:
    """What a look finds; an error is a finding too."""
    try:
        yield Finding(name, look())
    except Exception as error:
        yield Finding(name, " ".join(f"{type(error).__name__}: {error}".split()), ok=False)


def bandwidths() -> str:
    """Between host and device, and within the host's memory."""
    speed = measure(resolve_mesh(None, ("data",)), ("data",))
    return (
        f"{speed.link / 1e9:.2f} GB/s each way per device, {speed.host / 1e9:.2f} GB/s of host memory per device "
        f"in updates, all devices at once"
    )


def host_computes() -> str:
    """Whether a program over arrays in host memory gives the right numbers.

    Raises:
        ArithmeticError: If it does not.
    """
    mesh = resolve_mesh(None, ("data",))
    where = host_sharding(mesh, jax.sharding.PartitionSpec())
    x = np.arange(1024, dtype=np.float32)
    found = jax.jit(compat.on_host(lambda x: 2 * x + 1), out_shardings=where)(jax.device_put(jnp.asarray(x), where))
    if not np.array_equal(np.asarray(found), 2 * x + 1):
        raise ArithmeticError("2 x + 1 in host memory is not 2 x + 1. Use Offload(update='device').")
    return f"right, in {host_kind(mesh)} memory"


def activations() -> str:
    """Whether gradients are right when activations are offloaded inside a scan."""
    remat_policy("zerojax_probe_input")
    return "gradients inside a scan are right"


def disk_speed(path: Path) -> str:
    """What the disk tier writes and reads here."""
    spec = ChunkSpec("probe", (((CHUNK_BYTES // 4,), "float32"),))
    data = np.random.default_rng(0).random(CHUNK_BYTES // 4, np.float32)
    with (
        tempfile.TemporaryDirectory(dir=path) as folder,
        DiskStore.create(Path(folder, "probe"), [spec] * CHUNKS, owner="doctor") as store,
    ):
        begin = time.perf_counter()
        for i in range(CHUNKS):
            store.write(i, [data], step=0)
        store.flush()
        written = time.perf_counter()
        ahead = [store.read(i, step=0) for i in range(3)]
        for i in range(CHUNKS):
            ahead[i].result().release()
            if i + 3 < CHUNKS:
                ahead.append(store.read(i + 3, step=0))
        done = time.perf_counter()
    size = CHUNKS * CHUNK_BYTES
    return f"writes {giga(round(size / (written - begin)))}/s, reads {giga(round(size / (done - written)))}/s"
