"""Files, locks and folders that no save of zerojax wrote raise an error that names them, and are left as they are."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from zerojax.checkpoint import Checkpointer, CheckpointError, directory
from zerojax.offload.disk import ChunkSpec, DiskStore
from zerojax.offload.folder import LOCK, DiskError, lock

SPECS = [ChunkSpec("chunk", (((8,), np.dtype("float32")),))]


OPENERS = {"Checkpointer": (Checkpointer, CheckpointError), "DiskStore": (lambda p: DiskStore(p, SPECS), DiskError)}


@pytest.mark.parametrize("opener", OPENERS)
def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path, opener):
    folder, aim = tmp_path / "folder", tmp_path / "aim"
    folder.mkdir()
    aim.write_text("precious")
    (folder / LOCK).symlink_to(aim)
    call, error = OPENERS[opener]
    with pytest.raises(error, match="symbolic links"):
        call(folder)
    assert aim.read_text() == "precious"


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("text", [b"", b"4194304   \n"])
def test_a_lock_of_an_earlier_run_is_taken(tmp_path, opener, text):
    (tmp_path / LOCK).write_bytes(text)
    OPENERS[opener][0](tmp_path).close()
    assert (tmp_path / LOCK).read_bytes() == b"%-10d\n" % os.getpid()


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


def test_names_that_only_look_like_steps_are_none(tmp_path):
    for name in ("step_000000001", "step_٠٠٠٠٠٠٠١", "step_0000001", "step_00000001 "):
        (tmp_path / name).mkdir()
    assert directory.steps_in(tmp_path) == []


PARENT = """
import ctypes, os, pathlib, sys
from zerojax.offload.folder import lock
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


def hold(mutex, begun, stop):
    with mutex:
        begun.set()
        stop.wait(20)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_child_can_neither_use_nor_unlock_what_its_parent_has(tmp_path):
    (checks := tmp_path / "checks").mkdir()
    with Checkpointer(checks) as checkpoints, contextlib.closing(DiskStore(tmp_path / "disk", SPECS)) as store:
        stop, other = threading.Event(), threading.Event()
        holder = threading.Thread(target=hold, args=(checkpoints._mutex, other, stop))
        holder.start()  # another thread saves at that moment
        other.wait(20)
        store.write(0, [np.ones(8, "f4")])

        def work():
            for call in (lambda: store.read(0), lambda: Checkpointer(checks), checkpoints._require_writable):
                with pytest.raises((ValueError, CheckpointError), match=r"forked from|in use by another run"):
                    call()
            checkpoints.close()
            store.close()

        try:
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join(20)
            assert child.exitcode == 0
        finally:
            child.kill()
            stop.set()
            holder.join()
        with pytest.raises(CheckpointError, match="in use by this process"):
            Checkpointer(checks)
        assert (store.read(0).result(20)[0] == 1).all()
    Checkpointer(checks).close()
