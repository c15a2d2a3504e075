"""Error messages about offloaded state: each error is raised, and then what it says is done."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, Tuning, offload, zero_shard
from zerojax.checkpoint import Checkpointer
from zerojax.offload.folder import DiskError

PARAMS = {"w": jnp.linspace(0.1, 1, 64).reshape(8, 8), "b": jnp.ones(8)}
SHAPES = jax.eval_shape(lambda: PARAMS)
ZERO = functools.partial(
    zero_shard, optax.sgd(0.1, momentum=0.9), stage=3, mesh=mesh_of(8), tuning=Tuning(persist_below=1)
)


def on_disk(path):
    return ZERO(offload=Offload(optimizer="disk", path=path, update="device"))


def test_what_messages_about_folders_of_state_say_to_do_works(tmp_path):
    (tmp_path / "other" / "process_0").mkdir(parents=True)
    (tmp_path / "other" / "process_0" / "notes.txt").write_text("mine")
    with pytest.raises(DiskError, match="Give an empty folder, or a folder that Offload made"):
        on_disk(tmp_path / "other").create(PARAMS)
    tx = on_disk(tmp_path / "state")
    state = tx.create(PARAMS)
    with pytest.raises(DiskError, match=r"state with zerojax\.offload\.close\(state\); or give another folder"):
        on_disk(tmp_path / "state").create(PARAMS)
    offload.close(state)
    state = tx.create(PARAMS)
    (tmp_path / "other" / "process_0" / "notes.txt").unlink()
    other = on_disk(tmp_path / "other").create(PARAMS)
    with pytest.raises(DiskError, match="parent folder exists"):
        on_disk(tmp_path / "a" / "b").create(PARAMS)
    with pytest.raises(TypeError, match=r"first load the leaves onto the devices with tx\.unshard"):
        jax.jit(lambda state: tx.unshard(state))(state.opt_state)
    jax.eval_shape(lambda state: state, tx.unshard(state.opt_state))
    shapes = tx.create(SHAPES)
    with pytest.raises(ValueError, match=r"is a shape and has no values\..*or restore a checkpoint into it"):
        tx.unshard(shapes.opt_state)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(other)
        checkpoints.wait()
        offload.close(state)
        tx.unshard(checkpoints.restore(shapes).state.opt_state)
