"""All leaves of a process are in one file, and any layout is read from it."""

import json
from collections import namedtuple

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
from zerojax.checkpoint import Checkpointer, CheckpointError, arrays, export_checkpoint
from zerojax.checkpoint.manifest import read_manifest

TX = zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=64))
MUTABLE = {"keys": jax.random.split(jax.random.key(4), 3)}


KINDS = {"bits": "int4", "codes": "uint4", "flags": "bool", "half": "float16", "eighth": "float8_e4m3fn"}


@pytest.mark.parametrize("whole", [True, False])
def test_every_type_comes_back_on_other_devices_and_stages(tmp_path, monkeypatch, whole):
    monkeypatch.setattr(arrays, "SMALL_BYTES", 1 << 16 if whole else 0)
    shapes = SHAPES | {name: jax.ShapeDtypeStruct((33,), dtype) for name, dtype in KINDS.items()}

    def make(stage, count):
        trained = {"tuning": Tuning(persist_below=64), "trainable": lambda path, _: path in SHAPES}
        return zero_shard(optax.adam(1e-2), stage=stage, mesh=mesh_of(count), **trained)

    state = filled(make(3, 4), shapes).replace(mutable=MUTABLE)
    checkpoints = saved(tmp_path, state, step=2)
    assert files_of(tmp_path / NEWEST) == ["data.0.json", "leaves.0.bin", "manifest.json", "manifest.sha256"]
    for stage, count in ((3, 4), (0, 1), (1, 3), (2, 8)):
        like = make(stage, count).create(shapes, mutable=KEYS)
        assert_same(checkpoints.restore(like).state, state)


@pytest.mark.parametrize("version", [2, 4])
def test_a_checkpoint_of_another_format_is_refused(tmp_path, version):
    checkpoints = saved(tmp_path, filled(TX, SHAPES), step=2)
    rewrite_manifest(tmp_path / NEWEST, lambda body: body.update(version=version))
    with pytest.raises(ValueError, match=rf"in format {version}, and this version reads only format 3"):
        checkpoints.verify()


def test_a_leaf_is_read_with_numpy_and_exported(tmp_path):
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


# --- several processes -------------------------------------------------------------------------------------------


def save_again(source, target):
    arrays.SHARED_BYTES = 16  # the processes share the writing of leaves that each of them has
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
        assert len([name for name in files if name.startswith("leaves")]) == count
        pieces = {leaf.name: len(leaf.pieces) for leaf in read_manifest(target / NEWEST).leaves}
        assert pieces["params['w']"] == 2 * count  # a process has two shards
        assert pieces["params['b']"] == count  # each process has it, and writes a part
        checkpoints = Checkpointer(target, read_only=True)
        assert checkpoints.verify() == [2]
        assert_same(checkpoints.restore(TX.create(SHAPES, mutable=KEYS)).state, state)


Device = namedtuple("Device", "process_index")


class OfHosts:
    """A sharding of arrays that each of some processes has in full."""

    def __init__(self, count):
        self.count = count

    def devices_indices_map(self, shape):
        return {Device(i): tuple(slice(None) for _ in shape) for i in range(self.count)}

    def addressable_devices_indices_map(self, shape):
        return dict([next(iter(self.devices_indices_map(shape).items()))])


def test_hosts_share_the_writing_of_what_all_of_them_have(monkeypatch):
    sharding = OfHosts(3)
    given = []
    for host in range(3):
        monkeypatch.setattr(jax, "process_index", lambda host=host: host)
        arrays.shares_of.cache_clear()
        given.append([arrays.shares_of(shape, sharding, 4)[0] for shape in ((8, 1 << 20), (8, 8), ())])
    assert [rows for rows, _, _ in given] == [slice(0, 2), slice(2, 5), slice(5, 8)]
    assert [rows for _, rows, _ in given] == [slice(0, 8), slice(0, 0), slice(0, 0)]
    assert [rows for _, _, rows in given] == [slice(0, 1), slice(0, 0), slice(0, 0)]
