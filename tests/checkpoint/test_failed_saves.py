"""No save is lost or falsely reported, and a failure leaves the run, older checkpoints and files of others intact."""

import errno
import functools
import importlib.metadata
import logging
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several
from checkpoints import NEWEST, SHAPES, assert_same, filled, flip
from conftest import mesh_of, mounted

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedError,
    arrays,
    directory,
    manifest,
    restoring,
    saving,
)
from zerojax.checkpoint.saving import Save, saved_leaves
from zerojax.checkpoint.state_leaves import StateLeaf
from zerojax.layout.leaf import Leaf

TX = zero_shard(optax.sgd(1e-2, momentum=0.9), stage=3, mesh=mesh_of(2), tuning=Tuning(persist_below=64))
state_of = functools.partial(filled, TX, SHAPES)
LEFT = ".tmp-step_00000007-0123abcd"


@pytest.fixture(scope="module")
def state():
    return state_of(1)


@pytest.fixture
def one_step(state, tmp_path):
    """An open checkpointer that has saved step 1."""
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()
        yield checkpoints


def assert_intact(checkpoints, running, step):
    """The run's state is unchanged, the older checkpoint intact, and nothing incomplete is left."""
    assert_same(running, state_of(step))
    assert checkpoints.verify() == checkpoints.steps() == [1]
    assert_same(checkpoints.restore(running).state, state_of(1))


# --- failures while saving ---------------------------------------------------------------------------------------


def fails(code, *args):
    """A function that always raises an `OSError`."""

    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    return fail


def before_digest(work):
    """Let a function change the folder of a save when all leaves are written."""
    digest = Save._digest
    return lambda patched: patched.setattr(Save, "_digest", lambda self: (work(self._temporary), digest(self)))


def unpacked(work):
    """Let each leaf have a folder, as a large one has."""
    return lambda patched: (patched.setattr(saving, "SMALL_BYTES", 0), before_digest(work)(patched))


def fails_for_good(patched):
    """Not even the list of checkpoints, which the error is to tell, can be read."""
    for work in ("sync_all", "steps_in", "remove"):
        patched.setattr(directory, work, fails(errno.EIO))


lost = lambda name: lambda folder: (folder / name).unlink()
changed = lambda folder: flip(folder / "packed.0.bin", 0, 4)
FAILURES = {
    "a digest": (lambda patched: patched.setattr(Save, "_digest", fails(errno.EIO)), "OSError: .*Input/output error"),
    "a disk for good": (fails_for_good, r"Input/output error.*cannot be listed: Input/output error"),
    # The version is in a file of the installed package.
    "a version": (lambda patched: patched.setattr(importlib.metadata, "version", fails(errno.EMFILE)), "Too many open"),
    "a deleted folder": (before_digest(shutil.rmtree), "FileNotFoundError: .*No such file"),
    "a lost shard": (unpacked(lost("arrays/params.w/1.0")), r"params\['w'\], arrays/params.w/1.0: is missing"),
    "lost metadata": (unpacked(lost("arrays/params.w/.zarray")), r"arrays/params.w/.zarray: is missing"),
    "a lost leaf": (unpacked(lambda x: shutil.rmtree(x / "arrays/step")), r"step, arrays/step/.zarray: is missing"),
    "lost data": (before_digest(lost("data.0.json")), r"data.0.json: is missing"),
    "lost packed leaves": (before_digest(lost("packed.0.bin")), r"step, packed.0.bin: is missing"),
    # Changed before the file is digested: its digest is of the change, that of the leaf is not.
    "a changed leaf": (before_digest(changed), r"step, packed.0.bin: has other contents than were written"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_save_that_fails_says_why_once_and_leaves_all_intact(one_step, monkeypatch, what):
    broken, says = FAILURES[what]
    running = state_of(2)
    with monkeypatch.context() as patched:
        broken(patched)
        assert one_step.save(running, step=2)
        one_step._last_save.thread.join()
        with pytest.raises(CheckpointError, match=rf"(?s)Saving step 2 to .* failed: .*{says}") as caught:
            one_step.save(running, step=3)
    assert "cannot be listed" in says or str(caught.value).endswith("The newest checkpoint is that of step 1.")
    assert_intact(one_step, running, 2)
    assert what == "a disk for good" or not list(one_step.directory.glob(".tmp*"))
    assert one_step.save(running, step=2)
    one_step.close()
    assert one_step.verify() == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that orbax leaves behind
def test_a_disk_that_another_fills(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1000k", "tmpfs") as folder:
        checkpoints, running = Checkpointer(folder), state_of(2)
        checkpoints.save(state_of(1), step=1)
        checkpoints.wait()
        (folder / "filler").write_bytes(bytes(700_000))
        checkpoints.save(running, step=2)
        with pytest.raises(CheckpointError, match=r"(?s)Saving step 2 .* failed: .*No space left.*\nThe newest"):
            checkpoints.wait()
        assert_intact(checkpoints, running, 2)
        assert not list(folder.glob(".tmp*"))
        (folder / "filler").unlink()
        checkpoints.save(running, step=2)
        checkpoints.close()
        assert checkpoints.verify() == [1, 2]


def test_a_disk_that_became_read_only(one_step):
    running, folder = state_of(2), one_step.directory
    with mounted(folder, "-o", "bind,ro", folder):
        with pytest.raises(CheckpointError, match=r"(?s)Saving step 2 .* failed: .*Read-only file system"):
            one_step.save(running, step=2)
        assert_intact(one_step, running, 2)
        with pytest.raises(CheckpointError, match=r"cannot be written to .*Read-only file system"):
            Checkpointer(folder)
    assert one_step.save(running, step=2)


def test_a_directory_deleted_under_way(one_step, monkeypatch):
    with monkeypatch.context() as patched:
        before_digest(lambda folder: shutil.rmtree(folder.parent))(patched)
        one_step.save(state_of(2), step=2)
        with pytest.raises(CheckpointError, match=r"(?s)Saving step 2 to .* failed: FileNotFoundError: .*No such file"):
            one_step.wait()
    assert one_step.latest() is None
    with pytest.raises(CheckpointError, match=r"(?s)No such file.*There is no checkpoint yet"):
        one_step.save(state_of(3), step=3)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(CheckpointError, match=r"Checkpoints cannot be written to .*exists"):
        Checkpointer(tmp_path / "file")
    assert Checkpointer(tmp_path / "file", read_only=True).latest() is None


def test_a_failed_write_is_waited_for_with_those_beside_it():
    slow, ended = ThreadPoolExecutor(2), []
    futures = [slow.submit(lambda: 1 / 0), slow.submit(lambda: (time.sleep(0.2), ended.append(True)))]
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        arrays.wait_for(futures)
    assert ended


def test_a_failed_save_does_not_hide_the_error_that_ends_the_block(state, tmp_path, monkeypatch):
    monkeypatch.setattr(Save, "_digest", fails(errno.EIO))

    def block():
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(state, step=1)
            raise KeyError

    with pytest.warns(UserWarning, match="Input/output error"), pytest.raises(KeyError):
        block()


# --- interrupts, exits and threads -------------------------------------------------------------------------------


def interrupt(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that orbax leaves behind
@pytest.mark.parametrize("where", ["write", "start", "twice"])
def test_an_interrupted_save_is_not_taken_for_done(tmp_path, state, monkeypatch, where):
    """Also where the thread has begun, as an interrupt in Thread.start finds it, and another while it is undone."""
    start = threading.Thread.start

    def begun(self):
        start(self)
        if self.name.startswith("zerojax"):
            self.join(0.5)  # as if the interrupt came late: the thread must wait with its commit
            interrupt()

    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(
                *((arrays, "write_leaves", interrupt) if where == "write" else (threading.Thread, "start", begun))
            )
            if where == "twice":
                patched.setattr(directory, "remove", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(state, step=1)
        for thread in threading.enumerate():
            if thread.name.startswith("zerojax save"):
                thread.join()
        assert not checkpoints.steps()
        assert where != "write" or not list(tmp_path.glob(".tmp*"))
        assert checkpoints.save(state, step=1, force=True)
        checkpoints.wait()
        assert checkpoints.verify() == [1]


@pytest.fixture
def go_on(monkeypatch):
    """An event for which each save waits when all leaves are written."""
    event = threading.Event()
    before_digest(lambda folder: event.wait(20))(monkeypatch)
    return event


@pytest.mark.parametrize("call", ["save", "close"])
def test_an_interrupt_while_waiting_does_not_forget_the_save(tmp_path, state, go_on, call):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=1)
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(state, step=2) if call == "save" else checkpoints.close()
        finally:
            signal.signal(signal.SIGINT, usual)
        with pytest.raises(CheckpointError, match="in use by this process"):  # which is still writing
            Checkpointer(tmp_path)
        threading.Timer(0.2, go_on.set).start()
    assert checkpoints.steps() == [1]


def save_and_leave(folder, how):
    write = Save._write
    Save._write = lambda *args: (time.sleep(1), write(*args))
    if how == "fails":
        Save._digest = lambda self: 1 / 0
    Checkpointer(folder).save(state_of(), step=3)


@pytest.mark.parametrize(
    ("how", "error"), [("works", ""), pytest.param("fails", "ZeroDivisionError", marks=pytest.mark.slow)]
)
def test_a_save_under_way_at_exit_is_finished(tmp_path, how, error):
    (done,) = several.start(save_and_leave, tmp_path, how, processes=1)
    _, errors = done.communicate(timeout=600)
    assert done.returncode == 0
    if error:
        assert "Saving step 3 " in errors
        assert error in errors
    else:
        assert Checkpointer(tmp_path, read_only=True).verify() == [3]
        assert not errors


def test_saves_of_several_threads_do_not_overlap(tmp_path, state, monkeypatch):
    """Two saves at a time would share what is known of the last one."""
    digest, saving, overlaps = Save._digest, threading.Lock(), []

    def alone(self):
        overlaps.append(not saving.acquire(blocking=False))
        time.sleep(0.05)
        digest(self)
        saving.release()

    monkeypatch.setattr(Save, "_digest", alone)
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        threads = [threading.Thread(target=checkpoints.save, args=(state,), kwargs={"step": i}) for i in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert overlaps == [False] * 4


# --- leftovers and other writers ---------------------------------------------------------------------------------


def test_a_second_writer_leaves_what_the_first_is_writing(tmp_path, state, go_on):
    """Its lock file is gone."""
    first = Checkpointer(tmp_path)
    first.save(state, step=1)
    (tmp_path / ".zerojax.lock").unlink()
    Checkpointer(tmp_path).close()
    assert list(tmp_path.glob(".tmp-step_00000001-*"))
    go_on.set()
    first.close()
    assert first.verify() == [1]


def test_leftovers_are_cleaned_and_a_killed_replacement_is_undone(one_step, state, caplog):
    """Only names that saves make are removed."""
    root, others = one_step.directory, [".tmp-mywork", ".tmp-step_00000001-mine", ".old-step_1", ".old-mine"]
    one_step.save(state, step=2)
    one_step.close()
    for name in others:
        (root / name).mkdir()
    (root / LEFT / "arrays").mkdir(parents=True)
    (root / NEWEST).rename(root / f".old-{NEWEST}")
    assert Checkpointer(root, read_only=True).latest() == 1
    with Checkpointer(root) as checkpoints:
        assert checkpoints.verify() == checkpoints.steps() == [1, 2]
    assert f"{LEFT} in {root}, which a killed run left, was removed" in caplog.text
    assert {*os.listdir(root)} == {".zerojax.lock", "step_00000001", NEWEST, *others}


@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
def test_a_leftover_that_cannot_be_removed_is_warned_of(tmp_path, kind, caplog):
    left, elsewhere = tmp_path / LEFT, tmp_path / "elsewhere"
    elsewhere.mkdir()
    {"link": lambda: left.symlink_to(elsewhere), "file": left.touch, "pipe": lambda: os.mkfifo(left)}[kind]()
    for _ in range(2):
        Checkpointer(tmp_path).close()
    assert f"{LEFT} in {tmp_path}, which a killed run left, is no folder" in caplog.text
    assert elsewhere.exists()


def test_a_leftover_that_a_late_write_brings_back_is_removed_again(tmp_path, monkeypatch):
    left, real = tmp_path / LEFT, shutil.rmtree
    (left / "arrays").mkdir(parents=True)
    writes = iter(["while it is removed", "after it was removed"])

    def rmtree(path, *args, **options):
        if (when := next(writes, None)) != "while it is removed":
            real(path, *args, **options)
        if when == "after it was removed":
            (left / "arrays").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with Checkpointer(tmp_path):
        assert not left.exists()


def test_an_open_that_fails_releases_its_lock(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(directory, "clean", fails(errno.EIO))
        with pytest.raises(CheckpointError, match="Input/output error"):
            Checkpointer(tmp_path)
    Checkpointer(tmp_path).close()


def test_as_many_renamed_checkpoints_as_others_are_kept(tmp_path, state):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for last in (3, 4, 5):
            for step in range(1, last):
                checkpoints.save(state, step=step)
    assert len(list(tmp_path.glob("*.aside*"))) == 2
    assert checkpoints.steps() == [3, 4]


# --- a reader beside a writer ------------------------------------------------------------------------------------


@pytest.fixture
def reader(one_step, state):
    """A checkpointer that reads the steps 1 and 2."""
    one_step.save(state, step=2)
    one_step.wait()
    return Checkpointer(one_step.directory, read_only=True)


@pytest.mark.parametrize("when", ["verified", "read", "after"])
def test_a_step_that_vanishes_while_it_is_read_is_said(reader, state, monkeypatch, when):
    where, name = (manifest, "damage_in") if when == "verified" else (restoring, "read_leaves")
    work = getattr(where, name)

    def vanishing(*args, **options):
        if when == "after":
            result = work(*args, **options)
            shutil.rmtree(reader.directory / NEWEST)
            return result
        shutil.rmtree(reader.directory / NEWEST)
        return work(*args, **options)

    monkeypatch.setattr(where, name, vanishing)
    monkeypatch.setattr("zerojax.checkpoint.checkpointer.retried", lambda work: work())
    with pytest.raises(CheckpointError, match=r"step 2 .* was removed or replaced while it was read") as caught:
        reader.restore(state)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize(
    "look", [lambda reader, state: [reader.restore(state).step], lambda reader, state: reader.verify()]
)
def test_a_step_that_vanishes_is_not_the_end_of_it(reader, state, monkeypatch, look):
    """The writer has a newer one by then; here, one that is there already."""
    damage_in = manifest.damage_in

    def vanish(folder, *args):
        if folder.name == NEWEST:
            shutil.rmtree(folder)
        return damage_in(folder, *args)

    monkeypatch.setattr(manifest, "damage_in", vanish)
    assert look(reader, state) == [1]


def test_an_array_that_cannot_be_read_is_one_error(reader, state, caplog, monkeypatch):
    """Even if threads read several parts at once."""
    monkeypatch.setattr(arrays, "copy_rows", fails(errno.EIO))
    with pytest.raises(CheckpointError, match=r"in .* cannot be read: OSError: .*Input/output error"):
        reader.restore(state)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": 2.5}, TypeError, r"keep=\) counts checkpoints and must be an int, not 2.5"),
        ({"keep": 0}, ValueError, r"keep=\) counts checkpoints and must be at least 1"),
        ({"every": 1.5}, TypeError, r"every=\) counts steps and must be an int, not 1.5"),
        ({"every": 0}, ValueError, "at least 1"),
        ({"timeout": float("nan")}, ValueError, "above 0"),
    ],
)
def test_every_count_of_a_checkpointer_is_checked(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_step_is_an_integer_of_any_kind(tmp_path, state):
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for i, kind in enumerate((int, np.int64, np.uint8, jnp.int32)):
            assert checkpoints.save(state, step=kind(i))
        checkpoints.wait()
        assert checkpoints.verify() == [0, 1, 2, 3]
        assert checkpoints.restore(state, step=np.int32(2)).step == 2
        for wrong in (1.0, "1", True, np.float32(1), jnp.ones(())):
            for call in (checkpoints.save, checkpoints.restore):
                with pytest.raises(TypeError, match=r"step= is .*Give an integer"):
                    call(state, step=wrong)
        with pytest.raises(ValueError, match="step= is -1"):
            checkpoints.save(state, step=-1)
        with pytest.raises(ValueError, match="step= is a number of 997 bits"):
            checkpoints.save(state, step=10**300)


def test_the_directory_may_be_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with Checkpointer("~/runs") as checkpoints:
        assert checkpoints.directory == tmp_path / "runs"


def test_a_number_of_python_in_the_state_is_named(tmp_path, state):
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(TypeError, match=r"mutable\['rate'\] is 0.1, a float of"):
        checkpoints.save(state.replace(mutable={"rate": 0.1}))


@pytest.mark.parametrize("dtype", ["uint4", "uint2"])
def test_a_type_that_no_checkpoint_holds_is_refused_by_name(dtype):
    if not hasattr(jnp, dtype):
        pytest.skip(f"this JAX has no {dtype}")
    leaf = Leaf("packed.codes", (8,), jnp.dtype(dtype), (), 1, "replicated", None)
    one = StateLeaf("params['packed']['codes']", ("params", "packed", "codes"), leaf, jax.ShapeDtypeStruct((8,), dtype))
    with pytest.raises(CheckpointError, match=rf"codes'\] is {dtype}.*Keep the leaf as uint8"):
        saved_leaves({one.name: one})


def test_every_folder_has_a_name_of_its_own_whatever_the_keys():
    leaf = Leaf("", (1 << 15,), jnp.dtype("float32"), (), 1)
    keys = ["x~2", "x", "X", "x~2", "y" * 300, "Y" * 300]
    leaves = {str(i): StateLeaf(str(i), ("params", key), leaf, jnp.zeros(0)) for i, key in enumerate(keys)}
    names = [one.folder.lower() for one in saved_leaves(leaves)]
    assert len(set(names)) == len(keys)
    assert max(map(len, names)) < 255


def test_orbax_is_quiet(one_step, state, caplog):
    with caplog.at_level(logging.WARNING):
        one_step.save(state, step=2)
        one_step.restore(state)
    assert not caplog.records
