"""Small leaves are packed: few files, each leaf with a digest, and nothing that a checkpoint of folders has is lost."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest
import several
from checkpoints import NEWEST, flip, logical_leaves, zero
from conftest import mesh_of
from small_leaves_child import KEYS, SHAPES

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedError, export_checkpoint, packing, saving
from zerojax.checkpoint.arrays import ArrayHandler, type_handlers
from zerojax.checkpoint.manifest import SavedLeaf, digest_line, read_manifest
from zerojax.checkpoint.saving import Save

TX = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(4), persist_below=64)


def filled(tx, shapes, step=0):
    """A state of which each number tells its step, its leaf and its place; nothing is compiled."""
    leaves, structure = jax.tree.flatten(tx.create(shapes))

    def fill(k, x):
        numbers = (np.arange(x.size).reshape(x.shape) + 7 * k + step) % 100
        return jax.device_put((numbers % 2 if x.dtype == bool else numbers % 8).astype(x.dtype), x.sharding)

    return jax.tree.unflatten(structure, [fill(k, x) for k, x in enumerate(leaves)])


def contents(state):
    """Type and bytes of all leaves in logical shape, by name."""
    return {name: (x.dtype.name, x.tobytes()) for name, x in logical_leaves(state).items()}


def keyed():
    return {"keys": jax.random.split(jax.random.key(4), 3)}


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    with Checkpointer(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(filled(TX, SHAPES, step), step=step)
    return directory


@pytest.fixture
def copied(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_many_small_leaves_make_few_files(tmp_path):
    """AdamW has three leaves for each; a large leaf has its folder beside them."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((16, 8 + i % 9), "float32") for i in range(60)}
    shapes["large"] = jax.ShapeDtypeStruct((256, 256), "float32")
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh_of(8), persist_below=64)
    state = filled(tx, shapes)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=2)
        checkpoints.wait()
        files = files_of(tmp_path / NEWEST)
        assert len(files) <= 60
        assert files == sorted({*read_manifest(tmp_path / NEWEST).files, "manifest.json", "manifest.sha256"})
        assert "packed.0.bin" in files
        assert "arrays/params.large/7.0" in files
        assert contents(checkpoints.restore(tx.create(shapes)).state) == contents(state)


KINDS = {"bits": (5, "int4"), "flags": (9, "bool"), "eighth": (33, "float8_e4m3fn"), "half": (70, "float16")}


@pytest.mark.parametrize("packed", [True, False])
def test_every_type_comes_back_on_other_devices_and_stages(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(saving, "SMALL_BYTES", 1 << 16 if packed else 0)
    shapes = SHAPES | {name: jax.ShapeDtypeStruct((size,), dtype) for name, (size, dtype) in KINDS.items()}

    def make(stage, count):
        trained = {"persist_below": 64, "trainable": lambda path, _: path in SHAPES}
        return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(count), **trained)

    state = filled(make(3, 4), shapes).replace(mutable=keyed())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=2)
        checkpoints.wait()
        assert ("packed.0.bin" in files_of(tmp_path / NEWEST)) == packed
        for stage, count in ((3, 4), (0, 1), (1, 3), (2, 8)):
            like = make(stage, count).create(shapes, mutable=jax.eval_shape(lambda: state.mutable))
            assert contents(checkpoints.restore(like).state) == contents(state)


DAMAGES = {"flipped bit": flip, "zeros": zero}
LEAVES = ["params['w']", "params['odd']", "params['b']", "opt_state[0].mu['w']", "step"]


def assert_damaged(root, expected):
    """Verifying and restoring name the leaves, and the step before can be taken."""
    checkpoints = Checkpointer(root, read_only=True)
    for look in (checkpoints.verify, lambda: checkpoints.restore(TX.create(SHAPES))):
        with pytest.raises(DamagedError, match=r"The checkpoint of step 2 in .* is damaged") as caught:
            look()
        assert sorted(caught.value.damage)[:5] == sorted(expected)[:5]
        assert expected[0][0] in str(caught.value)
    with pytest.warns(UserWarning, match="Taking that of step 1"):
        restored = checkpoints.restore(TX.create(SHAPES), fallback=True)
    assert contents(restored.state) == contents(filled(TX, SHAPES, 1))


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_names_the_one_leaf(copied, leaf, damage):
    (saved,) = [one for one in read_manifest(copied / NEWEST).leaves if one.name == leaf]
    ((piece,), path) = saved.pieces, copied / NEWEST / "packed.0.bin"
    DAMAGES[damage](path, piece.offset, int(np.prod(piece.shape)) * saved.storage_dtype.itemsize)
    assert_damaged(copied, [(leaf, "packed.0.bin", "has other contents than were written")])
    with pytest.raises(CheckpointError) as caught:  # after it was verified
        packing.read(copied / NEWEST, saved)
    assert str(caught.value) == f"{leaf} in {path} has other contents than were written."


def test_a_file_cut_off_lost_or_too_long_names_its_leaves(copied):
    path, pieces = copied / NEWEST / "packed.0.bin", read_manifest(copied / NEWEST).packed()["packed.0.bin"]
    content, (_, first), names = path.read_bytes(), pieces[-2], [leaf.name for leaf, _ in pieces]
    path.write_bytes(content[: first.offset + 1])
    what = f"has {first.offset + 1} bytes instead of {len(content)}"
    assert_damaged(copied, [(name, "packed.0.bin", what) for name in names[-2:]])
    path.write_bytes(content + b"\0")
    assert_damaged(copied, [("", "packed.0.bin", f"has {len(content) + 1} bytes instead of {len(content)}")])
    path.unlink()
    with pytest.raises(DamagedError, match=rf"; and {len(names) - 5} more") as caught:
        Checkpointer(copied, read_only=True).verify()
    assert caught.value.damage == tuple((name, "packed.0.bin", "is missing") for name in names)


@pytest.mark.parametrize("what", ["lost", "changed"])
def test_leaves_that_were_not_written_are_not_committed(tmp_path, monkeypatch, what):
    """Changed before the file is digested: its digest is of the change, that of the leaf is not."""
    state, done = filled(TX, SHAPES), Save._digest
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=1)
        checkpoints.wait()

        def damage(self):
            path = self._temporary / "packed.0.bin"
            path.unlink() if what == "lost" else flip(path, 0, 4)
            done(self)

        monkeypatch.setattr(Save, "_digest", damage)
        checkpoints.save(state, step=2)
        says = {"lost": "packed.0.bin: is missing", "changed": "packed.0.bin: has other contents than were written"}
        with pytest.raises(CheckpointError, match=rf"(?s)Saving step 2 .*step, {says[what]}.*that of step 1"):
            checkpoints.wait()
        assert checkpoints.verify() == [1]
        assert not list(tmp_path.glob(".tmp*"))


def sign(folder, body):
    text = json.dumps(body).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_text(digest_line(text))


def test_a_checkpoint_of_format_1_is_restored(tmp_path, monkeypatch):
    """It has a folder per leaf, and its manifest no pieces."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    state = filled(TX, SHAPES)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, step=2)
    body = json.loads((tmp_path / NEWEST / "manifest.json").read_text()) | {"version": 1}
    for leaf in body["leaves"]:
        assert leaf.pop("pieces") == []
    sign(tmp_path / NEWEST, body)
    checkpoints = Checkpointer(tmp_path, read_only=True)
    assert checkpoints.verify() == [2]
    assert contents(checkpoints.restore(TX.create(SHAPES)).state) == contents(state)


def test_a_packed_leaf_is_read_with_numpy_and_exported(two_steps, tmp_path):
    """As docs/checkpoint.md says."""
    folder, state = two_steps / NEWEST, filled(TX, SHAPES, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    (leaf,) = [leaf for leaf in manifest["leaves"] if leaf["name"] == "params['w']"]
    (piece,) = leaf["pieces"]
    values = np.fromfile(folder / piece["file"], leaf["dtype"], np.prod(piece["shape"]), offset=piece["offset"])
    assert ("float32", values.tobytes()) == contents(state)["params['w']"]
    from safetensors.numpy import load_file

    (file,) = export_checkpoint(two_steps, tmp_path / "out")
    found = {f"params['{name}']": (x.dtype.name, x.tobytes()) for name, x in load_file(file).items()}
    assert found == {name: text for name, text in contents(state).items() if name.startswith("params")}


# --- several processes -------------------------------------------------------------------------------------------


def test_blocks_of_several_processes_are_one_leaf(tmp_path):
    """Also where those of a process do not follow one another."""
    whole, pieces = np.arange(48, dtype=np.int16).reshape(8, 6), []
    for process, rows in enumerate(([0, 2], [3], [1], [])):
        blocks = [packing.Block("x", (2 * i, 0), whole[2 * i : 2 * i + 2]) for i in rows]
        pieces += packing.write(tmp_path / packing.packed_file(process), blocks).get("x", [])
    assert len(files_of(tmp_path)) == 3
    leaf = SavedLeaf("x", ("x",), whole.shape, "int16", "replicated", "", pieces=tuple(pieces))
    assert np.array_equal(packing.read(tmp_path, leaf), whole)


@pytest.mark.slow
def test_any_number_of_processes_restores_what_any_other_saved(tmp_path):
    """One, then three, then two, then one."""
    state = filled(TX, SHAPES).replace(mutable=keyed())
    with Checkpointer(tmp_path / "1") as checkpoints:
        checkpoints.save(state, step=2)
    for source, count in (("1", 3), ("3", 2)):
        target = tmp_path / str(count)
        several.run("small_leaves_child.py", tmp_path / source, target, count, processes=count)
        files = files_of(target / NEWEST)
        assert len([name for name in files if name.startswith("packed")]) == count
        pieces = {leaf.name: len(leaf.pieces) for leaf in read_manifest(target / NEWEST).leaves}
        assert pieces["params['w']"] == 2 * count  # a process' two shards do not adjoin
        checkpoints = Checkpointer(target, read_only=True)
        assert checkpoints.verify() == [2]
        assert contents(checkpoints.restore(TX.create(SHAPES, mutable=KEYS)).state) == contents(state)


@pytest.mark.parametrize("hosts", [1, 2])
def test_hosts_share_the_writing_of_what_all_of_them_have(hosts, monkeypatch):
    given = {}
    monkeypatch.setattr(type_handlers.ArrayHandler, "__init__", lambda self, **options: given.update(options))
    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    ArrayHandler()
    assert given["use_replica_parallel"] == (hosts > 1)
