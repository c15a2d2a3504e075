"""The disk store: what was written is read, from undamaged files of the right step, in a fixed amount of memory."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from checkpoints import flip, zero
from conftest import mounted

from zerojax.offload import folder
from zerojax.offload.disk import ChunkSpec, DiskStateError, DiskStore
from zerojax.offload.folder import DiskError


def spec_of(name, *arrays):
    return ChunkSpec(name, tuple((shape, np.dtype(getattr(ml_dtypes, dtype, dtype))) for shape, dtype in arrays))


SPECS = [
    spec_of("w", ((37, 11), "float32"), ((37, 11), "bfloat16"), ((37, 11), "float32")),
    spec_of("odd", ((3,), "bfloat16"), ((), "int32"), ((5,), "float8_e4m3b11fnuz"), ((7,), "bool")),
    spec_of("nothing", ((0, 4), "float32")),
    spec_of("nothing between", ((1,), "uint8"), ((4, 0), "bfloat16"), ((1,), "float64")),
    spec_of("no arrays"),
    spec_of("a block exactly", ((1024,), "float32")),
]
SAME = [spec_of(f"c{i}", ((1000,), "float32")) for i in range(12)]


def arrays_of(spec, seed):
    """Random bytes, so that NaNs and signed zeros are among them."""
    rng = np.random.default_rng(seed)
    make = lambda shape, dtype: rng.bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    return [np.frombuffer(make(shape, dtype), dtype).reshape(shape) for shape, dtype in spec.arrays]


def opened(*args, **options):
    return contextlib.closing(DiskStore(*args, **options))


def fill(store, specs, step):
    for i, spec in enumerate(specs):
        store.write(i, arrays_of(spec, (step, i)))
    store.flush()


def assert_has(arrays, spec, seed):
    for found, expected in zip(arrays, arrays_of(spec, seed), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()


def assert_holds(store, specs, step):
    for i, spec in enumerate(specs):
        assert_has(store.read(i).result(10), spec, (step, i))


@pytest.fixture
def left(tmp_path):
    """A folder that a run which wrote two chunks left."""
    with opened(tmp_path / "store", SPECS[:2]) as store:
        fill(store, SPECS[:2], 3)
    return tmp_path / "store"


# --- reading and writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_written_is_read(tmp_path, monkeypatch, direct):
    """With direct I/O, and through the page cache on file systems that have none."""
    real = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args)

    if not direct:
        monkeypatch.setattr(os, "open", refuse)
    with opened(tmp_path / "store", SPECS) as store:
        assert direct or not store.direct
        for step in range(5):
            fill(store, SPECS, step)
            assert_holds(store, SPECS, step)
        names = [folder.LOCK, *(f"chunk_{i:05d}.bin" for i in range(len(SPECS)))]
        assert sorted(os.listdir(store.path)) == names


def test_written_arrays_may_be_used_again_at_once(tmp_path):
    scratch = np.zeros(1000, np.float32)
    with opened(tmp_path / "store", SAME, in_flight=1) as store:
        for i in range(len(SAME)):
            scratch[:] = i
            store.write(i, [scratch])
        for i in range(len(SAME)):
            assert (store.read(i).result(10)[0] == i).all()


@pytest.mark.parametrize("slow", ["pwritev", "preadv"])
def test_operations_on_a_chunk_keep_their_order(tmp_path, monkeypatch, slow):
    """A write is not passed by a read or a write, nor a read by a write that would change its file."""
    real, pauses = getattr(os, slow), iter([0.2])

    def work(*args):
        time.sleep(next(pauses, 0))
        return real(*args)

    with opened(tmp_path / "store", SAME) as store:
        fill(store, SAME, 0)
        monkeypatch.setattr(os, slow, work)
        reads = []
        for step in range(3):
            reads.append(store.read(0))
            store.write(0, arrays_of(SAME[0], (step + 1, 0)))
        reads.append(store.read(0))
        for step, read in enumerate(reads):
            assert_has(read.result(10), SAME[0], (step, 0))


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_small_store_does_not_block_itself(tmp_path, in_flight, threads):
    with opened(tmp_path / "store", SAME, in_flight=in_flight, threads=threads) as store:
        fill(store, SAME, 0)
        for step in range(6):
            reads = [store.read(i) for i in range(in_flight)]
            for i, spec in enumerate(SAME):
                assert_has(reads.pop(0).result(10), spec, (step, i))
                store.write(i, arrays_of(spec, (step + 1, i)))
                if i + in_flight < len(SAME):
                    reads.append(store.read(i + in_flight))


def run(code, *args):
    """Start a Python that has NumPy but not JAX."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


MEMORY = """
import contextlib, re, sys
import numpy as np
from zerojax.offload.disk import ChunkSpec
from zerojax.offload.disk import DiskStore, buffer_bytes

assert "jax" not in sys.modules
count, elements = 48, 1 << 19
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
array = np.ones(elements, np.float32)
specs = [ChunkSpec(str(i), ((array.shape, array.dtype),)) for i in range(count)]
before = peak()
with contextlib.closing(DiskStore(sys.argv[1], specs, in_flight=2)) as store:
    for i in range(count):
        store.write(i, [array])
    for i in range(count):
        store.write(i, store.read(i).result())
print(peak() - before, buffer_bytes(specs, 2))
"""


def test_memory_does_not_grow_with_the_number_of_chunks(tmp_path):
    out, err = run(MEMORY, tmp_path / "store").communicate(timeout=60)
    assert out, err
    grown, buffer_bytes = map(int, out.split())
    assert buffer_bytes < 5 * (2 << 20)
    # besides: the checksum's sums, threads' stacks, and huge pages round up; all chunks are 96 MiB
    assert grown < buffer_bytes + (14 << 20)


def test_an_error_before_a_write_has_begun_takes_no_buffer_away(tmp_path, monkeypatch):
    """Otherwise a few interrupts of a restore would block the next write forever."""
    with opened(tmp_path / "store", SAME, in_flight=1) as store:
        with monkeypatch.context() as patched:
            patched.setattr(np, "copyto", None)
            with pytest.raises(TypeError, match="not callable"):
                store.write(0, arrays_of(SAME[0], 0))
        writing = threading.Thread(target=fill, args=(store, SAME, 1), daemon=True)
        writing.start()
        writing.join(10)
        assert_holds(store, SAME, 1)


def test_a_chunk_in_host_memory_has_no_file(tmp_path):
    passed = []
    with opened(tmp_path / "store", SAME[:3], in_memory=[1]) as store:
        fill(store, SAME[:3], 0)
        assert not folder.chunk_file(store.path, 1).exists()
        moved = store.bytes_read, store.bytes_written
        assert moved == (0, 2 * SAME[0].bytes)
        store.write(1, arrays_of(SAME[1], (1, 1)))
        assert_has(store.read(1).result(0), SAME[1], (1, 1))
        store.copy(1, passed.append).result(0)
        assert_has(passed[0], SAME[1], (1, 1))
        assert (store.bytes_read, store.bytes_written) == moved


# --- what is refused ---------------------------------------------------------------------------------------------


def swap_sectors(path):
    content = bytearray(path.read_bytes())
    content[:512], content[512:1024] = content[512:1024], content[:512]
    path.write_bytes(content)


DAMAGES = {
    "flipped bit": (lambda path: flip(path, size=1000), "is damaged"),
    "flipped bit in the padding": (lambda path: flip(path, -8, 1), "is damaged"),
    "4 KB of zeros": (lambda path: zero(path, 0, 4096), "is damaged"),
    "sectors that changed places": (swap_sectors, "is damaged"),
    "another chunk's": (lambda path: os.replace(path.with_name("chunk_00001.bin"), path), "is damaged"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), r"is torn: it ends after \d+ of \d+ bytes"),
    "empty": (lambda path: os.truncate(path, 0), "is torn: it ends after 0 of"),
    "missing": (os.unlink, "No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    specs = [SPECS[5]] * 3
    with opened(tmp_path / "store", specs, in_flight=1) as store:
        fill(store, specs, 3)
        path = folder.chunk_file(store.path, 0)
        work, says = DAMAGES[damage]
        work(path)
        with pytest.raises(DiskStateError, match=rf"{re.escape(str(path))} .*{says}.*last checkpoint"):
            store.read(0).result(10)
        assert_has(store.read(2).result(10), specs[2], (3, 2))
        fill(store, specs, 4)
        assert_holds(store, specs, 4)


def test_nothing_of_an_earlier_run_is_read(left):
    files = {path: path.read_bytes() for path in left.glob("chunk_*")}
    with opened(left, SPECS[:2]) as store:
        for path, content in files.items():
            path.write_bytes(content)
        with pytest.raises(DiskStateError, match=r"00000.* was not written"):
            store.read(0).result(10)


# --- the folder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "chunk_1.bin", "chunk_00000.safetensors", "folder"])
def test_what_others_wrote_is_refused_and_kept(left, name):
    (left / name).mkdir() if name == "folder" else (left / name).write_text("mine")
    before = sorted(os.listdir(left))
    with pytest.raises(DiskError, match=rf"store has {name}, which no earlier run wrote.*Nothing was removed"):
        DiskStore(left, SPECS[:2])
    assert sorted(os.listdir(left)) == before


@pytest.mark.parametrize("lock", [None, ".lock"])
def test_a_name_alone_does_not_make_a_file_ours(tmp_path, lock):
    (tmp_path / "chunk_00000.bin").write_text("mine")
    if lock is not None:
        (tmp_path / lock).write_text("mine")
    with pytest.raises(DiskError, match=r"chunk_00000.bin, which no earlier run wrote"):
        DiskStore(tmp_path, SPECS)
    assert {(tmp_path / name).read_text() for name in os.listdir(tmp_path)} == {"mine"}


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("here")
    for path, why in ((tmp_path / "file", "Not a directory"), (tmp_path / "no" / "where", "No such file")):
        with pytest.raises(DiskError, match=rf"cannot be offloaded to {path}: {why}.*whose parent folder exists"):
            DiskStore(path, SPECS)
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_read_only_is_refused(left):
    before = sorted(os.listdir(left))
    with mounted(left, "-o", "bind,ro", left):
        with pytest.raises(DiskError, match=r"cannot be offloaded to .*: Read-only file system"):
            DiskStore(left, SPECS[:2])
        assert sorted(os.listdir(left)) == before


def test_a_disk_that_runs_full_is_named_and_the_other_chunks_are_readable(tmp_path):
    specs = [spec_of(f"c{i}", ((50_000,), "float32")) for i in range(3)]
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as small:
        store = DiskStore(small / "store", specs, threads=1)
        fill(store, specs[:1], 0)
        free = os.statvfs(small).f_bavail * 4096
        (small / "filler").write_bytes(bytes(free - 100_000))
        message = rf"(?s)chunk 1 \('c1', {specs[1].bytes} bytes\).*No space left"
        store.write(1, arrays_of(specs[1], (0, 1)))
        with pytest.raises(DiskError, match=message):
            store.flush()
        with pytest.raises(DiskStateError, match="was not written"):
            store.read(1).result(10)
        assert_holds(store, specs[:1], 0)
        (small / "filler").unlink()
        fill(store, specs, 1)
        (small / "filler").write_bytes(bytes(os.statvfs(small).f_bavail * 4096))
        fill(store, specs, 2)  # in place: needs no more room
        assert_holds(store, specs, 2)
        store.close()


@pytest.mark.parametrize("call", ["flush", "close"])
def test_a_failed_write_is_raised_once(tmp_path, call):
    store = DiskStore(tmp_path / "store", SAME)
    shutil.rmtree(store.path)
    store.write(0, arrays_of(SAME[0], 0))
    with pytest.raises(DiskError, match=r"Writing chunk 0 \('c0', 4096 bytes\).*No such file"):
        getattr(store, call)()
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.read(0)


CYCLE = """
import contextlib, itertools, sys
import numpy as np
from zerojax.offload.disk import ChunkSpec
from zerojax.offload.disk import DiskStore

array = np.zeros(100_000, np.float32)
specs = [ChunkSpec(str(i), ((array.shape, array.dtype),)) for i in range(10)]
with contextlib.closing(DiskStore(sys.argv[1], specs)) as store:
    for i in range(10):
        store.write(i, [array])
    for step in itertools.count():
        for i in range(10):
            (array,) = store.read(i).result()
            array += 1
            store.write(i, [array])
        if step == 0:
            print("begun", flush=True)
"""


def test_a_killed_run_leaves_a_folder_that_the_next_one_can_use(tmp_path):
    moments = random.Random(0)
    for _ in range(3):
        child = run(CYCLE, tmp_path / "store")
        assert child.stdout.readline() == "begun\n", child.communicate()[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(moments.uniform(0, 0.15))
        assert child.returncode is None, child.communicate()[1]
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert len(os.listdir(tmp_path / "store")) == 11
    with opened(tmp_path / "store", SPECS) as store:
        assert os.listdir(store.path) == [folder.LOCK]
        fill(store, SPECS, 0)
        assert_holds(store, SPECS, 0)


def test_a_store_that_could_not_be_made_leaves_the_folder_free(tmp_path, monkeypatch):
    def no_memory(size):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("zerojax.offload.disk.aligned_buffer", no_memory)
        with pytest.raises(DiskError, match="Cannot allocate memory"):
            DiskStore(tmp_path / "store", SPECS)
    with opened(tmp_path / "store", SPECS) as store:
        store.write(0, arrays_of(SPECS[0], 0))
