"""Small leaves are packed: few files, each leaf with a digest, and nothing that a checkpoint of folders has is lost."""

import json

import jax
import numpy as np
import optax
import pytest
import several
from checkpoints import KEYS, NEWEST, SHAPES, assert_same, files_of, filled, logical_leaves, rewrite_manifest, saved
from conftest import mesh_of
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, arrays, export_checkpoint, saving
from zerojax.checkpoint.arrays import ArrayHandler, type_handlers
from zerojax.checkpoint.manifest import SavedLeaf, read_manifest

TX = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=64))
MUTABLE = {"keys": jax.random.split(jax.random.key(4), 3)}


def test_many_small_leaves_make_few_files(tmp_path):
    """AdamW has three leaves for each; a large leaf has its folder beside them."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((16, 8 + i % 9), "float32") for i in range(60)}
    shapes["large"] = jax.ShapeDtypeStruct((256, 256), "float32")
    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=64))
    state = filled(tx, shapes)
    checkpoints, files = saved(tmp_path, state, step=2), files_of(tmp_path / NEWEST)
    assert len(files) <= 60
    assert "packed.0.bin" in files
    assert "arrays/params.large/7.0" in files
    assert_same(checkpoints.restore(tx.create(shapes)).state, state)


KINDS = {"bits": (5, "int4"), "flags": (9, "bool"), "eighth": (33, "float8_e4m3fn"), "half": (70, "float16")}


@pytest.mark.parametrize("packed", [True, False])
def test_every_type_comes_back_on_other_devices_and_stages(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(saving, "SMALL_BYTES", 1 << 16 if packed else 0)
    shapes = SHAPES | {name: jax.ShapeDtypeStruct((size,), dtype) for name, (size, dtype) in KINDS.items()}

    def make(stage, count):
        trained = {"tuning": Tuning(persist_below=64), "trainable": lambda path, _: path in SHAPES}
        return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(count), **trained)

    state = filled(make(3, 4), shapes).replace(mutable=MUTABLE)
    checkpoints = saved(tmp_path, state, step=2)
    assert ("packed.0.bin" in files_of(tmp_path / NEWEST)) == packed
    for stage, count in ((3, 4), (0, 1), (1, 3), (2, 8)):
        like = make(stage, count).create(shapes, mutable=KEYS)
        assert_same(checkpoints.restore(like).state, state)


def test_a_checkpoint_of_format_1_is_restored(tmp_path, monkeypatch):
    """It has a folder per leaf, and its manifest no pieces."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 0)
    state = filled(TX, SHAPES)
    checkpoints = saved(tmp_path, state, step=2)

    def older(body):
        body["version"] = 1
        assert all(leaf.pop("pieces") == [] for leaf in body["leaves"])

    rewrite_manifest(tmp_path / NEWEST, older)
    assert checkpoints.verify() == [2]
    assert_same(checkpoints.restore(TX.create(SHAPES)).state, state)


def test_a_packed_leaf_is_read_with_numpy_and_exported(tmp_path):
    """As docs/checkpoint.md says."""
    folder, state = tmp_path / NEWEST, filled(TX, SHAPES, 2)
    saved(tmp_path, state, step=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    (leaf,) = [leaf for leaf in manifest["leaves"] if leaf["name"] == "params['w']"]
    (piece,) = leaf["pieces"]
    values = np.fromfile(folder / piece["file"], leaf["dtype"], np.prod(piece["shape"]), offset=piece["offset"])
    expected = {name: x for name, x in logical_leaves(state).items() if name.startswith("params")}
    assert values.tobytes() == expected["params['w']"].tobytes()
    (file,) = export_checkpoint(tmp_path, tmp_path / "out")
    assert_same({f"params['{name}']": x for name, x in load_file(file).items()}, expected)


def test_keys_of_another_implementation_are_named(tmp_path):
    state = TX.create(SHAPES, mutable=MUTABLE)
    checkpoints = saved(tmp_path, filled(TX, SHAPES).replace(mutable=MUTABLE), step=2)
    other = lambda body: [leaf.update(key=leaf["key"] and "rbg") for leaf in body["leaves"]]
    rewrite_manifest(tmp_path / NEWEST, other)
    with pytest.raises(CheckpointError, match=r"mutable\['keys'\] is said to be PRNG keys of rbg, and is not"):
        checkpoints.restore(state)


def test_blocks_of_several_processes_are_one_leaf(tmp_path):
    """Also where those of a process do not follow one another."""
    whole, pieces = np.arange(48, dtype=np.int16).reshape(8, 6), []
    for process, rows in enumerate(([0, 2], [3], [1])):
        boxes = [("x", (2 * i, 0), whole[2 * i : 2 * i + 2]) for i in rows]
        pieces += [piece for _, piece in saving.write_packed(tmp_path / f"packed.{process}.bin", boxes)]
    assert len(files_of(tmp_path)) == 3
    leaf = SavedLeaf("x", ("x",), whole.shape, "int16", "replicated", "", pieces=tuple(pieces))
    assert np.array_equal(arrays.read_packed(tmp_path, leaf), whole)


def save_again(source, target):
    devices = sorted(jax.devices(), key=lambda one: (one.id % 2, one.id))  # a process has shards that do not adjoin
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    tx = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh, tuning=Tuning(persist_below=64))
    state = Checkpointer(source, read_only=True).restore(tx.create(SHAPES, mutable=KEYS)).state
    saved(target, state, step=2).verify()
    print("done", flush=True)


@pytest.mark.slow
def test_any_number_of_processes_restores_what_any_other_saved(tmp_path):
    """One, then three, then two, then one."""
    state = filled(TX, SHAPES).replace(mutable=MUTABLE)
    saved(tmp_path / "1", state, step=2)
    for source, count in (("1", 3), ("3", 2)):
        target = tmp_path / str(count)
        several.run(save_again, tmp_path / source, target, processes=count)
        files = files_of(target / NEWEST)
        assert len([name for name in files if name.startswith("packed")]) == count
        pieces = {leaf.name: len(leaf.pieces) for leaf in read_manifest(target / NEWEST).leaves}
        assert pieces["params['w']"] == 2 * count  # a process' two shards do not adjoin
        checkpoints = Checkpointer(target, read_only=True)
        assert checkpoints.verify() == [2]
        assert_same(checkpoints.restore(TX.create(SHAPES, mutable=KEYS)).state, state)


@pytest.mark.parametrize("hosts", [1, 2])
def test_hosts_share_the_writing_of_what_all_of_them_have(hosts, monkeypatch):
    given = {}
    monkeypatch.setattr(type_handlers.ArrayHandler, "__init__", lambda self, **options: given.update(options))
    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    ArrayHandler()
    assert given["use_replica_parallel"] == (hosts > 1)
