"""The whole life of parameters on disk without the model in memory: import, checkpoint, restore, export; and faults."""

import collections
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import flip
from conftest import mesh_of, mounted, quick_or_slow
from disk_models import LOSSES, batch_of, model_params, on_disk, sharded
from models import awkward_batches, awkward_loss, awkward_params
from safetensors.numpy import load_file

import zerojax
from zerojax import Offload, Precision, Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, arrays, export, import_params, restoring, saving
from zerojax.layout.leaf import is_chunked
from zerojax.offload.state_files import StateFiles
from zerojax.staged.model_files import ModelFiles, files_of

LOSS = LOSSES["loop"]


def begun(path, **options):
    """A transformation, its step, and a state after one step."""
    tx = on_disk(path, devices=2, **options)
    step, state = tx.train_step(LOSS), tx.create(model_params())
    return tx, step, step(state, batch_of(0))[0]


def on_host(tx, state):
    """The weights from which the next update starts, and the optimizer's state, without master weights."""
    weights, opt_state = tx.weights(state.params, state.opt_state), tx.unshard(state.opt_state, state.params)
    return jax.device_get((tx.unshard(weights), getattr(opt_state, "inner", opt_state)))


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.fixture
def unpacked(monkeypatch):
    """Checkpoints whose leaves on disk are copied, as those of large models are, and not packed."""
    monkeypatch.setattr(saving, "SMALL_BYTES", 300)


WAYS = [(None, None), ("150 kB", None), (None, "bf16")]


@pytest.mark.parametrize(("host_bytes", "precision"), quick_or_slow(WAYS, WAYS[1:2]))
def test_a_checkpoint_is_copied_without_the_devices_while_training_goes_on(
    tmp_path, unpacked, monkeypatch, host_bytes, precision
):
    """And it restores into any layout, from disk to memory and back, where training goes on as it would have."""
    options = {"precision": Precision.bf16()} if precision else {}
    tx, step, state = begun(tmp_path / "run", host_bytes=host_bytes, **options)
    wanted = on_host(tx, state)
    on_host_memory = Offload(optimizer="host", params="host", update="device")
    ways = {
        "disk": on_disk(tmp_path / "again", devices=2, **options),
        "three": on_disk(tmp_path / "three", devices=3, **options),
        "host": sharded(offload=on_host_memory, **options),
        "stage 1": stage_1(**options),
        "stage 3": sharded(**options),
    }
    with Checkpointer(tmp_path / "saved") as saved:
        with monkeypatch.context() as patched:
            if not precision:  # master weights are compared with the parameters on the devices
                patched.setattr(StateFiles, "receive", None)  # no chunk is loaded onto a device
            saved.save(state, step=1)
        state, _ = step(state, batch_of(1))
        after = on_host(tx, state)
        state, _ = step(state, batch_of(2))
        saved.wait()
        for name, other in ways.items():
            like = other.create(jax.eval_shape(model_params))
            with monkeypatch.context() as patched:
                patched.setattr(restoring, "replaced", None)  # no leaf on disk is read onto the devices
                restored = saved.restore(like).state
            assert_same(on_host(other, restored), wanted)
            if name == "disk":
                restored, _ = other.train_step(LOSS)(restored, batch_of(1))
                assert_same(on_host(other, restored), after)
        state = saved.restore(state).state
        assert_same(on_host(tx, state), wanted)
        saved.save(restored, step=2)  # from memory
        saved.wait()
        assert_same(on_host(tx, saved.restore(state).state), wanted)


def stage_1(**options):
    return zero_shard(optax.adamw(1e-2), stage=1, mesh=mesh_of(2), tuning=Tuning(persist_below=64), **options)


@pytest.mark.slow
def test_a_step_waits_for_the_copy_of_a_chunk_that_it_overwrites(tmp_path, unpacked, monkeypatch):
    """The copies are slow, so the step begins to write before they end."""
    write, order = arrays.write_chunk, []

    def slowly(*args):
        time.sleep(0.05)
        write(*args)
        order.append("copied")

    monkeypatch.setattr(arrays, "write_chunk", slowly)
    tx, step, state = begun(tmp_path / "run")
    wanted = on_host(tx, state)
    with Checkpointer(tmp_path / "saved") as saved:
        saved.save(state, step=1)
        order.append("saved")
        state, _ = step(state, batch_of(1))
        saved.wait()
        assert order[-1] == "copied"
        assert_same(on_host(tx, saved.restore(state).state), wanted)


def held_at_writes(monkeypatch):
    """The bytes on the devices, beyond those of before, and the bytes written, at each write of a chunk."""
    before, held = {id(x) for x in jax.live_arrays()}, []
    write = ModelFiles.write_shards

    def spied(self, k, n, shards):
        alive = [x for x in jax.live_arrays() if id(x) not in before]
        held.append((sum(x.nbytes for x in alive), sum(x.nbytes for x in shards)))
        write(self, k, n, shards)

    monkeypatch.setattr(ModelFiles, "write_shards", spied)
    return held


DEEP, WIDE = 16, 24


def deep_params(key=None):
    keys = jax.random.split(jax.random.key(7) if key is None else key, 3)
    stack = lambda k: jax.random.normal(k, (DEEP, WIDE, WIDE))
    return {"a": stack(keys[0]), "b": stack(keys[1]), "head": jax.random.normal(keys[2], (WIDE, 32))}


@pytest.mark.slow
def test_an_import_holds_one_chunk(tmp_path, monkeypatch):
    """With tensors of single layers, which are stacked. The devices hold nothing."""
    given = jax.device_get(deep_params())
    mapping = {f"layers.{{i}}.{name}": (f"{name}", "out in -> in out") for name in "ab"} | {"head": "head"}
    export(given, tmp_path / "exported", mapping=mapping)
    tx = on_disk(tmp_path / "run", devices=2, precision=Precision.bf16())
    like = tx.create(jax.eval_shape(deep_params))
    held = held_at_writes(monkeypatch)
    params = import_params(tmp_path / "exported", like, mapping=mapping)
    assert len(held) >= 2 * DEEP
    assert max(on_devices for on_devices, _ in held) < 1024  # versions
    assert max(written for _, written in held) <= WIDE * WIDE * 4
    assert all(map(is_chunked, jax.tree.leaves(params, is_leaf=is_chunked)))
    assert_same(jax.device_get(tx.unshard(params)), given)
    state = tx.create(params)
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), given)
    assert_same(jax.device_get(tx.unshard(state.params)), jax.device_get(narrow))
    monkeypatch.undo()


def test_an_import_into_a_tree_takes_its_files(tmp_path):
    export(model_params(), tmp_path / "exported")
    tx = on_disk(tmp_path / "run", devices=2)
    zeros = jax.tree.map(np.zeros_like, jax.device_get(model_params()))
    for make in (lambda: tx.shard(jax.eval_shape(model_params)), lambda: tx.shard(zeros)):
        params = import_params(tmp_path / "exported", make())
        assert_same(jax.device_get(tx.unshard(params)), jax.device_get(model_params()))
        zerojax.offload.close(params)


def test_an_initialisation_holds_one_leaf(tmp_path, monkeypatch):
    tx = on_disk(tmp_path / "run", devices=2)
    held, key = held_at_writes(monkeypatch), jax.random.key(7)
    params = tx.init_params(deep_params, key)
    leaf, layer = DEEP * WIDE * WIDE * 4, WIDE * WIDE * 4
    # Up to five chunks wait to be written. Each counts twice, because the shards of an array are arrays, too.
    assert max(on_devices for on_devices, _ in held) <= leaf + 10 * layer + 1024
    monkeypatch.undo()
    assert_same(jax.device_get(tx.unshard(params)), jax.device_get(deep_params()))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [False, True])
def test_an_export_loads_one_layer_at_a_time(tmp_path, monkeypatch, mapped):
    tx = on_disk(tmp_path / "run", devices=2)
    state, loaded, receive = tx.create(deep_params()), collections.Counter(), StateFiles.receive

    def counted(self, k, n, *args):
        loaded[k, n] += 1
        x = receive(self, k, n, *args)
        assert x.nbytes <= WIDE * WIDE * 4
        return x

    monkeypatch.setattr(StateFiles, "receive", counted)
    mapping = {"a.{i}": "a", "b.{i}": "b", "head": "head"} if mapped else None
    wanted = jax.device_get(deep_params())
    for name, tree in {"state": state, "tree": state.params}.items():
        loaded.clear()
        (file,) = export(tree, tmp_path / name, mapping=mapping)
        found = load_file(file)
        assert set(loaded.values()) == {1}
        for key in "ab":
            stack = np.stack([found[f"{key}.{i}"] for i in range(DEEP)]) if mapped else found[key]
            np.testing.assert_array_equal(stack, wanted[key])


@pytest.mark.slow
def test_states_of_shapes_and_traced_trees_are_named(tmp_path):
    tx, _, state = begun(tmp_path / "run")
    shapes = tx.create(jax.eval_shape(model_params))
    logical = zerojax.logical(shapes).params
    assert jax.tree.map(lambda x: x.shape, logical) == jax.tree.map(jnp.shape, model_params())
    for use in (lambda: tx.unshard(shapes.params), lambda: export(shapes, tmp_path / "exported")):
        with pytest.raises(ValueError, match="is a shape and has no values"):
            use()
    with pytest.raises(TypeError, match="a compiled program cannot read files"):
        jax.jit(zerojax.logical)(state.params)
    assert_same(jax.device_get(zerojax.logical(state).params), jax.device_get(tx.unshard(state.params)))


def test_a_model_without_large_parameters_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no parameter to keep on disk.*Lower Tuning\(persist_below=\)"):
        on_disk(tmp_path / "run").create({"w": jnp.ones((3, 3))})


@pytest.mark.slow
def test_a_flipped_byte_gets_into_no_checkpoint(tmp_path, unpacked):
    tx, _, state = begun(tmp_path / "run")
    wanted, files = on_host(tx, state), files_of(state.params)
    with Checkpointer(tmp_path / "saved") as saved:
        saved.save(state, step=1)
        saved.wait()
        files.flush()
        damaged = sorted(files.path.glob("chunk_*"))[2]
        flip(damaged, 5, 1)
        saved.save(state, step=2)
        with pytest.raises(CheckpointError, match=rf"{damaged.name} is damaged"):
            saved.wait()
        assert saved.steps() == [1]
        assert_same(on_host(tx, saved.restore(state).state), wanted)


@pytest.mark.slow
def test_files_and_checkpoints_may_be_on_different_file_systems(tmp_path, unpacked):
    with mounted(tmp_path / "fast", "-t", "tmpfs", "none") as fast:
        tx, step, state = begun(fast / "run")
        wanted = on_host(tx, state)
        with Checkpointer(tmp_path / "saved") as saved:
            saved.save(state, step=1)
            state, _ = step(state, batch_of(1))
            restored = saved.restore(state).state
            assert_same(on_host(tx, restored), wanted)
            zerojax.offload.close(restored)


@pytest.mark.slow
def test_an_awkward_tree_lives_on_disk(tmp_path, unpacked):
    tx, memory, shapes = on_disk(tmp_path / "run", devices=4), sharded(devices=4), jax.eval_shape(awkward_params)
    first, second = awkward_batches(2)
    (state, found), (_, wanted) = (
        kind.train_step(awkward_loss)(kind.create(awkward_params()), first) for kind in (tx, memory)
    )
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)  # other programs round differently
    trained = jax.device_get(tx.unshard(state.params))
    with Checkpointer(tmp_path / "saved") as saved:
        saved.save(state, step=1)
        for other in (on_disk(tmp_path / "again", devices=3), memory, stage_1()):
            restored = saved.restore(other.create(shapes)).state
            assert_same(jax.device_get(other.unshard(restored.params)), trained)
    export(state, tmp_path / "exported")
    again = on_disk(tmp_path / "imported", devices=4)
    params = import_params(tmp_path / "exported", again.create(shapes))
    assert_same(jax.device_get(again.unshard(params)), trained)
    again.train_step(awkward_loss)(again.create(params), second)


def test_a_restored_leaf_is_not_overwritten_by_the_step_before(tmp_path, unpacked):
    """The last arrays of a step are written later, and the only leaf of this model is one of them."""
    tx, params = on_disk(tmp_path / "run", devices=2), {"w": jnp.ones((16, 16))}
    step, state = tx.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2)), tx.create(params)
    with Checkpointer(tmp_path / "saved") as saved:
        saved.save(state, step=0)
        saved.wait()
        state, _ = step(state, jnp.ones((4, 16)))
        assert_same(jax.device_get(tx.unshard(saved.restore(state).state.params)), jax.device_get(params))


@pytest.mark.slow
def test_a_restore_that_fails_leaves_no_mixed_state(tmp_path, unpacked, monkeypatch):
    _, step, state = begun(tmp_path / "run")
    read, calls = arrays.read_box, []

    def failing(*args):
        calls.append(args[1].kind)
        if calls.count("sharded") == 3:
            raise OSError("the disk is gone")
        return read(*args)

    with Checkpointer(tmp_path / "saved") as saved:
        saved.save(state, step=1)
        saved.wait()
        state, _ = step(state, batch_of(1))
        with monkeypatch.context() as patched:
            patched.setattr(arrays, "read_box", failing)
            with pytest.raises(OSError, match="the disk is gone"):
                saved.restore(state)
        with pytest.raises(ValueError, match="half written or closed: a step, a restore or an import"):
            step(state, batch_of(1))
        step(saved.restore(state).state, batch_of(1))


def test_files_that_are_given_up_free_their_host_memory(tmp_path):
    _, _, state = begun(tmp_path / "run", host_bytes="1 MB")
    files = files_of(state.params)
    store = weakref.ref(files._store)
    files.abandon()
    assert store() is None
