"""`Offload(device_bytes=)`: chunks stay on the device between steps, and nothing else changes."""

import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

import zerojax
from zerojax import Offload, Tuning, report, zero_shard
from zerojax.layout.leaf import is_chunked
from zerojax.streaming import stores

CHUNK, ROOM = 128, 600  # bytes per device: chunks of one leaf that stay, and of another of which only some stay
BATCHES = list(jax.random.normal(jax.random.key(1), (4, 6, 8)))


def params():
    """A leaf of four chunks per moment, one of one chunk, and one that is too small to be offloaded."""
    first, second = jax.random.split(jax.random.key(0))
    return {"bias": jnp.zeros(2), "v": jax.random.normal(first, (32, 2)), "w": jax.random.normal(second, (8, 32))}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["bias"]) ** 2)


def zero(room=None, **changes):
    kept = {} if room is None else {"device_bytes": room}
    offload = Offload(**{"optimizer": "host", "chunk_bytes": CHUNK, "update": "device", **kept, **changes})
    return zero_shard(optax.adamw(1e-2), stage=3, mesh=mesh_of(2), tuning=Tuning(persist_below=20), offload=offload)


@functools.cache
def made(room=None, **changes):
    tx = zero(room, **changes)
    return tx, tx.train_step(loss_fn)


def chunks(state):
    nodes = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
    return [x for node in nodes if is_chunked(node) for x in node.chunks]


def kinds(state):
    return {x.sharding.memory_kind for x in chunks(state)}


def on_device(state):
    """Bytes per device of the chunks that are on the device."""
    return sum(x.addressable_shards[0].data.nbytes for x in chunks(state) if x.sharding.memory_kind == "device")


def contents(state):
    return jax.device_get((zerojax.logical(state.params), zerojax.logical(state.opt_state)))


def trained(tx, step, count, state=None):
    state = tx.create(params()) if state is None else state
    for i in range(count):
        state, _ = step(state, BATCHES[i % len(BATCHES)])
    return state


@functools.cache
def reference(count, **changes):
    return contents(trained(*made(**changes), count))


@pytest.mark.parametrize("where", [None, pytest.param("host", marks=pytest.mark.slow)])
def test_twenty_steps_equal_bit_for_bit(where):
    tx, step = made(ROOM, params=where)
    state = tx.create(params())
    for i in range(20):
        before = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
        state, _ = step(state, BATCHES[i % len(BATCHES)])
        assert all(x.is_deleted() for x in before if x.ndim)  # donated
        assert kinds(state) == {"device", "pinned_host"}
        assert 0 < on_device(state) <= ROOM
        if i == 10:  # what users do between steps changes nothing
            moments = lambda tree: [x for x in jax.tree.leaves(tree) if x.size > 20]
            kept = moments(tx.unshard(state.opt_state)) + moments(zerojax.logical(state.opt_state))
            report(state)
    chex.assert_trees_all_equal(contents(state), reference(20, params=where))
    assert len(kept) == 8  # two moments of two leaves, twice
    jax.block_until_ready(kept)  # a step donates chunks, but not copies of them


@pytest.mark.slow
def test_room_for_all_state_copies_nothing(monkeypatch):
    tx, step = made(1 << 30)
    state = trained(tx, step, 1)
    assert kinds(state) == {"device"}
    moved = []
    device_put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *to, **more: moved.append((x, to)) or device_put(x, *to, **more))
    state = trained(tx, step, 1, state)
    assert not [to for _, to in moved if "pinned_host" in str(to)]
    chex.assert_trees_all_equal(contents(state), contents(trained(*made(), 1, trained(*made(), 1))))


def test_a_report_counts_chunks_where_they_are():
    state, without = trained(*made(ROOM), 1), trained(*made(), 1)
    found, expected = report(state), report(without)
    kept = on_device(state)
    assert found.host["opt_state"] == expected.host["opt_state"] - kept
    assert found.bytes["opt_state"] == expected.bytes["opt_state"] + kept
    assert found.total == expected.total + kept
    assert "4 chunks, of which 2 on the device" in str(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("room", [None, 100, ROOM])
def test_a_checkpoint_is_restored_into_any_room(room, tmp_path):
    state = trained(*made(ROOM), 3)
    with zerojax.checkpoint.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state)
        state = trained(*made(ROOM), 1, state)  # while the save goes on, which keeps its own copy
        checkpoints.wait()
        tx, step = made(room)
        restored = checkpoints.restore(tx.create(params())).state
    chex.assert_trees_all_equal(contents(restored), reference(3))
    again, _ = step(restored, BATCHES[3])
    chex.assert_trees_all_equal(contents(again), reference(4))
    assert on_device(again) <= (room or 0)
    assert 0 < on_device(state) <= ROOM


@pytest.mark.parametrize(("room", "to"), [(ROOM, None), (None, ROOM)])
def test_a_reshard_to_another_room(room, to):
    state, (tx, step) = trained(*made(room), 3), made(to)
    moved = zero(room).reshard(state, to=tx)
    chex.assert_trees_all_equal(contents(moved), reference(3))
    again, _ = step(moved, BATCHES[3])
    chex.assert_trees_all_equal(contents(again), reference(4))
    assert (on_device(again) > 0) == (to is not None)


@pytest.mark.parametrize("where", ["store_for", "loss"])
def test_an_error_or_interrupt_before_the_update_keeps_the_state(where, monkeypatch):
    """Everything is written when a step returns, so an error of the next step loses nothing."""
    tx, step = made(ROOM)
    state = trained(tx, step, 3)

    def interrupted(*_):
        raise KeyboardInterrupt

    failing = tx.train_step(interrupted) if where == "loss" else step
    with monkeypatch.context() as patch:
        if where == "store_for":
            patch.setattr("zerojax.train.streamed_step.store_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            failing(state, BATCHES[3])
    chex.assert_trees_all_equal(contents(state), reference(3))
    chex.assert_trees_all_equal(contents(step(state, BATCHES[3])[0]), reference(4))


@pytest.mark.quick(1)
@pytest.mark.parametrize("call", ["fetch", "write", "_complete", "nodes"])
def test_an_interrupted_update_is_an_error_by_name(call, monkeypatch):
    """As without `device_bytes`, the state was donated. The states of other runs are not affected."""
    tx, step = made(ROOM)
    state, other = trained(tx, step, 3), trained(tx, step, 3)
    kept, method, count = tx.unshard(state.opt_state), getattr(stores.HostStateStore, call), iter(range(99))

    def interrupted(*args, **options):
        if next(count) == 1:
            raise KeyboardInterrupt
        return method(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stores.HostStateStore, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, BATCHES[3])
    with pytest.raises(ValueError, match="donate"):
        step(state, BATCHES[3])
    jax.device_get(kept)
    chex.assert_trees_all_equal(contents(step(other, BATCHES[3])[0]), reference(4))
