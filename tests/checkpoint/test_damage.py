"""Damage of any file of a checkpoint is found and named, and the newest checkpoint that is intact is taken instead."""

import functools
import math
import os
import shutil
import subprocess
import sys
import types

import optax
import pytest
from checkpoints import NEWEST, SHAPES, assert_same, files_of, filled, flip, rewrite_manifest, sign, zero
from conftest import fraction, mesh_of

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError, arrays, export_checkpoint, manifest, saving
from zerojax.checkpoint.manifest import MANIFEST, read_manifest

TX = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=64))
state_of = functools.partial(filled, TX, SHAPES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1 and 2. In "folders", each leaf has a folder; in "packed", only the large leaf has one."""
    root = tmp_path_factory.mktemp("saved")
    for form, small in (("folders", 0), ("packed", saving.SMALL_BYTES)):
        with pytest.MonkeyPatch.context() as patched, Checkpointer(root / form) as checkpoints:
            patched.setattr(saving, "SMALL_BYTES", small)
            for step in (1, 2):
                checkpoints.save(state_of(step), {"step": step}, step=step)
    return root


@pytest.fixture
def folders(saved, tmp_path):
    return shutil.copytree(saved / "folders", tmp_path / "run")


@pytest.fixture
def packed(saved, tmp_path):
    return shutil.copytree(saved / "packed", tmp_path / "run")


def assert_damaged(root, expected):
    """Each way to read the newest checkpoint names the leaves, files and problems, and the step before can be taken."""
    checkpoints, out = Checkpointer(root, read_only=True), root / "out"
    looks = (checkpoints.verify, lambda: export_checkpoint(root, out), lambda: checkpoints.restore(state_of()))
    for look in looks:
        with pytest.raises(DamagedError, match=r"The checkpoint of step 2 in .* is damaged") as caught:
            look()
        for found, wanted in zip(sorted(caught.value.damage)[:5], sorted(expected)[:5], strict=True):
            assert found[0] == wanted[0]
            assert wanted[1] in found[1]
            assert wanted[2] in found[2]
        assert all(part in str(caught.value) for part in expected[0])
    assert not out.exists()
    assert caught.value.intact == 1
    with pytest.warns(UserWarning, match=r"step 2 .* is damaged .*Taking that of step 1 instead"):
        restored = checkpoints.restore(state_of(), fallback=True)
    assert (restored.step, restored.data) == (1, {"step": 1})
    assert_same(restored.state, state_of(1))


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
DAMAGES = {
    "flipped bit": flip,
    "4 KB of zeros": lambda path: zero(path, path.stat().st_size // 4, 4096),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": os.unlink,
}


@pytest.mark.parametrize(("file", "damage"), fraction(2, FILES, DAMAGES))
def test_damage_of_a_file_is_found(folders, file, damage):
    DAMAGES[damage](folders / NEWEST / file)
    assert_damaged(folders, [(FILES[file], file, "")])


@pytest.mark.parametrize("leaf", ["params['w']", "params['odd']", "params['b']", "opt_state[0].mu['w']", "step"])
@pytest.mark.parametrize("damage", [flip, zero])
def test_damage_names_the_one_packed_leaf(packed, leaf, damage):
    (saved,) = [one for one in read_manifest(packed / NEWEST).leaves if one.name == leaf]
    ((piece,), path) = saved.pieces, packed / NEWEST / "packed.0.bin"
    damage(path, piece.offset, math.prod(piece.shape) * saved.storage_dtype.itemsize)
    assert_damaged(packed, [(leaf, "packed.0.bin", "has other contents than were written")])
    with pytest.raises(CheckpointError) as caught:  # after it was verified
        arrays.read_packed(packed / NEWEST, saved)
    assert str(caught.value) == f"{leaf} in {path} has other contents than were written."


def test_a_packed_file_cut_off_lost_or_too_long_names_its_leaves(packed):
    path, pieces = packed / NEWEST / "packed.0.bin", read_manifest(packed / NEWEST).packed()["packed.0.bin"]
    content, (_, first), names = path.read_bytes(), pieces[-2], [leaf.name for leaf, _ in pieces]
    path.write_bytes(content[: first.offset + 1])
    what = f"has {first.offset + 1} bytes instead of {len(content)}"
    assert_damaged(packed, [(name, "packed.0.bin", what) for name in names[-2:]])
    path.write_bytes(content + b"\0")
    assert_damaged(packed, [("", "packed.0.bin", f"has {len(content) + 1} bytes instead of {len(content)}")])
    path.unlink()
    with pytest.raises(DamagedError, match=rf"; and {len(names) - 5} more") as caught:
        Checkpointer(packed, read_only=True).verify()
    assert caught.value.damage == tuple((name, "packed.0.bin", "is missing") for name in names)


def linked_outside(folder):
    (folder / "packed.0.bin").rename(folder.parent / "secret")
    (folder / "packed.0.bin").symlink_to("../secret")


def replaced(name, make):
    """Remove a file, and make something else of its name."""
    return lambda folder: ((folder / name).unlink(), make(folder / name))


FOREIGN = {
    "a link": (linked_outside, "packed.0.bin", "cannot be read: it is no plain file in the checkpoint's folder"),
    "a pipe": (replaced("data.0.json", os.mkfifo), "data.0.json", "it is no plain file"),
    "a link to a manifest": (
        replaced(MANIFEST, lambda path: path.symlink_to("data.0.json")),
        MANIFEST,
        "cannot be read: it is no plain file",
    ),
    "the manifest of another program": (lambda folder: sign(folder, b'{"version": "x"}'), MANIFEST, "is no manifest"),
    "no manifest": (lambda folder: sign(folder, b"[]"), MANIFEST, "is no manifest"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_no_save_wrote_is_damage(packed, kind):
    change, file, problem = FOREIGN[kind]
    change(packed / NEWEST)
    assert_damaged(packed, [("", file, problem)])


def test_a_file_without_a_digest_is_damage(folders):
    """So no file is read that was not verified, whatever a manifest says."""
    hidden = [name for name in read_manifest(folders / NEWEST).files if name.startswith("arrays/params.w/")]
    rewrite_manifest(folders / NEWEST, lambda body: [body["files"].pop(name) for name in hidden])
    assert_damaged(folders, [("params['w']", "arrays/params.w/.zarray", "is missing")])


def test_the_first_process_says_which_checkpoints_there_are(packed, monkeypatch):
    """The file system shows this process an older list."""
    processes = types.SimpleNamespace(index=1, count=2)
    processes.exchange = lambda topic, message: ["[1, 2]" if "list" in topic else "[]", message]
    monkeypatch.setattr(manifest, "steps_in", lambda root: [1])
    assert manifest.newest_verified(packed, 2, False, processes).step == 2


@pytest.mark.parametrize("form", ["folders", "packed"])
def test_every_file_has_a_digest(saved, form):
    folder = saved / form / NEWEST
    assert set(files_of(folder)) == set(read_manifest(folder).files) | {"manifest.json", "manifest.sha256"}
    sums = subprocess.run(["sha256sum", "-c", "manifest.sha256"], cwd=folder, capture_output=True, check=False)
    assert sums.returncode == 0


def test_a_run_goes_on_from_the_intact_one_and_replaces_the_damaged(folders):
    flip(folders / NEWEST / "arrays/params.w/1.0")
    with Checkpointer(folders) as checkpoints:
        with pytest.warns(UserWarning, match="Taking that of step 1"):
            checkpoints.restore(state_of(), fallback=True)
        checkpoints.save(state_of(2), {"step": 2}, step=2)
        checkpoints.wait()
        assert checkpoints.verify() == [1, 2]


def test_going_back_loses_nothing(packed, caplog):
    """Even if but one is kept: the later one, which may be damaged, is renamed, and does not count as the newest."""
    with Checkpointer(packed, keep=1) as checkpoints:
        checkpoints.restore(state_of(), step=1)
        checkpoints.save(state_of(1), step=1)
        checkpoints.wait()
        assert (checkpoints.latest(), checkpoints.verify()) == (1, [1])
    assert "step_00000002.aside" in caplog.text
    assert (packed / "step_00000002.aside" / "manifest.json").exists()


def test_no_intact_one_is_said(folders):
    for step in ("step_00000001", NEWEST):
        flip(folders / step / "arrays/params.w/1.0")
    with pytest.raises(DamagedError, match="No other checkpoint is intact"):
        Checkpointer(folders, read_only=True).restore(state_of(), fallback=True)


FILES_OF, MANIFEST_OF = "zerojax.checkpoint.directory", "zerojax.checkpoint.manifest"


class Killed(BaseException):
    """What ends a thread as a kill would: nothing cleans up after it."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_kill_before_any_operation_on_files_leaves_complete_checkpoints(saved, tmp_path, monkeypatch):
    """The newest is replaced and the older one pruned; killed before each renaming, removal and written manifest."""
    for k in range(100):
        directory = shutil.copytree(saved / "packed", tmp_path / str(k))
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
            restored = after.restore(state_of())
            assert_same(restored.state, state_of(restored.data["step"]))
        if left[0] >= 0:
            break
    assert after.steps() == [2]
    assert restored.data == {"step": 7}
    assert k > 8
