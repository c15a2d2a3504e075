"""No save is lost or falsely reported, and nothing of others is touched."""

import dataclasses
import errno
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import zero_shard
from zerojax.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedError,
    arrays,
    directory,
    import_params,
    restoring,
    saving,
    verifying,
)
from zerojax.checkpoint.manifest import Manifest, read_manifest, write_manifest
from zerojax.checkpoint.saving import Save

TX = zero_shard(optax.sgd(1e-2, momentum=0.9), stage=3, mesh=mesh_of(2), persist_below=8)
LEFT = ".tmp-step_00000007-0123abcd"


@pytest.fixture(scope="module", autouse=True)
def no_leaf_is_packed():
    """All leaves here are small, and the tests are of files of large ones; test_packing.py is of packed ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "SMALL_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def state():
    return TX.create({"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(3)})


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    """Steps 1 and 2."""
    path = tmp_path_factory.mktemp("saved")
    with Checkpointer(path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step)
    return path


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


def rewrite(root, step, **changes):
    """Give a checkpoint another manifest, with its digest."""
    folder = root / f"step_{step:08d}"
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    write_manifest(dataclasses.replace(manifest, **changes), folder)


# --- interrupts and exits ----------------------------------------------------------------------------------------


def interrupt(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that orbax leaves behind
@pytest.mark.parametrize("where", ["write", "start"])
def test_an_interrupted_save_is_not_taken_for_done(tmp_path, state, monkeypatch, where):
    """Also where the thread has begun, as an interrupt in Thread.start finds it."""
    start = threading.Thread.start
    with Checkpointer(tmp_path) as checkpoints:
        with monkeypatch.context() as patched:
            if where == "write":
                patched.setattr(arrays, "write", interrupt)
            else:

                def begun(self):
                    start(self)
                    if self.name.startswith("zerojax"):
                        self.join(0.5)  # as if the interrupt came late: the thread must wait with its commit
                        interrupt()

                patched.setattr(threading.Thread, "start", begun)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(state, step=1)
        for thread in threading.enumerate():
            if thread.name.startswith("zerojax save"):
                thread.join()
        assert not checkpoints.steps()
        assert where == "start" or not list(tmp_path.glob(".tmp*"))
        assert checkpoints.save(state, step=1, force=True)
        checkpoints.wait()
        assert checkpoints.verify() == [1]


def test_an_interrupt_while_waiting_does_not_forget_the_save(tmp_path, state, monkeypatch):
    digest, go_on = Save._digest, threading.Event()
    monkeypatch.setattr(Save, "_digest", lambda self: (go_on.wait(20), digest(self)))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=1)
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(state, step=2)
        finally:
            signal.signal(signal.SIGINT, usual)
        threading.Timer(0.2, go_on.set).start()
    assert checkpoints.steps() == [1]


CHILD = """
import sys
import jax.numpy as jnp, optax
from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.checkpoint.saving import Save
import time

write = Save._write
Save._write = lambda *args: (time.sleep(1), write(*args))
if sys.argv[2] == "fails":
    Save._digest = lambda self: 1 / 0
checkpoints = Checkpointer(sys.argv[1])
checkpoints.save(zero_shard(optax.sgd(1.0), stage=0).create({"w": jnp.ones(4)}), step=3)
"""


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("works", ""),
        pytest.param("fails", "ZeroDivisionError", marks=pytest.mark.slow),
    ],
)
def test_a_save_under_way_at_exit_is_finished(tmp_path, how, error):
    done = subprocess.run([sys.executable, "-c", CHILD, tmp_path, how], capture_output=True, text=True, check=False)
    assert done.returncode == (120 if error else 0)
    if error:
        assert "Saving step 3 " in done.stderr
        assert error in done.stderr
    else:
        assert Checkpointer(tmp_path, read_only=True).verify() == [3]
        assert not done.stderr


def test_a_disk_that_fails_for_good_is_no_success(tmp_path, state, monkeypatch):
    """Not even the list of checkpoints, which the error is to tell, can be read."""

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    checkpoints = Checkpointer(tmp_path)
    with monkeypatch.context() as patched:
        for work in ("sync", "steps_in", "remove"):
            patched.setattr(directory, work, fail)
        checkpoints.save(state, step=1)
        with pytest.raises(CheckpointError, match=r"(?s)Saving step 1 .*cannot be listed: Input/output error"):
            checkpoints.wait()
    assert not checkpoints.steps()
    checkpoints.save(state, step=1)
    checkpoints.close()
    assert checkpoints.verify() == [1]


def test_a_version_that_cannot_be_read_is_a_failed_save(tmp_path, state, monkeypatch):
    """It is in a file of the installed package."""

    def fail(name):
        raise OSError(errno.EMFILE, "Too many open files")

    checkpoints = Checkpointer(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(importlib.metadata, "version", fail)
        checkpoints.save(state, step=1)
        with pytest.raises(CheckpointError, match=r"Saving step 1 .*Too many open files"):
            checkpoints.wait()
    checkpoints.save(state, step=1)
    checkpoints.close()
    assert checkpoints.verify() == [1]


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


# --- incomplete checkpoints --------------------------------------------------------------------------------------

LACKING = [
    ("params.w/1.0", r"params\['w'\], arrays/params.w/1.0: is missing"),
    ("params.w/.zarray", r"params\['w'\], arrays/params.w/.zarray: is missing"),
    ("step", r"step, arrays/step/.zarray: is missing"),
    ("../data.0.json", r"data.0.json: is missing"),
]


@pytest.mark.parametrize(("name", "says"), LACKING)
def test_a_checkpoint_that_lacks_files_is_not_committed(tmp_path, state, monkeypatch, name, says):
    digest = Save._digest

    def lose(self):
        path = self._temporary / "arrays" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        digest(self)

    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(state, step=1)
    checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr(Save, "_digest", lose)
        checkpoints.save(state, step=2)
        with pytest.raises(CheckpointError, match=rf"(?s)Saving step 2 .*{says}.*newest checkpoint is that of step 1"):
            checkpoints.close()
    assert checkpoints.steps() == [1]


# --- leftovers and other writers ---------------------------------------------------------------------------------


def test_a_second_writer_leaves_what_the_first_is_writing(tmp_path, state, monkeypatch):
    """Its lock file is gone."""
    digest, go_on = Save._digest, threading.Event()
    monkeypatch.setattr(Save, "_digest", lambda self: (go_on.wait(20), digest(self)))
    first = Checkpointer(tmp_path)
    first.save(state, step=1)
    (tmp_path / ".lock").unlink()
    Checkpointer(tmp_path).close()
    assert list(tmp_path.glob(".tmp-step_00000001-*"))
    go_on.set()
    first.close()
    assert first.verify() == [1]


def test_only_names_that_saves_make_are_removed(tmp_path):
    others = [".tmp-mywork", ".tmp-step_00000001-mine", ".old-step_1", ".old-mine"]
    for name in others:
        (tmp_path / name).mkdir()
    Checkpointer(tmp_path).close()
    assert set(others) < set(os.listdir(tmp_path))


@pytest.mark.parametrize("kind", ["link", "file", "pipe"])
def test_a_leftover_that_cannot_be_removed_is_warned_of(tmp_path, kind, caplog):
    left, elsewhere = tmp_path / LEFT, tmp_path / "elsewhere"
    elsewhere.mkdir()
    {"link": lambda: left.symlink_to(elsewhere), "file": left.touch, "pipe": lambda: os.mkfifo(left)}[kind]()
    for _ in range(2):
        Checkpointer(tmp_path).close()
    assert f"{LEFT} in {tmp_path}, which a killed run left, is no folder" in caplog.text
    assert elsewhere.exists()


def test_an_open_that_fails_releases_its_lock(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(directory, "clean", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match="Input/output error"):
            Checkpointer(tmp_path)
    Checkpointer(tmp_path).close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": 2.5}, TypeError, r"keep=\) counts checkpoints and must be an int, not 2.5"),
        ({"every": 1.5}, TypeError, r"every=\) counts steps and must be an int, not 1.5"),
        ({"every": 0}, ValueError, "at least 1"),
        ({"timeout": float("nan")}, ValueError, "above 0"),
    ],
)
def test_every_count_of_a_checkpointer_is_checked(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        Checkpointer(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_as_many_renamed_checkpoints_as_others_are_kept(tmp_path, state):
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for last in (3, 4, 5):
            for step in range(1, last):
                checkpoints.save(state, step=step)
    asides = sorted(name for name in os.listdir(tmp_path) if ".aside" in name)
    assert len(asides) == 2
    assert checkpoints.steps() == [3, 4]


# --- a reader beside a writer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["verified", "read", "after"])
def test_a_step_that_vanishes_while_it_is_read_is_said(copied, state, monkeypatch, when):
    def vanish(work):
        def vanishing(*args, **options):
            if when == "after":
                result = work(*args, **options)
                shutil.rmtree(copied / "step_00000002")
                return result
            shutil.rmtree(copied / "step_00000002")
            return work(*args, **options)

        return vanishing

    if when == "verified":
        monkeypatch.setattr(
            "zerojax.checkpoint.verifying.damage_in", vanish(lambda *args: [("", "file", "is missing")])
        )
    else:
        monkeypatch.setattr(restoring, "read_leaves", vanish(restoring.read_leaves))
    checkpoints = Checkpointer(copied, read_only=True)
    monkeypatch.setattr("zerojax.checkpoint.checkpointer.retried", lambda work: work())
    with pytest.raises(CheckpointError, match=r"step 2 .* was removed or replaced while it was read") as caught:
        checkpoints.restore(state)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize("look", ["restore", "verify"])
def test_a_step_that_vanishes_is_not_the_end_of_it(copied, state, monkeypatch, look):
    """The writer has a newer one by then; here, one that is there already."""
    damage_in = verifying.damage_in

    def vanish(folder, *args):
        if folder.name == "step_00000002":
            shutil.rmtree(folder)
        return damage_in(folder, *args)

    monkeypatch.setattr(verifying, "damage_in", vanish)
    checkpoints = Checkpointer(copied, read_only=True)
    if look == "restore":
        assert checkpoints.restore(state).step == 1
    else:
        assert checkpoints.verify() == [1]


# --- arguments ---------------------------------------------------------------------------------------------------


def test_a_step_is_an_integer_of_any_kind(tmp_path, state):
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for i, kind in enumerate((int, np.int64, np.uint8, jnp.int32)):
            assert checkpoints.save(state, step=kind(i))
        checkpoints.wait()
        assert checkpoints.verify() == [0, 1, 2, 3]
        assert checkpoints.restore(state, step=np.int32(2)).step == 2
        for wrong in (1.0, "1", True, np.float32(1), jnp.ones(())):
            with pytest.raises(TypeError, match=r"step= is .*Give an integer"):
                checkpoints.save(state, step=wrong)
            with pytest.raises(TypeError, match=r"step= is .*Give an integer"):
                checkpoints.restore(state, step=wrong)
        with pytest.raises(ValueError, match="step= is -1"):
            checkpoints.save(state, step=-1)
        with pytest.raises(ValueError, match="step= is a number of 997 bits"):
            checkpoints.save(state, step=10**300)


def test_the_directory_may_be_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with Checkpointer("~/runs") as checkpoints:
        assert checkpoints.directory == tmp_path / "runs"
    with pytest.raises(ValueError, match="names no folder"):
        Checkpointer("")


def test_a_number_of_python_in_the_state_is_named(tmp_path, state):
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(TypeError, match=r"mutable\['rate'\] is 0.1, a float of"):
        checkpoints.save(state.replace(mutable={"rate": 0.1}))


def test_keys_of_another_implementation_are_named(tmp_path):
    state = TX.create({"w": jnp.ones((8, 4))}, mutable={"rng": jax.random.key(0)})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=2)
    leaves = [
        dataclasses.replace(one, key="rbg") if one.key else one
        for one in read_manifest(tmp_path / "step_00000002").leaves
    ]
    rewrite(tmp_path, 2, leaves=tuple(leaves))
    with pytest.raises(CheckpointError, match=r"mutable\['rng'\] is said to be PRNG keys of rbg, and is not"):
        Checkpointer(tmp_path, read_only=True).restore(state)


def test_an_array_that_cannot_be_read_is_one_error(saved, state, caplog, monkeypatch):
    """Even if threads read several parts at once."""

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(arrays, "copy_rows", fail)
    with pytest.raises(CheckpointError, match=r"in .* cannot be read: OSError: .*Input/output error"):
        Checkpointer(saved, read_only=True).restore(state)
    assert not caplog.records


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", ".."])
def test_an_index_names_files_beside_it_alone(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match=r"index.json names .*not a file beside it"):
        import_params(tmp_path, {"w": jnp.ones(3)})


def test_a_file_of_an_index_that_is_not_there_is_named(tmp_path):
    for name in ("other.safetensors", "x" * 5000):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(FileNotFoundError, match="is not there, though the index beside it names it"):
            import_params(tmp_path, {"w": jnp.ones(3)})


def test_a_damaged_file_of_safetensors_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    for content in (b"", b"nonsense of some length"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model.safetensors is no intact file of safetensors"):
            import_params(path, {"w": jnp.ones(3)})
    path.unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index.json is no index of safetensors"):
        import_params(tmp_path, {"w": jnp.ones(3)})
