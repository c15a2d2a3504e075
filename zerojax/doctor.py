"""Check versions, devices and rates, and whether offloading is correct here, for the command `zerojax doctor`."""

import collections
import contextlib
import dataclasses
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax.comm.mesh import resolve_mesh
from zerojax.config.precision import Precision
from zerojax.offload.disk import ChunkSpec, DiskStore
from zerojax.offload.host import (
    CAP_VARIABLE,
    available_bytes,
    compute_on_host,
    host_kind,
    host_sharding,
    pinned_cap,
    to_memory,
)
from zerojax.offload.options import Offload
from zerojax.planning.estimate import estimate
from zerojax.units import format_bytes

PACKAGES = ("zerojax", "jax", "jaxlib", "optax", "flax", "orbax-checkpoint")
PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
ROUNDS = 5
ELEMENTS = 4 << 20  # per device, of the arrays that the link copies and the host updates
CHUNKS, CHUNK_BYTES, PREFETCH = 16, 16 << 20, 3
MOST_SECONDS = 5  # after this time, no further chunk is written to the measured disk
# The width of the measured products, their number in a chain, and the bytes that are gathered and that memory copies.
# A product chain takes longer than a gather, so that a gather can run during the chain.
WORK = {"gpu": (8192, 4, 1 << 30), "cpu": (256, 2, 1 << 20)}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The name of a check, its result or error, whether it passed, and the rates that it measured (see `Rates`)."""

    name: str
    result: str
    ok: bool = True
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def examine(path: Path) -> Iterator[Finding]:
    """Yield the result of each check. This takes some seconds, and 256 MiB of space in the folder `path`."""
    yield Finding("python", platform.python_version())
    yield from (Finding(name, version) for name in PACKAGES if (version := version_of(name)))
    yield from plugins()
    devices = jax.devices()
    kind = devices[0].device_kind
    yield Finding("devices", f"{len(devices)} x {kind} ({devices[0].platform})", measured={"device": kind})
    kinds = sorted({memory.kind for memory in devices[0].addressable_memories()})
    yield Finding("memory kinds", ", ".join(kinds), ok="pinned_host" in kinds)
    yield Finding("host memory", host_memory(devices[0].platform))
    yield run_check("link and host memory", bandwidths)
    yield run_check("products and collectives", device_rates)
    yield run_check("update on the host", host_compute)
    yield run_check("offloaded activations", lambda: offloaded_activations(jax.local_devices()[0]))
    yield run_check(f"disk at {path}", lambda: disk_bandwidth(path))


def version_of(package: str) -> str | None:
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


def run_check(name: str, check: Callable[[], str | tuple[str, dict[str, Any]]]) -> Finding:
    try:
        found = check()
        text, measured = (found, {}) if isinstance(found, str) else found
        return Finding(name, text, measured=measured)
    except Exception as error:
        return Finding(name, " ".join(f"{type(error).__name__}: {error}".split()), ok=False)


def bandwidths() -> tuple[str, dict[str, Any]]:
    """Measure transfers in both directions, and an update in host memory, on all devices at once."""
    mesh = resolve_mesh(None, ("data",))
    host, kind = host_sharding(mesh, jax.P("data")), host_kind(mesh)
    on_host = jax.device_put(jnp.zeros(ELEMENTS * mesh.size, jnp.float32), host)
    on_device = to_memory(on_host, "device")
    link = 4 * ELEMENTS / timed(lambda: (to_memory(on_host, "device"), to_memory(on_device, kind)))
    update = jax.jit(compute_on_host(lambda m, g: 0.9 * m + 0.1 * g), donate_argnums=0, out_shardings=host)
    state = to_memory(on_device, kind)

    def step() -> jax.Array:
        nonlocal state
        state = update(state, on_host)
        return state

    updated = 12 * ELEMENTS / timed(step)
    text = (
        f"{format_bytes(link)}/s each way per device, {format_bytes(updated)}/s of host memory per device in updates, "
        f"all devices at once"
    )
    return text, {"host_link": link}


def timed(work: Callable[[], Any]) -> float:
    """Return the median time of some calls of `work` in seconds, after one warm-up call."""
    jax.block_until_ready(work())
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(work())
        seconds.append(time.perf_counter() - begin)
    return median(seconds)


def host_memory(device: str) -> str:
    available = available_bytes()
    free = "an unknown amount is free" if available is None else f"{format_bytes(available)} is free"
    if device != "gpu":
        return free
    return (
        f"{free}, and JAX pins up to twice what offloaded arrays need, but at most {format_bytes(pinned_cap())} "
        f"({CAP_VARIABLE}, in GB)"
    )


def device_rates() -> tuple[str, dict[str, Any]]:
    """Measure the rates of products, memory and gathers on all local devices at once, and how gathers slow products."""
    devices = jax.local_devices()
    width, chain, size = WORK.get(devices[0].platform, WORK["cpu"])
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    count = len(devices)
    size -= size % (2 * count)
    normal = lambda shape, spec: jax.jit(  # zeros or ones would take less power, and so run at a higher clock
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16),
        out_shardings=jax.NamedSharding(mesh, spec),
    )()
    split, whole = jax.P("data"), jax.P()
    x, w = normal((count * width, width), split), normal((width, width), whole) / width**0.5
    wide, many = normal((size // 2,), split), normal((count, size // 2), split)
    multiply = lambda x, w: jax.lax.fori_loop(0, chain, lambda _, x: x @ w, x)
    gather = lambda wide: jax.lax.all_gather(wide, "data", tiled=True)
    specs = {"mesh": mesh, "check_vma": False}
    products = jax.jit(jax.shard_map(multiply, in_specs=(split, whole), out_specs=split, **specs))
    gathered = jax.jit(jax.shard_map(gather, in_specs=split, out_specs=whole, **specs))
    both = lambda x, w, wide: (multiply(x, w), gather(wide))
    together = jax.jit(jax.shard_map(both, in_specs=(split, whole, split), out_specs=(split, whole), **specs))
    multiplying = timed(lambda: products(x, w))
    rate, memory = 2 * width**3 * chain / multiplying, 2 * size / timed(lambda: jax.jit(jnp.negative)(many))
    text = f"{rate / 1e12:.3g} TFLOP/s in bfloat16 and {format_bytes(memory)}/s of memory per device"
    measured: dict[str, Any] = {"products": {"bf16": rate}, "memory": memory}
    if count == 1:
        return f"{text}; collectives need several devices", measured
    gathering = timed(lambda: gathered(wide))
    measured["link"] = size * (count - 1) / count / gathering
    text += f", gathers at {format_bytes(measured['link'])}/s"
    slowed = slowdown(multiplying, gathering, timed(lambda: together(x, w, wide)))
    if slowed is None:
        return f"{text}, which do not overlap with products here", measured
    return f"{text}, which slow products by {slowed:.0%}", measured | {"slowdown": slowed}


def slowdown(products: float, gather: float, both: float) -> float | None:
    """Return the share `s` by which a gather slows products, or None if both do not overlap measurably.

    The arguments are seconds: of products alone, of a gather alone, and of both together. During a
    gather of `g` seconds, products do the work of only `g / (1 + s)` seconds, and so lose `g * s / (1 + s)` seconds.
    """
    lost = max(0.0, both - products) / gather
    return lost / (1 - lost) if lost < 0.9 else None


def host_compute() -> str:
    mesh = resolve_mesh(None, ("data",))
    on_host = host_sharding(mesh, jax.sharding.PartitionSpec())
    x = np.arange(1024, dtype=np.float32)
    affine = jax.jit(compute_on_host(lambda x: 2 * x + 1), out_shardings=on_host)
    if not np.array_equal(np.asarray(affine(jax.device_put(jnp.asarray(x), on_host))), 2 * x + 1):
        raise ArithmeticError("2 x + 1 in host memory is not 2 x + 1. Use Offload(update='device').")
    return f"correct, in {host_kind(mesh)} memory"


def offloaded_activations(device: jax.Device) -> str:
    """Check that the kinds of memory and the version of jaxlib allow `jax.checkpoint` to offload activations."""
    needed, kinds = (0, 11, 2), sorted({memory.kind for memory in device.addressable_memories()})
    if "pinned_host" not in kinds:  # JAX treats every other kind as device memory, and keeps the activations there
        raise RuntimeError(f"the devices have the memory kinds {', '.join(kinds) or 'none'}, not pinned_host")
    found = tuple(int(number) for number in re.findall(r"\d+", version_of("jaxlib") or "0")[:3])
    if device.platform in ("gpu", "cuda", "rocm") and found < needed:
        raise RuntimeError(
            f"this jaxlib reads activations of a scan back in the wrong order (openxla/xla#46231), so gradients would "
            f"be wrong. Install jaxlib {'.'.join(map(str, needed))} or newer"
        )
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
    data = np.random.default_rng(0).random(CHUNK_BYTES // 4, np.float32)
    spec = ChunkSpec("probe", (((CHUNK_BYTES // 4,), data.dtype),))
    with (
        tempfile.TemporaryDirectory(dir=path) as folder,
        contextlib.closing(DiskStore(Path(folder, "probe"), [spec] * CHUNKS)) as store,
    ):
        count, begin = 0, time.perf_counter()
        while count < CHUNKS and (count == 0 or time.perf_counter() - begin < MOST_SECONDS):
            store.write(count, [data])
            count += 1
        store.flush()
        written = time.perf_counter()
        reads = collections.deque(store.read(i) for i in range(min(PREFETCH, count)))
        for i in range(count):
            reads.popleft().result()
            if i + PREFETCH < count:
                reads.append(store.read(i + PREFETCH))
        done = time.perf_counter()
    size = count * CHUNK_BYTES
    return size / (written - begin), size / (done - written)
