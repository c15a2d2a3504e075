"""What can happen to the files: damage is found and named, failures leave the run and the older checkpoints intact."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import NEWEST, flip, zero
from conftest import fraction, mesh_of, mounted

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError, arrays, directory, saving
from zerojax.checkpoint.manifest import read_manifest
from zerojax.checkpoint.saving import Save

TX = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(4), persist_below=64)
# A file of each kind: a shard, a flat leaf, a scalar, zarr's metadata and orbax's, the data, the manifest, its digest.
FILES = {
    "arrays/params.w/1.0": "params['w']",
    "arrays/opt_state.0.mu.b/0": "opt_state[0].mu['b']",
    "arrays/scaling.scale/0": "scaling.scale",
    "arrays/opt_state.0.mu.w/.zarray": "opt_state[0].mu['w']",
    "arrays/_METADATA": "",
    "data.0.json": "",
    "manifest.json": "",
    "manifest.sha256": "",
}


@pytest.fixture(scope="module", autouse=True)
def no_leaf_is_packed():
    """All leaves here are small, and the tests are of files of large ones; test_packing.py is of packed ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "SMALL_BYTES", 0)
        yield


def zero_4kb(path):
    zero(path, path.stat().st_size // 4, 4096)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {"flipped bit": flip, "4 KB of zeros": zero_4kb, "truncated": truncate, "missing": os.unlink}


def state_of(step):
    """A state whose every number tells its step."""
    state = TX.create(jax.eval_shape(lambda: {"w": jnp.zeros((80, 64)), "b": jnp.zeros(12)}))
    fill = lambda x: jax.device_put(np.full(x.shape, step + 1, x.dtype), x.sharding)
    return jax.tree.map(fill, state)


def assert_is(state, step):
    for x in jax.tree.leaves(state):
        assert (np.asarray(x) == np.asarray(step + 1, x.dtype)).all()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    with Checkpointer(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_of(step), {"step": step}, step=step)
    return directory


@pytest.mark.parametrize(("file", "damage"), fraction(2, FILES, DAMAGES))
def test_damage_is_found_and_named_and_an_intact_one_taken(two_steps, tmp_path, file, damage):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](tmp_path / NEWEST / file)
    checkpoints = Checkpointer(tmp_path, read_only=True)
    for look in (checkpoints.verify, lambda: checkpoints.restore(state_of(0))):
        with pytest.raises(DamagedError, match=r"The checkpoint of step 2 in .* is damaged") as caught:
            look()
        ((leaf, named, _),) = caught.value.damage
        assert leaf == FILES[file]
        assert file in named
        assert file in str(caught.value)
        assert leaf in str(caught.value)
    assert caught.value.intact == 1
    with pytest.warns(UserWarning, match=r"step 2 .* is damaged .*Taking that of step 1 instead"):
        restored = checkpoints.restore(state_of(0), fallback=True)
    assert (restored.step, restored.data) == (1, {"step": 1})
    assert_is(restored.state, 1)


def test_every_file_has_a_digest(two_steps):
    folder = two_steps / NEWEST
    manifest = read_manifest(folder)
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert found == set(manifest.files) | {"manifest.json", "manifest.sha256"}
    sums = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=folder, capture_output=True, check=False)
    assert sums.returncode == 0


def test_a_run_goes_on_from_the_intact_one_and_replaces_the_damaged(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    flip(tmp_path / NEWEST / "arrays/params.w/1.0")
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="Taking that of step 1"):
            checkpoints.restore(state_of(0), fallback=True)
        checkpoints.save(state_of(2), {"step": 2}, step=2)
        checkpoints.wait()
        assert checkpoints.verify() == [1, 2]


def test_going_back_loses_nothing(two_steps, tmp_path, caplog):
    """Even if but one is kept: the damaged later one is renamed, and does not count as the newest."""
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.restore(state_of(0), step=1)
        checkpoints.save(state_of(1), step=1)
        checkpoints.wait()
        assert (checkpoints.latest(), checkpoints.verify()) == (1, [1])
    assert "step_00000002.aside" in caplog.text
    assert (tmp_path / "step_00000002.aside" / "manifest.json").exists()


FILES_OF, MANIFEST_OF = "zerojax.checkpoint.directory", "zerojax.checkpoint.manifest"


class Killed(BaseException):
    """What ends a thread as a kill would: nothing cleans up after it."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kill_before_any_operation_on_files_leaves_complete_checkpoints(two_steps, tmp_path, monkeypatch):
    """The newest is replaced and the older one pruned; killed before each renaming, removal and written manifest."""
    for k in range(100):
        directory = tmp_path / str(k)
        shutil.copytree(two_steps, directory)
        left = [k]

        def counted(operation, left=left):
            def work(*args, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return operation(*args, **options)

            return work

        checkpoints = Checkpointer(directory, keep=1)
        with monkeypatch.context() as patched:
            for place in ("os.rename", "shutil.rmtree", f"{FILES_OF}.write_synced", f"{MANIFEST_OF}.write_synced"):
                module, name = place.rsplit(".", 1)
                patched.setattr(place, counted(getattr(sys.modules[module], name)))
            checkpoints.save(state_of(7), {"step": 7}, step=2)
            checkpoints._last_save.thread.join()
        checkpoints._unlock()
        with Checkpointer(directory) as after:
            assert after.verify() == after.steps()
            assert after.latest() == 2, f"killed before operation {k}"
            restored = after.restore(state_of(0))
            assert_is(restored.state, restored.data["step"])
        if left[0] >= 0:
            break
    assert after.steps() == [2]
    assert restored.data == {"step": 7}
    assert k > 8


def test_no_intact_one_is_said(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    for step in ("step_00000001", NEWEST):
        flip(tmp_path / step / "arrays/params.w/1.0")
    with pytest.raises(DamagedError, match="No other checkpoint is intact"):
        Checkpointer(tmp_path, read_only=True).restore(state_of(0), fallback=True)


# --- failures while saving ---------------------------------------------------------------------------------------


def assert_intact(checkpoints, state, step):
    """The run's state is unchanged, the older checkpoint intact, and nothing incomplete is left."""
    assert_is(state, step)
    assert checkpoints.latest() == 1
    assert checkpoints.verify() == [1]
    assert_is(checkpoints.restore(state).state, 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that orbax leaves behind
def test_a_disk_that_another_fills(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=700k", "tmpfs") as directory:
        checkpoints = Checkpointer(directory)
        checkpoints.save(state_of(1), step=1)
        checkpoints.wait()
        (directory / "filler").write_bytes(bytes(400_000))
        state = state_of(2)
        checkpoints.save(state, step=2)
        with pytest.raises(CheckpointError, match=r"(?s)Saving step 2 .* failed: .*No space left.*\nThe newest"):
            checkpoints.wait()
        assert_intact(checkpoints, state, 2)
        assert not list(directory.glob(".tmp*"))
        (directory / "filler").unlink()
        checkpoints.save(state, step=2)
        checkpoints.close()
        assert checkpoints.verify() == [1, 2]


def test_a_folder_that_a_late_write_brings_back_is_removed_again(tmp_path):
    late = threading.Timer(0.1, lambda: (tmp_path / "save" / "arrays").mkdir(parents=True))
    late.start()
    directory.remove(tmp_path / "save")
    late.join()
    assert not (tmp_path / "save").exists()


def test_a_leftover_folder_that_a_write_is_filling_is_removed_when_it_is_done(tmp_path, monkeypatch):
    left, real = tmp_path / directory.temporary_name(7), shutil.rmtree
    (left / "arrays").mkdir(parents=True)

    def rmtree(path, *args, **options):
        monkeypatch.setattr(shutil, "rmtree", real)
        if not options.get("ignore_errors"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with Checkpointer(tmp_path):
        assert not left.exists()


def test_a_failed_write_is_waited_for_with_those_beside_it():
    slow, ended = ThreadPoolExecutor(2), []
    futures = [slow.submit(lambda: 1 / 0), slow.submit(lambda: (time.sleep(0.2), ended.append(True)))]
    with pytest.raises(ZeroDivisionError):
        arrays.wait_for(futures)
    assert ended


def test_a_disk_that_became_read_only(tmp_path):
    directory = tmp_path / "checkpoints"
    with Checkpointer(directory) as checkpoints:
        checkpoints.save(state_of(1), step=1)
        checkpoints.wait()
        state = state_of(2)
        with mounted(directory, "-o", "bind,ro", directory):
            with pytest.raises(CheckpointError, match=r"(?s)Saving step 2 .* failed: .*Read-only file system"):
                checkpoints.save(state, step=2)
            assert_intact(checkpoints, state, 2)
            with pytest.raises(CheckpointError, match=r"cannot be written to .*Read-only file system"):
                Checkpointer(directory)
        assert checkpoints.save(state, step=2)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(CheckpointError, match=r"Checkpoints cannot be written to .*exists"):
        Checkpointer(tmp_path / "file")
    assert Checkpointer(tmp_path / "file", read_only=True).latest() is None


@pytest.mark.parametrize("what", ["all of it", "what is being written"])
def test_a_folder_deleted_under_way(tmp_path, monkeypatch, what):
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpointer(directory)
    checkpoints.save(state_of(1), step=1)
    checkpoints.wait()
    digest = Save._digest

    def delete(self):
        shutil.rmtree(directory if what == "all of it" else self._temporary)
        digest(self)

    monkeypatch.setattr(Save, "_digest", delete)
    state = state_of(2)
    checkpoints.save(state, step=2)
    with pytest.raises(CheckpointError, match=r"(?s)Saving step 2 to .* failed: FileNotFoundError: .*No such file"):
        checkpoints.wait()
    assert_is(state, 2)
    if what == "all of it":
        assert checkpoints.latest() is None
        with pytest.raises(CheckpointError, match=r"(?s)No such file.*There is no checkpoint yet"):
            checkpoints.save(state, step=3)
        checkpoints.close()
    else:
        assert_intact(checkpoints, state, 2)
        checkpoints.close()


def test_a_failure_surfaces_at_the_next_call_once(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("the disk burns")

    checkpoints, state = Checkpointer(tmp_path), state_of(1)
    with monkeypatch.context() as patched:
        patched.setattr(Save, "_digest", fail)
        assert checkpoints.save(state, step=1)
        checkpoints._last_save.thread.join()
    with pytest.raises(CheckpointError, match=r"Saving step 1 .* failed: OSError: the disk burns"):
        checkpoints.save(state, step=2)
    assert checkpoints.save(state, step=2)
    checkpoints.close()
    assert checkpoints.verify() == [2]


def test_a_failed_save_does_not_hide_the_error_that_ends_the_block(tmp_path, monkeypatch):
    def fail(self):
        raise OSError("the disk burns")

    monkeypatch.setattr(Save, "_digest", fail)

    def block():
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(state_of(1), step=1)
            raise KeyError

    with pytest.warns(UserWarning, match="the disk burns"), pytest.raises(KeyError):
        block()


def test_orbax_is_quiet(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state_of(1), step=1)
        checkpoints.restore(state_of(1))
    assert not caplog.records
