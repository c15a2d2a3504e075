"""Error messages about checkpoints and exported weights: each error is raised, and then what it says is done."""

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import mesh_of

from zerojax import Tuning, zero_shard
from zerojax.checkpoint import Checkpointer, CheckpointError, export, export_checkpoint, import_params, on_preemption

PARAMS = {"w": jnp.linspace(0.1, 1, 64).reshape(8, 8), "b": jnp.ones(8)}
RENAMED = {"kernel": PARAMS["w"], "bias": PARAMS["b"]}
SHAPES = jax.eval_shape(lambda: PARAMS)
ZERO = functools.partial(zero_shard, mesh=mesh_of(8), tuning=Tuning(persist_below=1))
TX, ADAM = ZERO(optax.sgd(0.1, momentum=0.9), stage=3), ZERO(optax.adam(0.1), stage=3)
# A floating type that safetensors does not have, names that meet in a file, and values that differ.
UNKNOWN = {"w": jnp.ones(4, jnp.float8_e4m3b11fnuz), "n": jnp.ones(4, int)}
DOTTED, THREE = {"a.b": jnp.ones(4), "a": {"b": jnp.ones(4)}}, PARAMS | {"c": jnp.zeros(8)}


class Pair(NamedTuple):
    epoch: int
    row: int


@pytest.fixture(scope="module")
def state():
    return TX.create(PARAMS)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    """A folder with the steps 0 and 3, and one with exported weights."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder / "run") as checkpoints:
        checkpoints.save(state)
        checkpoints.save(state, data={"row": 5}, step=3)
    export(state, folder / "weights")
    return folder


def reading(saved):
    return Checkpointer(saved / "run", read_only=True)


def preempted():
    with on_preemption() as preemption:
        return preemption.reached(0)


# What raises, words of the message, what it says to do: of a state, saved files, and a new folder.
CASES = {
    "timeout": (
        lambda state, saved, new: Checkpointer(new, timeout="10"),
        "a number of seconds, such as 600",
        lambda state, saved, new: Checkpointer(new, timeout=600).close(),
    ),
    "no name": (
        lambda state, saved, new: Checkpointer(""),
        'Give one, such as "runs/gpt"',
        lambda state, saved, new: Checkpointer(new / "runs" / "gpt").close(),
    ),
    "shapes": (
        lambda state, saved, new: Checkpointer(new).save(TX.create(SHAPES)),
        r"state\.step is a shape and has no values\. Make it with tx\.create.*or restore a checkpoint into it",
        lambda state, saved, new: Checkpointer(new / "x").save(reading(saved).restore(TX.create(SHAPES)).state),
    ),
    "data": (
        lambda state, saved, new: Checkpointer(new).save(state, data=object()),
        "Give plain values, arrays, containers",
        lambda state, saved, new: Checkpointer(new / "x").save(state, data={"row": np.arange(3), "name": "a"}),
    ),
    "read only": (
        lambda state, saved, new: reading(saved).save(state),
        "Open one without it to save",
        lambda state, saved, new: Checkpointer(new).save(state),
    ),
    "thread": (
        lambda state, saved, new: ThreadPoolExecutor().submit(preempted).result(),
        "must be called in the main thread",
        lambda state, saved, new: not preempted(),
    ),
    "no step": (
        lambda state, saved, new: reading(saved).restore(state, step=9),
        "no checkpoint of step 9.*it has the steps 0, 3",
        lambda state, saved, new: reading(saved).restore(state, step=3),
    ),
    "other data": (
        lambda state, saved, new: reading(saved).restore(state, data=Pair(0, 0)),
        "Give data= the structure that was saved, or leave it out",
        lambda state, saved, new: (
            reading(saved).restore(state, data={"row": 0}).data == reading(saved).restore(state).data == {"row": 5}
        ),
    ),
    "other optimizer": (
        lambda state, saved, new: reading(saved).restore(ADAM.create(PARAMS)),
        'Give a state of the saved model, optimizer and precision. Or .*partial="params" to begin a new run',
        lambda state, saved, new: (
            reading(saved).restore(TX.create(SHAPES)),
            reading(saved).restore(ADAM.create(PARAMS), partial="params"),
        ),
    ),
    "only shapes": (
        lambda state, saved, new: reading(saved).restore(ADAM.create(SHAPES), partial="params"),
        "Give live arrays to keep its value",
        lambda state, saved, new: reading(saved).restore(ADAM.create(PARAMS), partial="params"),
    ),
    "other word": (
        lambda state, saved, new: reading(saved).restore(state, partial="weights"),
        r"restore\(partial=\) is one of False, True, 'params'",
        lambda state, saved, new: [reading(saved).restore(state, partial=word) for word in (False, True, "params")],
    ),
    "other names": (
        lambda state, saved, new: reading(saved).restore(TX.create(RENAMED), partial="params"),
        r"has no parameter .* It has params\['b'\], params\['w'\]\. Rename.*export_checkpoint .* and import_params",
        lambda state, saved, new: (
            export_checkpoint(saved / "run", new / "x"),
            import_params(new / "x", TX.create(RENAMED), mapping={"w": "kernel", "b": "bias"}),
        ),
    ),
    "shapes of weights": (
        lambda state, saved, new: export(TX.shard(SHAPES), new),
        r"params\['b'\] is a shape.*or of what tx.init_params returns",
        lambda state, saved, new: export(TX.init_params(lambda: PARAMS), new / "x"),
    ),
    "taken": (
        lambda state, saved, new: export(state, saved / "weights"),
        "Give another name, or remove it",
        lambda state, saved, new: export(state, new / "x"),
    ),
    "integers": (
        lambda state, saved, new: export(state, new, dtype="int8"),
        "Give a floating type, such as bfloat16",
        lambda state, saved, new: export(state, new / "x", dtype=jnp.bfloat16),
    ),
    "floating type": (
        lambda state, saved, new: export(UNKNOWN, new),
        "Give a dtype= that it has, such as bfloat16",
        lambda state, saved, new: export(UNKNOWN, new / "x", dtype="bfloat16"),
    ),
    "other type": (
        lambda state, saved, new: export({"w": jnp.ones(4), "n": jnp.ones(4, jnp.int4)}, new, dtype="bfloat16"),
        "Leave it out, or give .* a cast of other types",
        lambda state, saved, new: export({"w": jnp.ones(4), "n": jnp.ones(4, jnp.int8)}, new / "x", dtype="bfloat16"),
    ),
    "key": (
        lambda state, saved, new: export({"w": jnp.ones(4), "key": jax.random.key(0)}, new),
        "give jax.random.key_data of a PRNG key",
        lambda state, saved, new: export({"w": jnp.ones(4), "key": jax.random.key_data(jax.random.key(0))}, new / "x"),
    ),
    "a name of the format": (
        lambda state, saved, new: export({"__metadata__": jnp.ones(4)}, new),
        "or give mapping= with another name for it",
        lambda state, saved, new: export({"__metadata__": jnp.ones(4)}, new / "x", mapping={"m": "__metadata__"}),
    ),
    "a dot": (
        lambda state, saved, new: export(DOTTED, new),
        "or give mapping= with another name for it",
        lambda state, saved, new: export(DOTTED, new / "x", mapping={"m": "a.b", "n": "a/b"}),
    ),
    "one tensor": (
        lambda state, saved, new: export(THREE, new, mapping={"w": "w", "t": ["b", "c"]}),
        "not equal. Give each a name",
        lambda state, saved, new: export(THREE, new / "x", mapping={"w": "w", "t": "b", "u": "c"}),
    ),
    "no files": (
        lambda state, saved, new: import_params(saved / "none", PARAMS),
        "Give a folder that has them, such as one that export wrote",
        lambda state, saved, new: import_params(saved / "weights", PARAMS),
    ),
    "left over": (
        lambda state, saved, new: import_params(saved / "weights", {"w": PARAMS["w"]}, mapping={"w": "w"}),
        "b is only in the file: map it to a parameter, or to None",
        lambda state, saved, new: import_params(saved / "weights", {"w": PARAMS["w"]}, mapping={"w": "w", "b": None}),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_message_about_files_says_to_do_works(case, state, saved, tmp_path):
    broken, words, mended = CASES[case]
    with pytest.raises((ValueError, TypeError, OSError, CheckpointError), match=f"(?s){words}"):
        broken(state, saved, tmp_path / "broken")
    assert mended(state, saved, tmp_path) is not False


def test_what_messages_about_folders_say_to_do_works(state, saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved / "run", folder)
    with Checkpointer(folder):
        with pytest.raises(CheckpointError, match=r"close a Checkpointer .* with close\(\).*read_only=True\) restores"):
            Checkpointer(folder)
        assert Checkpointer(folder, read_only=True).restore(state).step == 3
    closed = Checkpointer(folder)
    closed.close()
    with pytest.raises(CheckpointError, match=r"is closed\. Open another to save"):
        closed.save(state)
    (folder / "step_00000003").rename(folder / "step_00000007")
    with Checkpointer(folder) as checkpoints:
        with pytest.raises(CheckpointError, match=r"rename the folder to step_00000003.*pass step=0, or fallback=True"):
            checkpoints.restore(state)
        assert checkpoints.restore(state, step=0).step == 0
        with pytest.warns(UserWarning, match="Taking that of step 0 instead"):
            assert checkpoints.restore(state, fallback=True).step == 0
        (folder / "step_00000007").rename(folder / "step_00000003")
        assert checkpoints.restore(state).step == 3
    shutil.copytree(saved / "weights", tmp_path / "weights")
    (one,) = (tmp_path / "weights").glob("*.safetensors")
    shutil.copy(one, one.with_name("again.safetensors"))
    with pytest.raises(ValueError, match="Give only one of the files"):
        import_params(tmp_path / "weights", PARAMS)
    import_params(one, PARAMS)
    (tmp_path / "link").symlink_to(tmp_path / "weights")
    with pytest.raises(CheckpointError, match="Give the folder itself, or remove the link"):
        export(state, tmp_path / "link")
    (tmp_path / "link").unlink()
    export(state, tmp_path / "link")
