"""What others made: manifests, arrays, locks and folders are refused by name, though every digest agrees.

The checkpoints are made by hand, so that nothing is compiled.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_refused

from zerojax.checkpoint import Checkpointer, CheckpointError, directory, export_checkpoint
from zerojax.offload.chunks import ChunkSpec
from zerojax.offload.disk import DiskStore
from zerojax.offload.folder import DiskError
from zerojax.offload.lock import lock

HUGE = [1 << 14, 1 << 14]
ZARRAY = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
SPECS = [ChunkSpec("chunk", (((8,), np.dtype("float32")),))]


class Forged:
    """A checkpoint of step 1 with two leaves and one that is empty, to be changed and then signed."""

    def __init__(self, root):
        self.root, self.folder = root, root / "step_00000001"
        self.leaves, self.changes, self.raw, self.files = [], {}, None, {}
        for name, shape in (("w", [4, 2]), ("b", [3])):
            self.add(name, shape)
        self.leaves.append(self.leaf("none", [0, 5], folder=""))
        self.write("data.0.json", b"null")

    def leaf(self, name, shape, **changes):
        known = {"name": f"params[{name!r}]", "path": ["params", name], "shape": shape, "dtype": "float32"}
        return {**known, "kind": "replicated", "folder": f"params.{name}", "key": None} | changes

    def add(self, name, shape, **changes):
        self.leaves.append(self.leaf(name, shape, **changes))
        self.array(name, shape=shape, chunks=shape)
        self.write(f"arrays/params.{name}/{'.'.join('0' * len(shape))}", np.ones(shape, "f4").tobytes())

    def array(self, name, **changes):
        path = f"arrays/params.{name}/.zarray"
        known = json.loads((self.folder / path).read_bytes()) if (self.folder / path).exists() else {}
        self.write(path, json.dumps({**ZARRAY, "dtype": "<f4", "fill_value": None, **known, **changes}).encode())

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.files[name] = [len(content), hashlib.sha256(content).hexdigest()]

    def sign(self):
        made_by = {"processes": 1}
        body = {"version": 1, "step": 1, "leaves": self.leaves, "files": self.files, "made_by": made_by} | self.changes
        text = (json.dumps(body) if self.raw is None else self.raw(json.dumps(body))).encode()
        (self.folder / "manifest.json").write_bytes(text)
        line = f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"
        (self.folder / "manifest.sha256").write_text(line)


def leaf(i, **changes):
    return lambda it: it.leaves[i].update(changes)


def body(**changes):
    return lambda it: it.changes.update(changes)


def entry(name, value):
    return lambda it: it.files.update({name: value})


def raw(old, new):
    return lambda it: setattr(it, "raw", lambda text: text.replace(old, new, 1))


def array(name, **changes):
    return lambda it: it.array(name, **changes)


def second(**changes):
    """One leaf more, which looks like the first but for this."""
    return lambda it: it.leaves.append(it.leaves[0] | changes)


def link(to, name="arrays/params.w/0.0"):
    def forge(it):
        (it.folder / name).unlink()
        (it.folder / name).symlink_to(to)

    return forge


def sparse(name, size):
    """A file that takes no room and is said to be huge; its digest is never computed."""

    def forge(it):
        os.truncate(it.folder / name, size)
        it.files[name] = [it.files[name][0], "0" * 64]

    return forge


def no_manifest(name, *forgeries):
    def forge(it):
        it.sign()
        (it.folder / name).unlink()
        for one in forgeries:
            one(it.folder / name)
        it.sign = lambda: None

    return forge


def huge_file(path):
    path.touch()
    os.truncate(path, 1 << 40)


NONE = "manifest.json: is no manifest"
FORGERIES = {
    # leaves without files, of any size
    "no folder": (leaf(0, folder=""), r"params\['w'\]\" is float32\[4, 2\] and has no files"),
    "an empty leaf with the files of another": (leaf(2, folder="params.w"), "without elements, and has files"),
    "an empty leaf of more than any": (leaf(2, shape=[0, 1 << 70]), "not all are numbers of elements"),
    # shapes
    "a negative dim": (leaf(0, shape=[-4, -2]), "not all are numbers of elements"),
    "a bool for a dim": (leaf(0, shape=[True, 8]), "not all are numbers of elements"),
    "text for a shape": (leaf(0, shape="42"), "not all are numbers of elements"),
    "another shape than the array": (leaf(0, shape=HUGE), "describes another array"),
    "another number of dims": (leaf(0, shape=[4, 2, 1]), "describes another array"),
    # names, paths and folders
    "two of a name": (second(path=["params", "x"], folder="params.x"), NONE),
    "the folder twice": (second(name="params['x']", path=["params", "x"]), "two leaves have the folder 'params.w'"),
    "the folder but for case": (
        second(name="params['W']", path=["params", "W"], folder="PARAMS.w"),
        "two leaves have the folder",
    ),
    "a path of another field": (leaf(0, path=["opt_state", "w"]), "which is not that of its name"),
    "no path": (leaf(0, path=[]), "which is not that of its name"),
    "a number in a path": (leaf(0, path=["params", 1]), NONE),
    "a name that clears the terminal": (leaf(0, name="params['w']\x1b[2J"), "printable text"),
    "half a character": (leaf(0, name="params['\ud800']", path=["params", "\ud800"]), NONE),
    "a folder above": (leaf(0, folder=".."), "is no name of a folder"),
    "a number for a folder": (leaf(0, folder=0), NONE),
    # types and kinds
    "an unknown kind": (leaf(0, kind="sparse"), "of the kind 'sparse'"),
    "objects": (leaf(0, dtype="object"), "has the type 'object'"),
    "text": (leaf(0, dtype="<U1000000"), "has the type"),
    "another name of a type": (leaf(0, dtype="f4"), "has the type 'f4'"),
    "an empty leaf of no type": (leaf(2, dtype="nonsense"), "has the type 'nonsense'"),
    "keys that are floats": (leaf(0, key="threefry2x32"), "said to be PRNG keys"),
    "keys that are not said to be": (leaf(0, dtype="key<fry>"), "not said to be PRNG keys"),
    "keys of floats": (leaf(1, dtype="key<fry>", key="threefry2x32"), "describes another array"),
    # the whole
    "a step that is true": (body(step=True), "the step is True"),
    "a negative step": (body(step=-1), "the step is -1"),
    "version true": (body(version=True), "of version True"),
    "version 0": (body(version=0), "of version 0"),
    "true processes": (body(made_by={"processes": True}), "number of processes"),
    "no processes": (body(made_by={"processes": 0}), "number of processes"),
    "more processes than files": (body(made_by={"processes": 10**9}), "number of processes"),
    "a list of files": (body(files=[]), NONE),
    "leaves as a dict": (body(leaves={}), "the leaves are a dict"),
    "the leaves twice": (raw('"leaves"', '"leaves": [], "leaves"'), "two values have the key 'leaves'"),
    "a file twice": (raw('"data.0.json"', '"data.0.json": [0, ""], "data.0.json"'), "two values have the key"),
    "text behind it": (lambda it: setattr(it, "raw", lambda text: text + "{}"), NONE),
    "nothing": (lambda it: setattr(it, "raw", lambda text: ""), NONE),
    "a list": (lambda it: setattr(it, "raw", lambda text: "[]"), NONE),
    "a deep list": (lambda it: setattr(it, "raw", lambda text: "[" * 100_000), NONE),
    # files
    "a negative size": (entry("data.0.json", [-4, ""]), "has a size of -4"),
    "no digest": (entry("data.0.json", [4, None]), "for a digest"),
    "a file with a bell": (entry("\a", [4, ""]), "cannot be printed"),
    "a file with no name": (entry("", [4, ""]), "cannot be printed"),
    "the folder as a file": (entry(".", [4, ""]), "outside the checkpoint"),
    "a folder as a file": (entry("arrays", [4, ""]), "no plain file"),
    "a file by another name": (entry("arrays/../data.0.json", [4, ""]), "another name of a file"),
    "a file above": (entry("../secret", [4, ""]), "outside the checkpoint"),
    "a pipe": (lambda it: (os.mkfifo(it.folder / "beside"), entry("beside", [4, ""])(it)), "no plain file"),
    "a link within": (link("../params.b/0"), r"0.0: cannot be read: it is a link"),
    "a description that is a link": (link("../params.b/.zarray", "arrays/params.w/.zarray"), "it is a link"),
    "a leaf's folder that is a link": (
        lambda it: (
            os.rename(it.folder / "arrays/params.w", it.folder / "arrays/other"),
            (it.folder / "arrays/params.w").symlink_to("other"),
        ),
        "it is a link",
    ),
    "a hole for an array": (sparse("arrays/params.w/0.0", 1 << 42), f"has {1 << 42} bytes instead of 32"),
    "a hole for a manifest": (no_manifest("manifest.json", huge_file), "at most 1073741824 are expected"),
    "a hole for its digest": (no_manifest("manifest.sha256", huge_file), "at most 80 are expected"),
    "a pipe for a manifest": (no_manifest("manifest.json", os.mkfifo), "no plain file"),
    "a link to a manifest": (no_manifest("manifest.json", lambda path: path.symlink_to("data.0.json")), "it is a link"),
    # arrays
    "a file larger than the array": (array("w", chunks=[1 << 40, 2]), "describes another array"),
    "a file of no extent": (array("w", chunks=[0, 2]), r"does not describe an array \(ZeroDivision"),
    "as many files as there are numbers": (array("w", shape=[1 << 50, 2], chunks=[1, 1]), "describes another array"),
    "another type of that size": (array("w", dtype="<i4"), "describes another array"),
    "a compressor": (array("w", compressor={"id": "zlib", "level": 1}), "describes another array"),
    "a list for a description": (lambda it: it.write("arrays/params.w/.zarray", b"[]"), "does not describe an array"),
    "a deep description": (lambda it: it.write("arrays/params.w/.zarray", b"[" * 10**5), "does not describe an array"),
    "a long description": (lambda it: it.write("arrays/params.w/.zarray", b" " * (2 << 20)), "are expected"),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forged_checkpoint_is_damaged(tmp_path, kind):
    forge, says = FORGERIES[kind]
    it = Forged(tmp_path)
    forge(it)
    it.sign()
    assert_refused(tmp_path, says)


def test_what_is_not_forged_is_intact(tmp_path):
    Forged(tmp_path).sign()
    assert Checkpointer(tmp_path, read_only=True).verify() == [1]
    (file,) = export_checkpoint(tmp_path, tmp_path / "out")
    from safetensors.numpy import load_file

    found = load_file(file)
    assert {name: (x.shape, x.sum()) for name, x in found.items()} == {
        "w": ((4, 2), 8),
        "b": ((3,), 3),
        "none": ((0, 5), 0),
    }


# --- locks and folders -------------------------------------------------------------------------------------------


def linked(path, aim):
    path.symlink_to(aim)


def open_socket(path, aim):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


LOCKS = {
    "a link": (linked, "is a symbolic link"),
    "a link to nothing": (lambda path, aim: path.symlink_to("nowhere"), "is a symbolic link"),
    "a link to itself": (lambda path, aim: path.symlink_to(path.name), "is a symbolic link"),
    "another name of a file": (lambda path, aim: os.link(aim, path), "begins with b'precious"),
    "text": (lambda path, aim: path.write_text("12345\n"), "begins with b'12345"),
    "bytes": (lambda path, aim: path.write_bytes(b"\0\xff"), "begins with"),
    "a long file of zeros": (lambda path, aim: path.write_bytes(bytes(4096)), "begins with"),
    "our words and others": (lambda path, aim: path.write_text("zerojax, process 12        \nmine"), "begins with"),
    "our words and no number": (lambda path, aim: path.write_text("zerojax, process of making\n"), "begins with"),
    "a folder": (lambda path, aim: path.mkdir(), "is no plain file"),
    "a pipe": (lambda path, aim: os.mkfifo(path), "is no plain file"),
    "a socket": (open_socket, "is no plain file"),
}
OPENERS = {"Checkpointer": (Checkpointer, CheckpointError), "DiskStore": (lambda p: DiskStore(p, SPECS), DiskError)}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_that_is_not_ours_is_left_alone(tmp_path, kind, opener):
    folder, aim = tmp_path / "folder", tmp_path / "aim"
    folder.mkdir()
    aim.write_text("precious, and more than twenty-eight bytes")
    make, says = LOCKS[kind]
    make(folder / ".lock", aim)
    before = os.lstat(folder / ".lock")
    call, error = OPENERS[opener]
    with pytest.raises(error, match=rf"\.lock {says}.*no run of zerojax wrote it.*Nothing was changed"):
        call(folder)
    assert aim.read_text() == "precious, and more than twenty-eight bytes"
    after = os.lstat(folder / ".lock")
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (after.st_size, after.st_mtime_ns, after.st_ino)
    assert sorted(os.listdir(tmp_path)) == ["aim", "folder"]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("text", [b"", bytes(28), b"zerojax, process 4194304   \n"])
def test_a_lock_of_an_earlier_run_is_taken(tmp_path, opener, text):
    (tmp_path / ".lock").write_bytes(text)
    OPENERS[opener][0](tmp_path).close()
    assert (tmp_path / ".lock").read_bytes() == b"zerojax, process %-10d\n" % os.getpid()


def test_an_empty_lock_with_another_name_is_left_alone(tmp_path):
    (tmp_path / "other").touch()
    os.link(tmp_path / "other", tmp_path / ".lock")
    with pytest.raises(DiskError, match="another name"):
        lock(tmp_path)
    assert not (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_chunk_that_is_no_file_is_not_removed(tmp_path, kind):
    folder, aim = tmp_path / "folder", tmp_path / "aim"
    DiskStore(folder, SPECS).close()
    aim.write_text("precious")
    path = folder / "chunk_00000.bin"
    {"link": lambda: path.symlink_to(aim), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(DiskError, match=r"chunk_00000.bin, which no earlier run wrote"):
        DiskStore(folder, SPECS)
    assert os.path.lexists(path)
    assert aim.read_text() == "precious"


def step_folder(root, step, text=None):
    """A folder of a step with one file, and a manifest if `text` is given."""
    folder = root / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    if text is not None:
        (folder / "manifest.json").write_text(text)
    return folder


def test_a_folder_of_that_name_which_no_save_wrote_is_never_removed(tmp_path):
    foreign, ours = step_folder(tmp_path, 1), step_folder(tmp_path, 2, "{}")
    step_folder(tmp_path, 3, "{}")
    directory.prune(tmp_path, 1)
    assert (foreign.exists(), ours.exists()) == (True, False)
    written = tmp_path / directory.temporary_name(1)
    written.mkdir()
    directory.commit(written, 1)
    assert not list(foreign.iterdir())
    assert (tmp_path / "step_00000001.aside" / "notes.txt").read_text() == "mine"
    for name in ("step_00000004", "step_00000005"):  # a file, and a link to nothing
        (tmp_path / name).symlink_to("nowhere") if name[-1] == "5" else (tmp_path / name).write_text("mine")
        (written := tmp_path / directory.temporary_name(int(name[-1]))).mkdir()
        directory.commit(written, int(name[-1]))
        assert (tmp_path / name).is_dir()
    assert (tmp_path / "step_00000004.aside").read_text() == "mine"
    assert not list(tmp_path.glob(".old*"))


def test_of_a_step_that_is_a_link_only_the_link_is_removed(tmp_path):
    elsewhere, root = step_folder(tmp_path / "elsewhere", 1, "{}"), tmp_path / "root"
    root.mkdir()
    for _ in range(2):
        (root / elsewhere.name).symlink_to(elsewhere)
        (written := root / directory.temporary_name(1)).mkdir()
        directory.commit(written, 1)
        assert not (root / elsewhere.name).is_symlink()
        os.rmdir(root / elsewhere.name)
    (root / elsewhere.name).symlink_to(elsewhere)
    step_folder(root, 2, "{}")
    directory.prune(root, 1)
    assert os.listdir(root) == ["step_00000002"]
    assert (elsewhere / "notes.txt").exists()


def test_names_that_only_look_like_steps_are_none(tmp_path):
    for name in ("step_000000001", "step_٠٠٠٠٠٠٠١", "step_0000001", "step_00000001 "):
        (tmp_path / name).mkdir()
    assert directory.steps_in(tmp_path) == []


# --- forks -------------------------------------------------------------------------------------------------------

PARENT = """
import ctypes, os, pathlib, sys
from zerojax.offload.lock import lock
locked = lock(pathlib.Path(sys.argv[1]))
fork = ctypes.CDLL(None).fork if sys.argv[2] == "c" else os.fork
there, here = os.pipe()
if fork() == 0:
    os.write(here, b"\\n")
    os.read(0, 1)  # until the test ends
    os._exit(0)
if sys.argv[2] == "c":
    locked.release()
os.read(there, 1)  # the child has closed what it closes
print("forked", flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("how", ["python", "c"])
def test_a_forked_child_does_not_keep_the_lock(tmp_path, how):
    """Forked by Python, whose parent is then killed; or by C code, which runs no hooks, while the parent unlocks."""
    call = [sys.executable, "-c", PARENT, str(tmp_path), how]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout.readline() == b"forked\n"
        if how == "python":
            with pytest.raises(DiskError, match=rf"in use by another run \(process {parent.pid}\)\. Give"):
                lock(tmp_path)
            parent.send_signal(signal.SIGKILL)
            parent.wait()
        lock(tmp_path).release()
        parent.stdin.close()


def in_child(work):
    """The result of a function in a forked child, as text; None if it did not end in time."""
    there, here = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(here, work().encode())
        except BaseException as error:
            os.write(here, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(here)
    late = threading.Timer(20, os.kill, (child, signal.SIGKILL))
    late.start()
    with open(there) as answer:
        text = answer.read()
    late.cancel()
    os.waitpid(child, 0)
    return text


def hold(mutex, begun, stop):
    with mutex:
        begun.set()
        stop.wait(20)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_child_can_neither_use_nor_unlock_what_its_parent_has(tmp_path):
    (checks := tmp_path / "checks").mkdir()
    with Checkpointer(checks) as checkpoints, DiskStore(tmp_path / "disk", SPECS) as store:
        stop, other = threading.Event(), threading.Event()
        holder = threading.Thread(target=hold, args=(checkpoints._mutex, other, stop))
        holder.start()  # another thread saves at that moment
        other.wait(20)
        store.write(0, [np.ones(8, "f4")], version=1)

        def work():
            for call in (lambda: store.read(0, version=1), lambda: Checkpointer(checks), checkpoints._require_writable):
                with pytest.raises((ValueError, CheckpointError), match=r"forked from|in use by another run"):
                    call()
            checkpoints.close()
            store.close()
            return "refused"

        try:
            assert in_child(work) == "refused"
        finally:
            stop.set()
            holder.join()
        with pytest.raises(CheckpointError, match="in use by this process"):
            Checkpointer(checks)
        with store.read(0, version=1).result(20) as lease:
            assert (lease.arrays[0] == 1).all()
    Checkpointer(checks).close()
