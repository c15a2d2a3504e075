"""The disk store: what was written is read, from undamaged files of the right step, in a fixed amount of memory."""

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors
from conftest import mounted

from zerojax.offload import buffers, chunks, folder
from zerojax.offload.chunks import DiskError, DiskStateError
from zerojax.offload.disk import ChunkSpec, DiskStore, inspect

SPECS = [
    ChunkSpec("w", (((37, 11), "float32"), ((37, 11), "bfloat16"), ((37, 11), "float32"))),
    ChunkSpec("odd", (((3,), "bfloat16"), ((), "int32"), ((5,), "float8_e4m3b11fnuz"), ((7,), "bool"))),
    ChunkSpec("nothing", (((0, 4), "float32"),)),
    ChunkSpec("nothing between", (((1,), "uint8"), ((4, 0), "bfloat16"), ((1,), "float64"))),
    ChunkSpec("no arrays", ()),
    ChunkSpec("a block exactly", (((1024,), "float32"),)),
]
SAME = [ChunkSpec(f"c{i}", (((1000,), "float32"),)) for i in range(12)]


def arrays_of(spec, seed):
    """Random bytes, so that NaNs and signed zeros are among them."""
    rng = np.random.default_rng(seed)
    make = lambda shape, dtype: rng.bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    dtypes = [np.dtype(getattr(ml_dtypes, name, name)) for _, name in spec.arrays]
    pairs = zip(spec.arrays, dtypes, strict=True)
    return [np.frombuffer(make(shape, dtype), dtype).reshape(shape) for (shape, _), dtype in pairs]


def fill(store, specs, step):
    for i, spec in enumerate(specs):
        store.write(i, arrays_of(spec, (step, i)), step=step)
    store.flush()


def assert_holds(store, specs, step):
    for i, spec in enumerate(specs):
        with store.read(i, step=step).result(10) as lease:
            assert len(lease.arrays) == len(spec.arrays)
            for found, expected in zip(lease.arrays, arrays_of(spec, (step, i)), strict=True):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert found.tobytes() == expected.tobytes()


@pytest.fixture
def filled(tmp_path):
    """A folder whose two chunks are of step 3."""
    with DiskStore.create(tmp_path / "store", SPECS[:2], owner="me") as store:
        fill(store, SPECS[:2], 3)
    return tmp_path / "store"


# --- reading and writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_what_was_written_is_read(tmp_path, direct):
    with DiskStore.create(tmp_path / "store", SPECS, owner="me", direct=direct) as store:
        assert direct or not store.direct
        for step in range(5):
            fill(store, SPECS, step)
            assert_holds(store, SPECS, step)
    state = inspect(tmp_path / "store")
    assert (state.owner, state.step, state.chunks) == ("me", 4, tuple(SPECS))


def test_a_filesystem_without_direct_io_is_written_through_the_cache(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with DiskStore.create(tmp_path / "store", SPECS, owner="me") as store:
        assert not store.direct
        fill(store, SPECS, 0)
        assert_holds(store, SPECS, 0)


def test_safetensors_opens_the_files(filled):
    with safetensors.safe_open(folder.file_of(filled, 0), "numpy") as file:
        assert (file.metadata()["name"], int(file.metadata()["step"])) == ("w", 3)
        assert [name for name in file.keys() if "pad" not in name] == ["0", "1", "2"]  # noqa: SIM118
        for name, expected in zip(("0", "2"), arrays_of(SPECS[0], (3, 0))[::2], strict=True):
            assert file.get_tensor(name).tobytes() == expected.tobytes()


def test_a_chunk_changed_in_place_is_written(filled):
    with DiskStore.create(filled, SPECS[:2], owner="me", keep=True) as store:
        with store.read(0, step=3).result(10) as lease:
            for array in lease.arrays:
                array[...] = 5
            store.write(0, lease.arrays, step=4)
        with store.read(0, step=4).result(10) as lease:
            assert all((array == 5).all() for array in lease.arrays)


def test_arrays_that_are_no_blocks_of_memory_are_written(tmp_path):
    spec = ChunkSpec("t", (((6, 4), "bfloat16"),))
    array = np.arange(24).reshape(4, 6).astype(ml_dtypes.bfloat16).T
    with DiskStore.create(tmp_path / "store", [spec], owner="me") as store:
        store.write(0, [array], step=0)
        with store.read(0, step=0).result(10) as lease:
            assert (lease.arrays[0] == array).all()


def test_written_arrays_may_be_used_again_at_once(tmp_path):
    scratch = np.zeros(1000, np.float32)
    with DiskStore.create(tmp_path / "store", SAME, owner="me", write_buffers=1) as store:
        for i in range(len(SAME)):
            scratch[:] = i
            store.write(i, [scratch], step=0)
        for i in range(len(SAME)):
            with store.read(i, step=0).result(10) as lease:
                assert (lease.arrays[0] == i).all()


def test_the_last_of_two_writes_stays(tmp_path, monkeypatch):
    """Even if the first takes long."""
    real, slow = buffers.write_file, iter([0.2])

    def write(*args, **options):
        time.sleep(next(slow, 0))
        real(*args, **options)

    with DiskStore.create(tmp_path / "store", SAME, owner="me") as store:
        monkeypatch.setattr(buffers, "write_file", write)
        for step in range(2):
            store.write(0, arrays_of(SAME[0], step), step=step)
        with store.read(0, step=1).result(10) as lease:
            assert lease.arrays[0].tobytes() == arrays_of(SAME[0], 1)[0].tobytes()
    assert chunks.identify(folder.file_of(store.path, 0)).step == 1


def test_the_same_state_gives_the_same_file(tmp_path):
    """Whatever was in the buffer before."""
    contents = []
    with DiskStore.create(tmp_path / "store", SPECS, owner="me", write_buffers=1) as store:
        for _ in range(2):
            store.write(1, arrays_of(SPECS[1], 0), step=0).result(10)
            contents.append(folder.file_of(store.path, 1).read_bytes())
            store.write(0, arrays_of(SPECS[0], 0), step=0)
    assert contents[0] == contents[1]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_smallest_store_does_not_block_itself(tmp_path, threads):
    """All reads are asked for at once, and writes come between them; of a chunk, operations keep their order."""
    sizes = {"read_buffers": 1, "write_buffers": 1, "threads": threads}
    with DiskStore.create(tmp_path / "store", SAME, owner="me", **sizes) as store:
        fill(store, SAME, 0)
        for step in range(6):
            reads = [store.read(i, step=step) for i in range(len(SAME))]
            for i, read in enumerate(reads):
                with read.result(10) as lease:
                    assert lease.arrays[0].tobytes() == arrays_of(SAME[i], (step, i))[0].tobytes()
                    store.write(i, arrays_of(SAME[i], (step + 1, i)), step=step + 1)


def test_reads_wait_for_a_lease_and_closing_cancels_them(tmp_path):
    with DiskStore.create(tmp_path / "store", SAME, owner="me", read_buffers=2) as store:
        fill(store, SAME, 0)
        first, second, third, fourth = (store.read(i, step=0) for i in range(4))
        lease = first.result(10)
        second.result(10)
        with pytest.raises(TimeoutError):
            third.result(0.05)
        lease.release()
        lease.release()  # must not lend the buffer twice
        with pytest.raises(ValueError, match="was released"):
            lease.arrays  # noqa: B018
        third.result(10)
        with pytest.raises(TimeoutError):
            fourth.result(0.05)
    assert fourth.cancelled()


def test_a_read_that_was_cancelled_gives_its_buffer_back(tmp_path):
    with DiskStore.create(tmp_path / "store", SAME, owner="me", read_buffers=1) as store:
        fill(store, SAME, 0)
        lease = store.read(0, step=0).result(10)
        assert store.read(1, step=0).cancel()
        lease.release()
        store.read(2, step=0).result(10)


def run(code, *args):
    """Start a Python that has NumPy but not JAX."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


MEMORY = """
import re, sys
import numpy as np
from zerojax.offload.disk import ChunkSpec, DiskStore

assert "jax" not in sys.modules
count, elements = 48, 1 << 19
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
specs = [ChunkSpec(str(i), (((elements,), "float32"),)) for i in range(count)]
array = np.ones(elements, np.float32)
before = peak()
with DiskStore.create(sys.argv[1], specs, owner="me", read_buffers=2, write_buffers=2) as store:
    for i in range(count):
        store.write(i, [array], step=0)
    reads = [store.read(i, step=0) for i in range(count)]
    for i, read in enumerate(reads):
        with read.result() as lease:
            store.write(i, lease.arrays, step=1)
print(peak() - before, store.buffer_bytes)
"""


def test_memory_does_not_grow_with_the_number_of_chunks(tmp_path):
    out, err = run(MEMORY, tmp_path / "store").communicate(timeout=60)
    assert out, err
    grown, buffer_bytes = map(int, out.split())
    assert buffer_bytes < 5 * (2 << 20)
    # besides: the checksum's sums, threads' stacks, and huge pages round up; all chunks are 96 MiB
    assert grown < buffer_bytes + (14 << 20)


# --- what the files are, and what is refused ---------------------------------------------------------------------


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << 3
    path.write_bytes(content)


def zeros(path):
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(len(content[4096:8192]))
    path.write_bytes(content)


def foreign(path):
    header = b'{"0":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")


DAMAGES = {
    "flipped bit in the length": (lambda path: flip(path, 0), "safetensors|damaged"),
    "flipped bit in the checksum": (lambda path: flip(path, 36 / path.stat().st_size), "damaged"),
    "flipped bit in the padding": (lambda path: flip(path, 4000 / path.stat().st_size), "damaged"),
    "flipped bit in the arrays": (lambda path: flip(path, 0.6), r"is damaged: .* checksum"),
    "4 KB of zeros": (zeros, r"is damaged: .* checksum"),
    "only zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "safetensors"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "is torn"),
    "truncated in the header": (lambda path: os.truncate(path, 300), "header is damaged"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 4096), "is torn"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes"),
    "missing": (os.unlink, "is missing|No such file"),
    "somebody else's": (foreign, "is no chunk of offloaded state"),
    "another chunk's": (lambda path: shutil.copy(folder.file_of(path.parent, 1), path), "is of chunk 1 of 2"),
}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(filled, damage, direct):
    path = folder.file_of(filled, 0)
    work, says = DAMAGES[damage]
    work(path)
    message = rf"{re.escape(str(path))} .*({says}).*required is.*last checkpoint"
    with DiskStore.create(filled, SPECS[:2], owner="me", keep=True, direct=direct, read_buffers=1) as store:
        with pytest.raises(DiskStateError, match=message):
            store.read(0, step=3).result(10)
        store.read(1, step=3).result(10).release()  # the buffer came back
    with pytest.raises(DiskStateError, match=message):
        inspect(filled)


def test_any_flipped_bit_is_found(filled):
    path = folder.file_of(filled, 0)
    with DiskStore.create(filled, SPECS[:2], owner="me", keep=True) as store:
        for place in np.linspace(0, 0.999, 60):
            flip(path, place)
            with pytest.raises(DiskStateError):
                chunks.identify(path)
            with pytest.raises(DiskStateError):
                store.read(0, step=3).result(10)
            flip(path, place)
        store.read(0, step=3).result(10)


def test_sectors_that_changed_places_are_found(filled):
    path = folder.file_of(filled, 0)
    content = bytearray(path.read_bytes())
    content[4096:4608], content[4608:5120] = content[4608:5120], content[4096:4608]
    path.write_bytes(content)
    with pytest.raises(DiskStateError, match="checksum"):
        inspect(filled)


def test_a_state_of_another_step_is_refused(filled):
    store = DiskStore.create(filled, SPECS[:2], owner="me", keep=True)
    with store, pytest.raises(DiskStateError, match=r"00000.* is of step 3; required is step 4"):
        store.read(0, step=4).result(10)


def test_a_state_of_another_run_is_refused(filled):
    store = DiskStore.create(filled, SPECS[:2], owner="you", keep=True)
    with store, pytest.raises(DiskStateError, match=r"00000.* is of the run 'me'; required is the run 'you'"):
        store.read(0, step=3).result(10)


def test_a_state_of_other_arrays_is_refused(filled):
    specs = [ChunkSpec("w", (((37, 11), "float32"), ((37, 11), "float16"), ((37, 11), "float32"))), SPECS[1]]
    store = DiskStore.create(filled, specs, owner="me", keep=True)
    with store, pytest.raises(DiskStateError, match=r"00000.* is of .*bfloat16.*; required is .*float16"):
        store.read(0, step=3).result(10)


def test_a_state_is_complete_only_at_one_step(filled):
    with DiskStore.create(filled, SPECS[:2], owner="me", keep=True) as store:
        store.write(1, arrays_of(SPECS[1], 0), step=4)
    with pytest.raises(DiskStateError, match=r"00001.* is of step 4; required is step 3"):
        inspect(filled)
    with DiskStore.create(filled, SPECS[:2], owner="me", keep=True) as store:
        store.write(0, arrays_of(SPECS[0], 0), step=4)
    assert inspect(filled).step == 4
    shutil.copy(folder.file_of(filled, 1), folder.file_of(filled, 2))
    with pytest.raises(DiskStateError, match=r"00002.* is one too many"):
        inspect(filled)
    with pytest.raises(DiskStateError, match="has no chunks"):
        inspect(filled / "nowhere")


def test_a_later_format_is_refused(filled, monkeypatch):
    monkeypatch.setattr(chunks, "VERSION", 0)
    with pytest.raises(DiskStateError, match="has version 1 of the format; required is version 0"):
        inspect(filled)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_replaced_file_is_written_over_only_after_its_renaming_is_on_the_disk(tmp_path, monkeypatch, threads):
    """Were it not so, power could fail while the chunk's name is still that of a file which is written over."""
    durable, renamed = set(), set()
    real = {"write": buffers.write_file, "sync": folder.sync, "rename": os.rename}
    reused = []

    def write(path, content, **options):
        if path.exists():
            assert os.stat(path).st_ino in durable
            reused.append(path)
        real["write"](path, content, **options)

    def rename(old, new):
        if os.path.exists(new):
            renamed.add(os.stat(new).st_ino)
        durable.discard(os.stat(old).st_ino)
        real["rename"](old, new)

    def sync(path):
        before = set(renamed)
        real["sync"](path)
        durable.update(before)
        renamed.difference_update(before)

    monkeypatch.setattr(buffers, "write_file", write)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(folder, "sync", sync)
    with DiskStore.create(tmp_path / "store", SAME, owner="me", direct=False, threads=threads) as store:
        for step in range(4):
            fill(store, SAME, step)
    assert len(reused) > 2 * len(SAME)
    assert len(list(store.path.glob("spare_*"))) <= threads


def test_a_filesystem_without_hard_links_will_do(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with DiskStore.create(tmp_path / "store", SAME, owner="me") as store:
        for step in range(3):
            fill(store, SAME, step)
        assert_holds(store, SAME, 2)
        assert not list(store.path.glob("spare_*"))


def test_a_file_that_has_another_name_too_is_not_written_over(filled):
    """Hard links keep a state."""
    kept = filled.parent / "kept"
    kept.mkdir()
    for i in range(2):
        os.link(folder.file_of(filled, i), folder.file_of(kept, i))
    with DiskStore.create(filled, SPECS[:2], owner="me", keep=True) as store:
        for step in range(4, 8):
            fill(store, SPECS[:2], step)
    assert (inspect(kept).step, inspect(filled).step) == (3, 7)


# --- the folder --------------------------------------------------------------------------------------------------


def test_what_an_earlier_run_left_is_removed(filled):
    (filled / "spare_7.tmp").write_bytes(b"half")
    DiskStore.create(filled, SPECS[:2], owner="me", keep=True).close()
    assert sorted(os.listdir(filled)) == [".lock", "chunk_00000.safetensors", "chunk_00001.safetensors"]
    DiskStore.create(filled, SAME, owner="you").close()
    assert os.listdir(filled) == [".lock"]


@pytest.mark.parametrize("name", ["notes.txt", "chunk_1.safetensors", "model.safetensors", "folder"])
def test_what_others_wrote_is_refused_and_kept(filled, name):
    (filled / name).mkdir() if name == "folder" else (filled / name).write_text("mine")
    with pytest.raises(DiskError, match=rf"store has {name}, which no earlier run wrote.*nothing was removed"):
        DiskStore.create(filled, SPECS[:2], owner="me")
    assert len(os.listdir(filled)) == 4
    assert chunks.identify(folder.file_of(filled, 0)).step == 3


def test_a_name_alone_does_not_make_a_file_ours(tmp_path):
    (tmp_path / "chunk_00000.safetensors").write_text("mine")
    with pytest.raises(DiskError, match=r"has chunk_00000.safetensors"):
        DiskStore.create(tmp_path, SPECS, owner="me")
    assert os.listdir(tmp_path) == ["chunk_00000.safetensors"]


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("here")
    for path, why in ((tmp_path / "file", "Not a directory"), (tmp_path / "no" / "where", "No such file")):
        with pytest.raises(DiskError, match=rf"cannot be offloaded to {path}: {why}.*in one that exists"):
            DiskStore.create(path, SPECS, owner="me")
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_read_only_is_refused(filled):
    with mounted(filled, "-o", "bind,ro", filled):
        with pytest.raises(DiskError, match=r"cannot be offloaded to .*: Read-only file system"):
            DiskStore.create(filled, SPECS[:2], owner="me")
        assert inspect(filled).step == 3


def test_a_folder_is_used_by_one_store_at_a_time(filled):
    store = DiskStore.create(filled, SPECS[:2], owner="me", keep=True)
    with pytest.raises(DiskError, match=rf"in use by another run \(process {os.getpid()}\)"):
        DiskStore.create(filled, SPECS[:2], owner="me")
    assert_holds(store, SPECS[:2], 3)
    store.close()
    store.close()
    DiskStore.create(filled, SPECS[:2], owner="me").close()


def test_a_disk_too_small_is_refused_before_anything_is_written(filled, monkeypatch):
    disk = os.statvfs(filled)
    few = os.statvfs_result((*disk[:4], 5, *disk[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    sizes = [folder.file_of(filled, i).stat().st_size for i in range(2)]
    needed, available = sum(sizes) + 9 * max(sizes), 5 * disk.f_frsize + sum(sizes)
    with pytest.raises(DiskError, match=rf"needs {needed} bytes in .*2 chunks of {sum(sizes)} bytes.* {available} are"):
        DiskStore.create(filled, SPECS[:2], owner="me", write_buffers=9)
    assert inspect(filled).step == 3


def test_a_disk_that_runs_full_spares_the_older_files(tmp_path):
    specs = [ChunkSpec(f"c{i}", (((50_000,), "float32"),)) for i in range(3)]
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs") as small:
        store = DiskStore.create(small / "store", specs, owner="me", threads=1)
        fill(store, specs, 0)
        free = os.statvfs(small).f_bavail * 4096
        (small / "filler").write_bytes(bytes(free - 100_000))
        size = folder.file_of(store.path, 0).stat().st_size
        message = rf"(?s)chunk 1 \('c1'\) of step 1 .*No space left.*needs {size} bytes, and \d+ are free.*older file"
        with pytest.raises(DiskError, match=message):
            store.write(1, arrays_of(specs[1], (1, 1)), step=1).result(10)
        with pytest.raises(DiskError, match=message):
            store.read(0, step=0)
        assert_holds(store, specs, 0)
        assert inspect(store.path).step == 0
        assert not list(store.path.glob("spare*"))
        (small / "filler").unlink()
        fill(store, specs, 1)
        (small / "filler").write_bytes(bytes(os.statvfs(small).f_bavail * 4096))
        fill(store, specs, 2)  # into the files that were replaced
        assert_holds(store, specs, 2)
        store.close()


def test_a_failed_write_is_raised_once_and_does_not_hide_what_ended_the_block(tmp_path):
    def block():
        with DiskStore.create(tmp_path / "store", SAME, owner="me") as store:
            shutil.rmtree(store.path)
            store.write(0, arrays_of(SAME[0], 0), step=0)
            raise KeyError

    with pytest.raises(KeyError):
        block()
    store = DiskStore.create(tmp_path / "store", SAME, owner="me")
    shutil.rmtree(store.path)
    store.write(0, arrays_of(SAME[0], 0), step=0)
    with pytest.raises(DiskError, match=r"Writing chunk 0 \('c0'\) of step 0 .*No such file"):
        store.close()
    store.close()


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="no chunks"):
        DiskStore.create(tmp_path / "store", [], owner="me")
    with pytest.raises(ValueError, match="0 read buffers"):
        DiskStore.create(tmp_path / "store", SAME, owner="me", read_buffers=0)
    for dtype in ("float33", "<f4", "object", "str"):
        with pytest.raises(ValueError, match=rf"Array 0 of chunk 'x' has the dtype '{dtype}'"):
            ChunkSpec("x", (((1,), dtype),))
    with pytest.raises(ValueError, match=r"shape \(-1,\)"):
        ChunkSpec("x", (((-1,), "float32"),))
    with DiskStore.create(tmp_path / "store", SAME, owner="me", write_buffers=1) as store:
        with pytest.raises(ValueError, match="no chunk 12"):
            store.read(12, step=0)
        with pytest.raises(ValueError, match="step -1"):
            store.read(0, step=-1)
        with pytest.raises(ValueError, match=r"got 0 arrays. Give its 1"):
            store.write(0, [], step=0)
        for wrong in (np.zeros(999, np.float32), np.zeros(1000)):
            with pytest.raises(ValueError, match=r"Array 0 of chunk 'c0' is float.*Give one of float32\[1000\]"):
                store.write(0, [wrong], step=0)
        store.write(0, [np.zeros(1000, np.float32)], step=0).result(10)  # the buffer came back
    with pytest.raises(ValueError, match="is closed"):
        store.read(0, step=0)


# --- kills -------------------------------------------------------------------------------------------------------

CHUNKS = 10
CYCLE = """
import itertools, sys
import numpy as np
from zerojax.offload.disk import ChunkSpec, DiskError, DiskStore, inspect

specs = [ChunkSpec(str(i), (((100_000 + i,), "float32"), ((50_001,), "bfloat16"))) for i in range(int(sys.argv[2]))]
try:
    begun, keep = inspect(sys.argv[1]).step, True
except DiskError:
    begun, keep = int(sys.argv[3]), False
with DiskStore.create(sys.argv[1], specs, owner="me", keep=keep) as store:
    like = [[np.zeros(shape, dtype) for shape, dtype in spec.arrays] for spec in specs]
    if not keep:
        for i, arrays in enumerate(like):
            store.write(i, [array + np.array(begun % 100 + i, array.dtype) for array in arrays], step=begun)
    for step in itertools.count(begun):
        reads = [store.read(i, step=step) for i in range(len(specs))]
        for i, read in enumerate(reads):
            with read.result() as lease:
                assert all((array == step % 100 + i).all() for array in lease.arrays)
                for array in lease.arrays:
                    array[...] = (step + 1) % 100 + i
                store.write(i, lease.arrays, step=step + 1)
        if step == begun:
            print("begun", flush=True)
"""


def survive_kills(path, kills, seed):
    """Kill a process that cycles over the chunks, look at what it left, and let the next go on from there."""
    moments = random.Random(seed)
    steps, complete, mixed = [0], 0, 0
    for _ in range(kills):
        child = run(CYCLE, path, CHUNKS, steps[-1])
        assert child.stdout.readline() == "begun\n", child.communicate()[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(moments.uniform(0, 0.15))
        assert child.returncode is None, child.communicate()[1]
        child.send_signal(signal.SIGKILL)
        child.communicate()
        labels = [chunks.identify(folder.file_of(path, i)) for i in range(CHUNKS)]
        found = {label.step for label in labels}
        # a chunk's next state is written after its own last one, and the loop waits for each: two steps at most
        assert max(found) - min(found) <= 2
        assert min(found) > steps[-1] - 1
        for i, label in enumerate(labels):
            content = memoryview(folder.file_of(path, i).read_bytes())
            arrays = label.spec.views(content[len(label.header) :])
            assert all((array == label.step % 100 + i).all() for array in arrays)
        if len(found) == 1:
            complete += 1
            assert inspect(path).step == labels[0].step
        else:
            mixed += 1
            with pytest.raises(DiskStateError, match="is of step"):
                inspect(path)
        steps.append(max(found))
    return complete, mixed, steps


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_complete_chunks(tmp_path, kills):
    complete, mixed, steps = survive_kills(tmp_path / "store", kills, seed=kills)
    assert steps == sorted(steps)
    assert steps[-1] > kills
    assert complete + mixed == kills
    assert mixed or kills < 20  # a few may all come between two steps
    assert all(a < b for a, b in itertools.pairwise(steps))
