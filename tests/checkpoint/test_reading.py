"""Restoring reads each part of a file once, and host memory holds few parts at a time."""

import itertools
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from conftest import mesh_of

from zerojax import Offload, Precision, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, arrays, saving
from zerojax.checkpoint.export import gather_to_host
from zerojax.layout.leaf import is_chunked
from zerojax.offload import close


class Alive:
    """The bytes of arrays that are alive, and the most that have been."""

    def __init__(self):
        self.now = self.most = 0
        self._lock = threading.Lock()

    def add(self, size):
        with self._lock:
            self.now += size
            self.most = max(self.most, self.now)

    def watch(self, x):
        """Return a copy that no device can share, because it is not aligned."""
        copy = np.empty(x.nbytes + 4, np.uint8)[4:].view(x.dtype).reshape(x.shape)
        copy[...] = x
        self.add(x.nbytes)
        weakref.finalize(copy, self.add, -x.nbytes)
        return copy


@pytest.mark.parametrize("block", [8, 64, 1 << 20])
def test_a_box_is_what_tensorstore_reads(block, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "BLOCK_BYTES", block)
    values = np.arange(7 * 10 * 6, dtype=np.float32).reshape(7, 10, 6)
    store = {"driver": "file", "path": f"{tmp_path}/"}
    metadata = {"shape": values.shape, "chunks": [3, 5, 6], "compressor": None}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "dtype": "float32"}
    tensorstore.open(spec, create=True).result().write(values).result()
    spans = [list(itertools.combinations(range(n + 1), 2)) for n in values.shape]
    boxes = list(itertools.product(*spans))
    for at in np.random.default_rng(0).choice(len(boxes), 60, replace=False):
        box = tuple(slice(*span) for span in boxes[at])
        out = np.empty([one.stop - one.start for one in box], np.float32)
        arrays.read_files(tmp_path, box, out)
        assert np.array_equal(out, values[box])
    file = tmp_path / "0.0.0"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(EOFError):
        arrays.read_files(tmp_path, (slice(0, 3), slice(0, 5), slice(0, 6)), np.empty((3, 5, 6), np.float32))


SHAPES = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(8)}
TOTAL = 3 * 8 * 64 * 64 * 4  # bytes of the parameters and of Adam's moments


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patched, Checkpointer(root) as checkpoints:
        patched.setattr(saving, "SMALL_BYTES", 0)
        draw = {name: jax.random.normal(jax.random.key(i), (64, 64)) for i, name in enumerate(SHAPES)}
        checkpoints.save(
            zero_shard(optax.adam(1e-2), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=64)).create(draw)
        )
    return root


@pytest.mark.parametrize("way", ["device", "host", "bf16"])
def test_host_memory_holds_a_share_of_what_is_restored(way, folder, monkeypatch):
    """And no byte is read twice, though offloaded leaves are read in chunks that are smaller than a file."""
    offload = Offload(optimizer="host", chunk_bytes=256, update="device") if way == "host" else None
    precision = Precision.bf16() if way == "bf16" else None
    tx = zero_shard(
        optax.adam(1e-2),
        stage=2,
        mesh=mesh_of(4),
        offload=offload,
        precision=precision,
        tuning=Tuning(persist_below=64),
    )
    alive, read = Alive(), arrays.read_box
    seen = []

    def watched(*args):
        part = alive.watch(read(*args))
        seen.append(part.nbytes)
        return part

    monkeypatch.setattr(arrays, "read_box", watched)
    monkeypatch.setattr(arrays, "LEAST_AHEAD", 1)
    state = Checkpointer(folder, read_only=True).restore(tx.create(SHAPES)).state
    jax.block_until_ready(jax.tree.leaves(state))
    assert sum(seen) == pytest.approx(TOTAL, rel=0.01)
    assert alive.most <= max(TOTAL // arrays.SHARES_AHEAD, 64 * 64 * 4)
    assert any(is_chunked(x) for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked)) == (way == "host")
    w = np.asarray(
        tx.unshard(tx.as_params(state.opt_state[0].mu, state.params) if way == "host" else state.params)["w3"]
    )
    expected = np.asarray(jax.random.normal(jax.random.key(3), (64, 64)))
    assert np.array_equal(w, np.zeros((64, 64)) if way == "host" else expected.astype(w.dtype))


def test_leaves_on_disk_are_copied_in_files_that_tensorstore_reads(tmp_path):
    """In chunks along both dims, with padding, and of layers one by one."""
    offload = Offload("disk", params="disk", path=tmp_path / "state", chunk_bytes=48)
    tx = zero_shard(optax.trace(0.9), stage=3, mesh=mesh_of(4), tuning=Tuning(persist_below=1), offload=offload)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    given = {"long": draw(0, 27, 5), "wide": draw(1, 4, 50), "stack": draw(2, 3, 8, 5)}
    state = tx.create(given)
    for name, node in state.params.items():
        for copy in arrays.begin_copy(node, tmp_path / name):
            copy.result()
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path / name}/"}}
        found = tensorstore.open(spec).result().read().result()
        np.testing.assert_array_equal(found[tuple(map(slice, given[name].shape))], given[name])
        for index in ((), (2,), (2, 1)):
            np.testing.assert_array_equal(gather_to_host(node, node.leaf, index), given[name][index])
    assert {len(node.chunking.extents): node.chunking.dim for node in state.params.values()} == {4: 0, 5: 1, 3: 0}
    close(state)
