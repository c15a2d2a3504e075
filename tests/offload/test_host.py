"""Host memory, its speed, and the files of a state: decided from figures, without a model and without a GPU."""

import contextlib
import errno
import fcntl
import functools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from hypothesis import given
from hypothesis import strategies as st

from zerojax import Offload, Tuning, zero_shard
from zerojax.offload import disk, folder, host
from zerojax.offload.disk import BLOCK, ChunkSpec, checksum
from zerojax.offload.folder import DiskError

F32 = np.dtype("float32")
ON_DISK = functools.partial(Offload, params="disk", optimizer="disk", path=".")
GB = 10**9


def fake_mesh(platform="cpu", kinds=None, process=0, count=2):
    device = SimpleNamespace(platform=platform, process_index=process)
    if kinds is not None:
        device.addressable_memories = lambda: [SimpleNamespace(kind=kind) for kind in kinds]
    return SimpleNamespace(devices=np.array([device] * count))


@pytest.mark.parametrize(
    ("kinds", "kind"),
    [
        (("device", "unpinned_host", "pinned_host"), "pinned_host"),
        (("device", "unpinned_host"), "unpinned_host"),
        (None, "pinned_host"),  # a device that is not there
    ],
)
def test_pinned_memory_is_preferred(kinds, kind):
    assert host.host_kind(fake_mesh(kinds=kinds)) == kind


def test_an_array_is_copied_to_other_memory_alone():
    x = jnp.ones(3)
    moved = host.to_memory(x, "pinned_host")
    assert moved.sharding.memory_kind == "pinned_host"
    assert host.to_memory(x, "device") is x
    assert host.to_memory(moved, "pinned_host") is moved


def test_a_backend_without_host_memory_is_named():
    with pytest.raises(ValueError, match=r"The tpu backend has no host memory .* it has device, and"):
        host.host_kind(fake_mesh("tpu", ("device",)))


@pytest.mark.parametrize(
    ("platform", "per_device", "available", "message"),
    [
        ("cpu", 10, 20, None),
        ("cpu", 10, 19, r"state needs 20 B of host memory on this host \(2 devices\), and 19 B is free"),
        ("cpu", 10, None, None),
        ("gpu", 32 * GB, 65 * GB, None),  # as much as JAX pins
        ("gpu", 33 * GB, 70 * GB, r"JAX pins 64 GB at most\. Set \w+=73 before JAX starts; 70 GB is free"),
        ("gpu", 9 * GB, 36 * GB, None),  # the allocator's regions double, up to twice the need
        ("gpu", 9 * GB, 35 * GB, r"would take up to 36 GB, and 35 GB is free\. Set \w+=20 before JAX starts"),
        ("gpu", 33 * GB, None, "an unknown amount is free"),
        ("cpu", 33 * GB, 70 * GB, None),  # nothing is pinned
    ],
)
def test_too_little_host_memory_is_found(platform, per_device, available, message, monkeypatch):
    monkeypatch.delenv(host.CAP_VARIABLE, raising=False)
    monkeypatch.setattr(host, "available_bytes", lambda: available)
    problem = lambda process: host._host_memory_problem(fake_mesh(platform, process=process), per_device, "state")
    if message is None:
        assert problem(0) is None
    else:
        with pytest.raises(MemoryError, match=message):
            raise MemoryError(problem(0))
        assert problem(1) is None, "another host's devices need nothing here"
    monkeypatch.setenv(host.CAP_VARIABLE, str(2 * per_device * 11 // (10 * GB) + 1))  # as the message says
    monkeypatch.setattr(host, "available_bytes", lambda: available and max(available, 80 * GB))
    if platform == "gpu":
        assert problem(0) is None


def test_free_memory_is_the_smaller_of_the_hosts_and_the_containers(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    free = lambda: host.available_bytes(str(meminfo), str(cgroup))
    assert free() is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:   8 kB\n")
    assert free() == 8192
    cgroup.mkdir()
    for limit, used, expected in (("max", "1", 8192), ("5000", "1000", 4000), ("90000", "1000", 8192)):
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text(used + "\n")
        assert free() == expected


# --- the bytes of a chunk, and the folder of its file ------------------------------------------------------------


@pytest.mark.parametrize(("elements", "blocks"), [(0, 1), (1, 1), (1024, 1), (1025, 2), (2048, 2)])
def test_a_chunk_is_whole_blocks(elements, blocks):
    spec = ChunkSpec("c", (((elements,), F32), ((0,), F32)))
    assert spec.bytes == blocks * BLOCK
    assert len(disk.aligned_buffer(spec.bytes)) == spec.bytes


@given(st.integers(0, 2 * BLOCK - 1), st.integers(1, 255))
def test_a_changed_byte_changes_the_checksum(place, by):
    content = bytearray(range(256)) * (2 * BLOCK // 256)
    before = checksum(memoryview(content))
    content[place] ^= by
    assert checksum(memoryview(content)) != before


def test_a_claim_counts_the_room_of_what_it_removes(tmp_path, monkeypatch):
    folder.lock(tmp_path).release()
    (tmp_path / "chunk_00000.bin").write_bytes(bytes(2 * BLOCK))
    blocks = os.stat(tmp_path / "chunk_00000.bin").st_blocks * 512
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=100))
    message = rf"needs {blocks + 301} bytes in .*, in 2 chunks, and {blocks + 300} bytes are"
    with pytest.raises(DiskError, match=message):
        folder.claim(tmp_path, [blocks, 301])
    assert (tmp_path / "chunk_00000.bin").exists()
    with_room = folder.claim(tmp_path, [blocks, 300])
    assert with_room.held
    assert os.listdir(tmp_path) == [folder.LOCK]
    with pytest.raises(DiskError, match="is in use by this process"):
        folder.claim(tmp_path, [1])
    with_room.release()
    assert not with_room.held
    with_room.release()


@pytest.mark.parametrize(
    ("holder", "words"),
    [
        (str(os.getpid()), "is in use by this process"),
        ("1", r"another run \(process 1\)\. Give this run"),
        ("4194999", r"process 4194999\)\. No such process is visible"),
        ("", r"process unknown\)\. Give this run"),
    ],
    ids=["this process", "a process that lives", "no process", "unknown"],
)
def test_the_holder_of_a_lock_is_named(tmp_path, holder, words):
    with pytest.raises(DiskError, match=words):
        raise DiskError(folder.in_use(tmp_path, holder))


# --- the files of a state ----------------------------------------------------------------------------------------


def test_offload_without_compiled_programs_is_refused_by_name():
    tx = zero_shard(optax.adam(1e-2), stage=2, mesh=mesh_of(2), offload=Offload("host"), tuning=Tuning(persist_below=8))
    params, batch = {"w": jnp.ones((8, 8))}, jnp.ones((2, 8))
    state, step = tx.create(params), tx.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    with jax.disable_jit():
        for call in (lambda: tx.create(params), lambda: tx.init(params), lambda: step(state, batch)):
            with pytest.raises(ValueError, match=r"JAX_DISABLE_JIT.*without offload="):
                call()
    step(state, batch)


def test_a_lock_goes_with_its_object(tmp_path, monkeypatch):
    def gone(handle):
        real(handle)
        raise OSError(errno.ESTALE, "Stale file handle")

    real, held = os.close, folder.lock(tmp_path)
    with pytest.raises(DiskError, match="in use by this process"):
        folder.lock(tmp_path)
    del held
    held = folder.lock(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", gone)
        held.release()
    folder.lock(tmp_path).release()


@pytest.mark.parametrize("in_child", [False, True])
def test_only_the_process_that_took_a_lock_unlocks(tmp_path, in_child):
    """A forked process shares the open file, as a copy of the handle does."""
    held = folder.lock(tmp_path)
    copy, held._process = os.dup(held._handle), -1 if in_child else os.getpid()
    held.release()
    with pytest.raises(DiskError, match="in use") if in_child else contextlib.nullcontext():
        folder.lock(tmp_path).release()
    os.close(copy)


def test_a_locked_folder_is_refused_and_one_that_cannot_be_locked_is_used(tmp_path, monkeypatch):
    def no_locks(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    held = folder.lock_folder(tmp_path)
    with pytest.raises(BlockingIOError):
        folder.lock_folder(tmp_path)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder.lock_folder(tmp_path).release()
    held.release()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Offload(), ValueError, r"Offload\(\) offloads nothing\. Give optimizer="),
        (lambda: Offload(params="host"), ValueError, r"Offload\(params='host'\) .* without their optimizer state"),
        (lambda: Offload(optimizer="tape"), ValueError, r"Offload\(optimizer=\) is one of"),
        (lambda: Offload(optimizer="host", params="tape"), ValueError, r"Offload\(params=\) is one of"),
        (lambda: Offload(optimizer="host", params="disk"), ValueError, "Give optimizer='disk'"),
        (lambda: Offload(optimizer="host", update="cpu"), ValueError, r"Offload\(update=\) is one of"),
        (lambda: Offload(optimizer="host", chunk_bytes=0), ValueError, "no size of at least 1 bytes"),
        (lambda: Offload(optimizer="host", fraction=True), ValueError, "number from 0 to 1"),
        (lambda: Offload(optimizer="host", fraction="half"), ValueError, "number from 0 to 1"),
        (lambda: Offload(optimizer="host", fraction=-0.01), ValueError, "number from 0 to 1"),
        (lambda: Offload(optimizer="host", fraction=1.01), ValueError, "number from 0 to 1"),
        (lambda: Offload(optimizer="host", path="f"), ValueError, "Give both, or neither"),
        (lambda: Offload(optimizer="disk"), ValueError, "contradicts itself"),
        (lambda: Offload(optimizer="host", update="host", device_bytes="1 GB"), ValueError, "device_bytes"),
        (lambda: Offload(optimizer="disk", path="state", device_bytes="1 GB"), ValueError, "device_bytes"),
        (lambda: Offload(optimizer="host", device_bytes=-1), ValueError, "device_bytes"),
        (lambda: Offload(optimizer="disk", path=""), ValueError, "names no folder"),
        (lambda: ON_DISK(optimizer="host"), ValueError, 'optimizer="disk"|optimizer='),
        (lambda: ON_DISK(fraction=0.5), ValueError, "fraction=0.5"),
        (lambda: ON_DISK(where=("*",)), ValueError, "where="),
        (lambda: ON_DISK(update="host"), ValueError, "update='host'"),
        (lambda: ON_DISK(host_bytes="8 gigs"), ValueError, "is no size"),
        (lambda: Offload(optimizer="host", host_bytes="1 GB"), ValueError, 'bounds the host memory of params="disk"'),
        (lambda: Offload(optimizer="host", where=[b"w"]), TypeError, r"Offload\(where=\) is a function of"),
        (lambda: Offload(optimizer="host", update="host", device_bytes=0), ValueError, "device_bytes"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
