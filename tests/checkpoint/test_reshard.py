"""A live state moves into any other layout bit for bit, and devices hold one leaf in both layouts at most."""

import collections
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import several
from conftest import mesh_of
from flat_options import tuned
from jax.sharding import AxisType, NamedSharding
from models import awkward_batches, awkward_loss, awkward_params, floats_only
from test_round_trips import assert_padding_is_zero, assert_same, logical_leaves, trained, transformation

from zerojax import Offload, Precision, zero_shard
from zerojax.checkpoint import live
from zerojax.checkpoint.state_leaves import convert
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.offload import close
from zerojax.offload.folder import DiskError
from zerojax.offload.host import KINDS


def hybrid(**options):
    return {"stage": 3, "mesh": mesh_of(2, 4), "axis": ("host", "gpu"), **options}


WAYS = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "hsdp": hybrid(shard_axis="gpu"),
    "params_axis": hybrid(params_axis="gpu"),
    "host": {"stage": 3, "offload": Offload(optimizer="host", chunk_bytes=200)},
    "4 devices": {"stage": 3, "count": 4},
}
CYCLE = [*WAYS, next(iter(WAYS))]


@pytest.fixture(scope="module")
def runs():
    """By name of a layout: its transformation and step, and a state after two steps, which is kept on the host."""
    made = {}

    def run(name):
        if name not in made:
            tx = transformation(**WAYS[name])
            state, step = trained(tx)
            made[name] = tx, step, state
        return made[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), list(itertools.pairwise(CYCLE)))
def test_every_layout_moves_into_every_other_and_the_run_goes_on(runs, before, after):
    tx, step_before, state = runs(before)
    expected = logical_leaves(state)
    other, step, like = runs(after)
    moved = tx.reshard(state, to=other, donate=False)
    assert_same(moved, expected)
    assert_same(state, expected)
    assert_padding_is_zero(moved)
    assert jax.tree.map(lambda x: x.sharding, moved) == jax.tree.map(lambda x: x.sharding, like)
    # The run goes on as it would have done in the layout before.
    batch = awkward_batches(3)[2]
    stayed, expected = step_before(tx.reshard(state, to=tx, donate=False), batch)
    moved, found = step(moved, batch)
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    stayed = logical_leaves(stayed)
    for name, x in logical_leaves(moved).items():
        assert np.allclose(x, stayed[name], rtol=1e-5, atol=1e-6), name


class Held:
    """The most bytes that each device, and each device's host memory, holds at the points of a move."""

    def __init__(self, monkeypatch):
        self.most = collections.Counter()
        for name in ("convert", "place_whole", "replaced", "joined"):
            monkeypatch.setattr(live, name, self.watched(getattr(live, name)))

    def watched(self, fn):
        def call(*args):
            result = jax.block_until_ready(fn(*args))
            self.most |= self.now()  # with the arguments, which the caller may drop
            return result

        return call

    def now(self):
        """Bytes by device and kind of memory. Arrays that share a buffer count once."""
        buffers = {}
        for x in jax.live_arrays():
            kind = "host" if x.sharding.memory_kind in KINDS else "device"
            for shard in x.addressable_shards if not x.is_deleted() else ():
                buffers[shard.device, kind, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        held = collections.Counter()
        for (device, kind, _), size in buffers.items():
            held[device, kind] += size
        return held


def bytes_of(state):
    """The bytes of each leaf's shards, by device and kind of memory, in the order in which they move."""
    held = collections.Counter()
    for x in jax.tree.leaves(state):
        kind = "host" if x.sharding.memory_kind in KINDS else "device"
        for device in x.sharding.device_set:
            held[device, kind] += x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
    return held


LARGE = dict.fromkeys("abcdefgh", (128, 64)) | {"bias": (64,)}
CHUNK = 4096  # bytes


@pytest.mark.parametrize("walk", [["stage 3", "4 devices"], pytest.param(CYCLE, marks=pytest.mark.slow)])
def test_devices_and_hosts_hold_the_larger_state_and_one_leaf(walk, monkeypatch):
    txs = {name: zero_shard(optax.adam(1e-2), **tuned(**made(WAYS[name]))) for name in set(walk)}
    params = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(LARGE.items())}
    state = txs[walk[0]].create(params)
    expected = logical_leaves(state)
    del params
    for before, after in itertools.pairwise(walk):
        start, held = bytes_of(state), Held(monkeypatch)
        others = held.now() - start
        state = txs[before].reshard(state, to=txs[after])
        monkeypatch.undo()
        assert_same(state, expected)
        end = bytes_of(state)
        leaf = 128 * 64 * 4
        for where, most in held.most.items():
            _, kind = where
            shards = sum(leaf if name == "stage 1" else leaf // 4 for name in (before, after))  # of one leaf
            room = shards if kind == "device" else 0
            assert most - others[where] <= max(start[where], end[where]) + room, (before, after, where)
        assert sum(held.most.values()) > sum(end.values())  # something was measured


def made(options):
    count = options.get("count", 8)
    offload = Offload(optimizer="host", chunk_bytes=CHUNK, update="device") if "offload" in options else None
    rest = {name: value for name, value in options.items() if name != "count"}
    return {"mesh": mesh_of(count), "persist_below": 65, **rest, "offload": offload}


DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int4", "uint16", "bool", "complex64")


def every_bit(dtype):
    """50 values of a type, among them both zeros and NaNs."""
    bits = np.random.default_rng(0).integers(0, 256, size=50 * jnp.dtype(dtype).itemsize, dtype=np.uint8)
    host = (bits[:50] % 2).view(np.bool_) if dtype == "bool" else bits.view(jnp.dtype(dtype))
    host = (bits[:50] % 16).astype(dtype) if "4_" in dtype or dtype == "int4" else host
    host[:2] = -np.zeros(1, host.dtype) if dtype != "bool" else host[:2]
    return host


def test_every_type_has_every_bit_on_other_devices():
    values = {dtype: every_bit(dtype) for dtype in DTYPES}
    tx, other = (zero_shard(optax.sgd(1e-2), stage=3, mesh=mesh_of(count)) for count in (8, 4))
    moved = tx.reshard(tx.create({"w": jnp.ones((8, 8))}, mutable=values), to=other)
    for dtype, host in values.items():
        assert np.asarray(moved.mutable[dtype]).tobytes() == host.tobytes(), dtype


def test_a_conversion_on_the_devices_has_every_bit():
    """Zeros keep their sign, and a NaN its bits: numbers are not added."""
    host, of = every_bit("float32"), mesh_of(2, 4)
    leaf = lambda *given: Leaf("", (50,), jnp.dtype("float32"), *given)
    both, axes = leaf(("host", "gpu"), 8, "sharded", 0), ("gpu", "host")
    others = [leaf(("gpu",), 4, "sharded", 0), leaf(("gpu",), 4, "flat"), leaf(axes, 8, "flat"), leaf((), 1)]
    stored = jax.device_put(np.pad(host, (0, 6)), NamedSharding(of, both.spec))
    for there in others:
        moved = convert(stored, both, there, NamedSharding(of, there.spec))
        back = convert(moved, there, both, stored.sharding)
        for x in (moved, back):
            assert np.asarray(x)[:50].tobytes() == host.tobytes(), there
            assert not np.asarray(x)[50:].astype(bool).any()


@pytest.mark.slow
def test_precision_changes_as_a_checkpoint_changes_it():
    wide, narrow = transformation(3), transformation(2, 4, Precision.bf16())
    state, _ = trained(wide)
    expected = logical_leaves(state)
    other = wide.reshard(state, to=narrow)
    assert_same(other, expected)  # of the master weights
    assert other.params["tied"].dtype == jnp.bfloat16
    assert np.array_equal(narrow.unshard(other.params)["tied"], expected["params['tied']"].astype(jnp.bfloat16))
    assert_same(narrow.reshard(other, to=wide), expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(other.params))


def test_keys_mutable_state_and_explicit_axes():
    tx = transformation(3, mesh=mesh_of(2, 4, kind=AxisType.Explicit), axis=("host", "gpu"))
    mutable = {"key": jax.random.key(3), "mean": jnp.arange(4.0), "none": jnp.zeros((0, 2))}
    state = tx.create(awkward_params(), mutable=mutable)
    expected = logical_leaves(state)
    there = tx.reshard(state, to=transformation(1, 3))
    back = transformation(1, 3).reshard(there, to=tx)
    assert_same(back, expected)
    assert back.step.sharding.mesh == tx.config.user_mesh


@pytest.mark.slow
@pytest.mark.parametrize("params", [None, "disk"])
def test_a_state_moves_to_disk_and_back(params, tmp_path):
    tx = transformation(3, precision=Precision.bf16())
    state, _ = trained(tx)
    expected = logical_leaves(state)
    offload = Offload(optimizer="disk", params=params, path=tmp_path, chunk_bytes=200)
    disk = transformation(3, 4, Precision.bf16(), offload=offload)
    there = tx.reshard(state, to=disk)
    assert any(is_chunked(x) for x in jax.tree.leaves(there.opt_state, is_leaf=is_chunked))
    assert_same(disk.reshard(there, to=tx), expected)


def test_a_folder_in_use_is_refused_before_the_state_is_touched(tmp_path):
    made = lambda **options: zero_shard(optax.adam(1e-2), precision=Precision.bf16(), **tuned(**options))
    tx, disk = made(stage=2), made(stage=3, offload=Offload(optimizer="disk", path=tmp_path), persist_below=1)
    state, other = tx.create({"w": jnp.ones((8, 8))}), disk.create({"w": jnp.ones((8, 8))})
    with pytest.raises(DiskError, match="in use"):
        tx.reshard(state, to=disk)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    close(other)


def test_another_optimizer_is_named_and_the_state_stays():
    tx = transformation(3)
    state = tx.create(awkward_params())
    for other, error in (
        (optax.sgd(1e-2, momentum=0.9), r"^The state is of another model.* than the wanted state:\n  opt_st"),
        (optax.lamb(1e-2), r"The state is of another transformation than .* is there, .* is wanted. Give as to="),
    ):
        with pytest.raises(ValueError, match=error):
            tx.reshard(state, to=transformation(3, tx=other))
    with pytest.warns(UserWarning, match=r"computes something else .*: before mul -0.01; now mul -0.003") as found:
        moved = tx.reshard(state, to=transformation(1, tx=optax.adamw(3e-3)))
    assert found[0].filename == __file__
    assert int(moved.step) == 0


def test_what_cannot_be_moved_is_named():
    tx, four = transformation(3), transformation(3, 4)
    state = tx.create(awkward_params())
    with pytest.raises(ValueError, match=r"state.step is on a mesh of 8 devices"):
        four.reshard(state, to=tx)
    with pytest.raises(TypeError, match="to= takes the transformation that zero_shard returned, not Mesh"):
        tx.reshard(state, to=mesh_of(4))
    with pytest.raises(TypeError, match="reshard takes a ZeroState"):
        tx.reshard(state.params, to=four)
    tx.reshard(state, to=four)
    with pytest.raises(ValueError, match="was used up"):
        tx.reshard(state, to=four)
    with pytest.raises(ValueError, match="used up this state"):
        tx.train_step(awkward_loss)(state, awkward_batches(1)[0])


def tx_of(devices=None, **options):
    mesh = jax.make_mesh((2, len(devices or jax.devices()) // 2), ("host", "gpu"), devices=devices)
    inner = floats_only(optax.adam(1e-2))
    return zero_shard(inner, mesh=mesh, axis=("host", "gpu"), **tuned(persist_below=64, **options))


def on_host(tx, state):
    trees = tx.unshard(state.params), tx.unshard(state.opt_state, state.params)
    return [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(trees)]


def move_around(folder):
    """A state goes around layouts, with half of each process's devices at the end; then what one process cannot do."""
    half = [d for d in jax.devices() if d.id % 4 < 2]
    ways = [tx_of(stage=3), tx_of(stage=3, params_axis="gpu"), tx_of(half, stage=3), tx_of(stage=3)]
    state = ways[0].create(awkward_params())
    state, _ = ways[0].train_step(awkward_loss)(state, awkward_batches(1)[0])
    expected = on_host(ways[0], state)
    for old, new in itertools.pairwise(ways):
        state = old.reshard(state, to=new)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(on_host(new, state), expected, strict=True))
    one = zero_shard(optax.adam(1e-2), stage=3, mesh=jax.make_mesh((4,), ("data",), devices=jax.devices()[:4]))
    try:
        ways[-1].reshard(state, to=one)
    except ValueError as error:
        print(error)

    # Process 1 has no folder.
    folder = Path(folder)
    (folder / "process_1").touch()
    disk = tx_of(stage=3, offload=Offload(optimizer="disk", path=folder))
    try:
        ways[-1].reshard(state, to=disk)
    except DiskError as error:
        print(error)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    print("done")


@pytest.mark.slow
def test_two_processes_move_a_state_together(tmp_path):
    for out in several.run(move_around, tmp_path, devices=4):
        assert "of the processes [0, 1], and the new mesh has devices of the processes [0]" in out
        assert "process 1: " in out
        assert f"{tmp_path / 'process_1'}" in out
        assert out.endswith("done\n")
