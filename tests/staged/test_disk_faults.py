"""Parameters on disk when something goes wrong: what it is is named, and nothing that was saved is lost."""

import errno
import gc
import pickle
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of
from disk_models import LOSSES, batch_of, model_params, on_disk, sharded

from zerojax import Offload, Tuning, offload, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.layout.leaf import is_chunked
from zerojax.offload import disk
from zerojax.offload.disk import DiskStateError
from zerojax.offload.folder import DiskError

LOSS = LOSSES["loop"]


def begun(path, kept="params"):
    """A state of which everything or only the optimizer's part is on disk, after a step, the step, and chunk files."""
    offload = Offload(optimizer="disk", path=path, chunk_bytes=512, update="device")
    tx = on_disk(path, devices=2) if kept == "params" else sharded(devices=2, offload=offload)
    step, state = tx.train_step(LOSS), tx.create(model_params())
    state, _ = step(state, batch_of(0))
    files = next(filter(is_chunked, jax.tree.leaves(getattr(state, kept), is_leaf=is_chunked))).leaf_files.state_files
    files.flush()
    return tx, step, state, sorted(files.path.glob("chunk_*"))


@pytest.mark.parametrize("kept", ["opt_state", pytest.param("params", marks=pytest.mark.slow)])
def test_a_torn_file_is_named_and_the_checkpoint_mends_it(tmp_path, kept):
    tx, step, state, chunks = begun(tmp_path / "run", kept)
    contents = lambda state: jax.device_get((tx.unshard(state.params), tx.unshard(state.opt_state, state.params)))
    wanted = contents(state)
    with Checkpointer(tmp_path / "saved") as saved:
        saved.save(state, step=1)
        saved.wait()
        chunks[2].write_bytes(chunks[2].read_bytes()[:-512])
        for _ in range(2 if kept == "params" else 1):  # nothing was written, so the files are not given up
            with pytest.raises(DiskStateError, match=chunks[2].name):
                step(state, batch_of(1))
        del state
        gc.collect()  # the errors' tracebacks refer to the state, and to themselves
        restored = saved.restore(tx.create(jax.eval_shape(model_params))).state
        jax.tree.map(np.testing.assert_array_equal, contents(restored), wanted)
        step(restored, batch_of(1))


VERSIONS = {
    "params": "files of params in .* have version 2, and this state has version 1",
    "opt_state": "files of opt_state in .* have version 3, and this state has version 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("kept", VERSIONS)
def test_a_copy_of_a_state_whose_files_have_changed_is_refused(tmp_path, kept):
    """Otherwise it would train older parameters with newer moments."""
    tx, step, state, _ = begun(tmp_path / "run", kept)
    copied = jax.tree.map(jnp.copy, state)
    step(state, batch_of(1))
    uses = [lambda: step(copied, batch_of(2)), lambda: tx.unshard(getattr(copied, kept))]
    uses += [lambda: tx.eval_step(LOSS)(copied.params, batch_of(0))] if kept == "params" else []
    for use in uses:
        with pytest.raises(ValueError, match=VERSIONS[kept]):
            use()
    if kept == "opt_state":
        saved = Checkpointer(tmp_path / "saved")
        saved.save(copied, step=1)
        with pytest.raises(CheckpointError, match=VERSIONS[kept]):
            saved.close()


@pytest.mark.slow
def test_a_folder_that_is_gone_is_named(tmp_path):
    _, step, state, chunks = begun(tmp_path / "run")
    shutil.rmtree(chunks[0].parent)
    with pytest.raises(DiskError, match=str(chunks[0].parent)):
        step(state, batch_of(1))


def test_an_error_before_anything_is_written_loses_nothing(tmp_path, monkeypatch):
    """A wrong batch, an exception of the loss, Ctrl-C while a step is traced, and one while it reads."""
    tx = on_disk(tmp_path / "run", devices=2)
    state = tx.create(model_params())
    problem: list = []

    def loss(params, batch):
        if problem:
            raise problem.pop()
        return LOSS(params, batch)

    step = tx.train_step(loss)
    for error in (RuntimeError("of the user"), KeyboardInterrupt()):
        problem.append(error)
        with pytest.raises(type(error)):
            step(state, batch_of(0))
    with pytest.raises(ValueError, match="rows"):
        step(state, jax.tree.map(lambda x: x[:3], batch_of(0)))
    with monkeypatch.context() as patched:
        patched.setattr("zerojax.staged.microbatch.Microbatch.forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, batch_of(0))
    found, given = tx.unshard(state.params), model_params()  # it would raise an error if the files were given up
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(given))


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_write_that_fails_unlocks_the_folder(tmp_path, monkeypatch):
    """Although the traceback, which a notebook keeps, still refers to the files."""
    kept, transfer = [], disk.transfer
    of_params, to_disk = on_disk(tmp_path / "p", devices=2), Offload("disk", path=tmp_path / "s")
    of_state = zero_shard(optax.adam(1e-3), stage=2, mesh=mesh_of(2), tuning=Tuning(persist_below=8), offload=to_disk)
    ways = [of_params.create, lambda x: of_params.init_params(lambda: x), of_params.shard, of_state.create]
    for way in ways:
        for allowed in (1, 4):
            count = iter(range(allowed))

            def full(path, content, *, write, direct, count=count):
                if write and path.name.startswith("chunk") and next(count, None) is None:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return transfer(path, content, write=write, direct=direct)

            with monkeypatch.context() as patched:
                patched.setattr(disk, "transfer", full)
                with pytest.raises(DiskError, match="No space left") as error:
                    way(model_params())
            kept.append(error)
        offload.close(way(model_params()))


@pytest.mark.slow
def test_a_step_that_is_interrupted_gives_its_files_up(tmp_path, monkeypatch):
    _, step, state, chunks = begun(tmp_path / "run")

    monkeypatch.setattr("zerojax.staged.chunk_update.StagedQueue.update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(state, batch_of(1))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="half written"):
        step(state, batch_of(1))
    on_disk(tmp_path / "run", devices=2).create(model_params())
    assert chunks[0].exists()


def test_what_cannot_be_is_refused_by_name(tmp_path):
    make = lambda tx=None, **options: zero_shard(tx or optax.adam(1e-2), mesh=mesh_of(2), **{"stage": 3, **options})
    kept = Offload(params="disk", optimizer="disk", path=tmp_path / "run")
    for options, match in (
        ({"stage": 2}, "needs stage 3"),
        ({"view": "device"}, "view='device' is not possible"),
        ({"overwrite": lambda path, _: "w" in path}, "overwrite"),
    ):
        with pytest.raises(ValueError, match=match):
            make(offload=kept, **options)
    tx, step, state, _ = begun(tmp_path / "one")
    for use in (lambda: step.lower(state, batch_of(0)), lambda: jax.jit(step)(state, batch_of(0))):
        with pytest.raises(TypeError, match="a step is many programs"):
            use()
    with pytest.raises(TypeError, match=r"params\['embed'\] is offloaded, and cannot be pickled"):
        pickle.dumps(state.params)
    with pytest.raises(TypeError, match="state is on disk"):
        tx.update(model_params(), state.opt_state, model_params())


def test_host_memory_that_does_not_hold_the_buffers_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"host_bytes=1000\) is less than the \d+ bytes of the buffers"):
        on_disk(tmp_path / "run", devices=2, host_bytes=1000).create(model_params())
