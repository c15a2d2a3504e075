"""A step loads its executable from a file if it is that of the step, and otherwise says why not."""

import collections
import dataclasses
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command_line import run
from conftest import mesh_of
from jax.experimental import serialize_executable
from jax.sharding import Mesh

import zerojax
from zerojax import Offload, zero_shard
from zerojax.gpus.topology import absent_mesh, installed
from zerojax.train import executables

HAS_GPUS = installed() and jax.__version_info__ >= (0, 11)
BATCH = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)


PARAMS = {"w": jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)}


def begun(mesh, loss=loss, params=PARAMS, rate=1e-2, stage=3, **options):
    tx = zero_shard(optax.adamw(rate), stage=stage, mesh=mesh, persist_below=0)
    return tx.train_step(loss, **options), tx.create(params)


@pytest.fixture
def compiled():
    """The number of programs that XLA compiled since the test began."""
    events = collections.Counter()
    count = lambda event, _, **__: events.update([event.rpartition("/")[2]])
    jax.monitoring.register_event_duration_secs_listener(count)
    yield lambda: events["backend_compile_duration"]
    jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The executable of the step of `begun`, from shapes."""
    path = tmp_path_factory.mktemp("executable") / "step.zip"
    step, state = begun(mesh_of(4), params=jax.eval_shape(lambda: PARAMS))
    step.save(path, state, jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype))
    return path


def changed(file, path, executable=None, **header):
    """A copy of `file` with other entries in its header, or another executable."""
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name) if executable is None or name != executables.EXECUTABLE else executable
            new.writestr(name, json.dumps(json.loads(data) | header) if name == executables.HEADER else data)
    return path


def why(file, step, state, batch=BATCH):
    """The reason that a step gives for not loading a file."""
    step.load(file, required=True)
    with pytest.raises(ValueError, match=r"does not load .*Save the executable again") as told:
        step(state, batch)
    return str(told.value)


def test_a_loaded_step_compiles_nothing_and_gives_the_same_bits(file, compiled):
    step, state = begun(mesh_of(4))
    again, other = begun(mesh_of(4))
    again.load(file, required=True)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    place = zerojax.data.shard_batches  # the batch is placed first, so that nothing but the step is counted
    [rows] = place([BATCH], zero_shard(optax.sgd(1.0), stage=3, mesh=mesh_of(4)))
    before, given = compiled(), other
    for _ in range(2):
        other, found = again(other, rows)
    assert compiled() == before
    assert len(again._file.found) == 1  # the second call is not traced, though its state is the result of a program
    assert all(x.is_deleted() for x in jax.tree.leaves(given.params))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((other, found)), jax.device_get((state, metrics)))
    assert f"Loaded from '{file}'." in str(zerojax.report(other, again))
    assert "sdy.sharding" in again.lower(other, BATCH).as_text()  # of the live step


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rate": 2e-2}, r"an option has changed.* is `.*dense<-2\S+e-02>.*and in the file `.*dense<-0.0099\d+>"),
        (
            {"loss": lambda params, x: loss(params, x) + jnp.sum(x) * 0},
            r"programs differ at \S+test_executables.py:\d+",
        ),
        ({"leaf_norms": True}, "grad_norms"),
        ({"stage": 1}, "programs differ"),
        ({"memory": "1 GB"}, "The file is of a step without memory=, and this is a step with it"),
        (
            {"compiler_options": {"xla_x": 1}},
            r"with the options \{\}, and the step has the options \{'xla_x': 1\}",
        ),
    ],
    ids=["rate", "loss", "norms", "stage", "memory", "options"],
)
def test_what_changed_is_named(file, options, reason):
    assert re.search(reason, why(file, *begun(mesh_of(4), **options)))


def test_a_step_that_does_not_load_warns_and_compiles(file):
    step, state = begun(mesh_of(4))
    step.load(file.with_name("other.zip"))
    with pytest.warns(UserWarning, match=r"other.zip'\. It cannot be read: .* It is compiled instead.") as told:
        state, metrics = step(state, BATCH)
    assert told[0].filename == __file__
    assert np.isfinite(metrics["loss"])
    assert step.compiled_with == ()


def test_other_shapes_and_devices_are_named(file):
    assert "batch is float32[8, 16] in the file, and float32[4, 16] here." in why(file, *begun(mesh_of(4)), BATCH[:4])
    assert "for the mesh {'data': 4}, and this is the mesh {'data': 2}" in why(file, *begun(mesh_of(2)))
    turned = Mesh(mesh_of(4).devices[::-1], "data")
    assert "for the devices (0, 1, 2, 3), and this is the devices (3, 2, 1, 0)" in why(file, *begun(turned))


def test_other_versions_and_files_are_named(file, tmp_path):
    path = changed(file, tmp_path / "a", environment={"jax": "0.1", "optax": "0.1"}, kind="h200")
    told = why(path, *begun(mesh_of(4)))
    assert f"The file was written with jax 0.1, and this is jax {jax.__version__}." in told
    assert "It was compiled for the kind h200, and this is the kind cpu." in told
    environment = executables.environment() | {"jax": jax.__version__, "optax": "0.1"}
    path = changed(file, tmp_path / "b", environment=environment)
    assert "The file was written with optax 0.1, now " in why(path, *begun(mesh_of(4), rate=2e-2))
    step, state = begun(mesh_of(4))
    step.load(path, required=True)
    step(state, BATCH)  # the program is the same, so another version of optax does not matter
    path = changed(file, tmp_path / "g", options={"xla_cpu_enable_fast_math": True})
    assert "with the options {'xla_cpu_enable_fast_math': True}, and the step has the options {} or" in why(
        path, *begun(mesh_of(4))
    )
    assert "Its format is 99, and this version reads 1." in why(
        changed(file, tmp_path / "c", format=99), *begun(mesh_of(4))
    )
    (tmp_path / "d").write_bytes(file.read_bytes()[:-100])
    assert "It is no intact file of step.save" in why(tmp_path / "d", *begun(mesh_of(4)))
    for header in {"environment": None}, {"arguments": ["w"]}:
        assert "It is no intact file of step.save" in why(changed(file, tmp_path / "h", **header), *begun(mesh_of(4)))
    for executable in b"", b"other" * 9:  # what unpickling raises
        path = changed(file, tmp_path / "i", executable)
        assert "The executable does not load: " in why(path, *begun(mesh_of(4)))
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as whole:
        info = whole.getinfo(executables.EXECUTABLE)
    for place in (200, info.compress_size // 2):  # a wrong code, or a wrong checksum
        changed_byte = info.header_offset + 30 + len(info.filename) + place
        (tmp_path / "e").write_bytes(content[:changed_byte] + b"\xff\0\xff" + content[changed_byte + 3 :])
        assert "It is no intact file of step.save" in why(tmp_path / "e", *begun(mesh_of(4)))


@pytest.mark.slow
def test_the_choices_of_a_step_are_in_its_file(tmp_path, compiled):
    def scanned(params, batch):
        layer = lambda x, _: (jnp.tanh(x @ params["w"] @ params["w"].T), None)
        return jnp.mean(jax.lax.scan(layer, batch, None, length=4)[0] ** 2)

    options = {"xla_backend_optimization_level": 0}
    given = {"loss": scanned, "memory": 6000, "compiler_options": options}
    step, state = begun(mesh_of(2), **given)
    fit = step.memory_fit(state, BATCH)
    step.save(tmp_path / "step.zip", state, BATCH)
    header = json.loads(zipfile.ZipFile(tmp_path / "step.zip").read(executables.HEADER))
    assert 0 < fit.chosen.share < 1  # neither all nor nothing
    assert (header["share"], header["peak"], header["options"]) == (fit.chosen.share, fit.chosen.peak, options)
    again, other = begun(mesh_of(2), **given)
    again.load(tmp_path / "step.zip", required=True)
    assert again.compiler_options(other, BATCH).options == options
    before = compiled()
    again.lower(other, BATCH)
    assert compiled() == before
    less, state = begun(mesh_of(2), **given | {"memory": fit.chosen.peak - 1})
    less.load(tmp_path / "step.zip", required=True)
    with pytest.raises(ValueError, match=r"The executable takes .* kB per device, and the step may take"):
        less(state, BATCH)


@pytest.mark.parametrize("reason", ["", "It is another one."])
def test_all_processes_load_or_none(file, monkeypatch, reason):
    monkeypatch.setattr(executables, "is_of_all", lambda mesh: True)
    other = reason or f"digest {'0' * 64}"
    monkeypatch.setattr(executables.Processes, "exchange", lambda self, topic, message: [message, other])
    told = f"On process 1: {reason}" if reason else "The processes have different files."
    assert told in why(file, *begun(mesh_of(4)))


def test_a_state_with_other_shardings_is_compiled(file):
    step, state = begun(mesh_of(4))
    state, _ = step(state, BATCH)
    step.load(file)
    state, _ = step(state, BATCH)
    assert step.compiled_with == (f"Loaded from '{file}'.",)
    whole = jax.NamedSharding(mesh_of(4), jax.P())
    moved = jax.tree.map(lambda x: jax.device_put(x, whole), state.params)
    with pytest.warns(UserWarning, match="The step does not load .* the programs differ") as told:
        state, _ = step(dataclasses.replace(state, params=moved), BATCH)
    assert [one.filename for one in told] == [__file__]  # the caller's line, also if the step has run before


def test_what_cannot_be_saved_is_refused(tmp_path):
    def printing(params, batch):
        jax.debug.print("{}", batch[0, 0])
        return loss(params, batch)

    step, state = begun(mesh_of(2), loss=printing)
    with pytest.raises(ValueError, match=r"calls a Python function \(jax.debug.print"):
        step.save(tmp_path / "step.zip", state, BATCH)
    tx = zero_shard(
        optax.adamw(1e-2), stage=3, mesh=mesh_of(2), persist_below=0, offload=Offload(optimizer="host", update="device")
    )
    with pytest.raises(ValueError, match="With offloaded optimizer state a step is several programs"):
        tx.train_step(loss).save(tmp_path / "step.zip", tx.create(PARAMS), BATCH)
    for other in (tx.train_step(loss), jax.jit(loss)):
        with pytest.raises(ValueError, match=r"plan\(save=\) writes the one program of a step"):
            zerojax.plan(other, state, BATCH, save=tmp_path / "step.zip")
    with pytest.raises(ValueError, match=r"state\.step is a shape without a sharding"):
        step.save(tmp_path / "step.zip", jax.eval_shape(lambda: state), BATCH)
    for path, said in (tmp_path / "none" / "step.zip", "There is no folder"), (tmp_path, "is a folder"):
        for save in (step.save, lambda path, *given: zerojax.plan(step, *given, save=path)):  # before it is compiled
            with pytest.raises(ValueError, match=said):
                save(path, state, BATCH)
    assert not list(tmp_path.iterdir())


SAVED = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, collections
from zerojax import zero_shard

def make_step():
    tx = zero_shard(optax.adamw(1e-2), stage=3, persist_below=0)
    loss = lambda params, batch: jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)
    return tx.train_step(loss), tx.create({"w": jnp.ones((16, 8))}), np.ones((8, 16), np.float32)

if __name__ == "__main__":
    events = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.update([event]))
    step, state, batch = make_step()
    events.clear()
    if sys.argv[1] == "save":
        step.save(sys.argv[2], state, batch)
    else:
        step.load(sys.argv[2], required=True)
    for _ in range(2):
        state, metrics = step(state, jax.device_put(batch, state.params["w"].sharding))
    print(events["/jax/core/compile/backend_compile_duration"], float(metrics["loss"]).hex())
"""


@pytest.mark.slow
def test_another_process_compiles_nothing(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}

    def start(what):
        command = [sys.executable, "-c", SAVED, what, tmp_path / "step.zip"]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300).stdout.split()

    (compiled, value), (again, loaded) = start("save"), start("load")
    assert int(compiled) > 0
    assert (again, loaded) == ("0", value)


class Unpickler(pickle.Unpickler):
    """Reads an executable without the GPUs that can load it: XLA's bytes stay bytes."""

    def persistent_load(self, pid):
        devices = absent_mesh("h200:4").devices
        return pid[1] if pid[0] == "exec" else devices[pid[1]] if pid[0] == "device" else devices[0].client


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPUS, reason="needs the extra aot, of the newest jax")
def test_an_executable_for_absent_gpus_comes_back(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SAVED)
    path, written = tmp_path / "step.zip", []
    serialize = serialize_executable.serialize
    monkeypatch.setattr(serialize_executable, "serialize", lambda x: written.append((x, serialize(x))) or written[0][1])
    outcome = run("plan", tmp_path / "mine.py", "--topology", "h200:4", "--save", path, "--json")
    assert outcome.exit_code == 0, outcome.output
    [(compiled, (payload, _, _))] = written
    with zipfile.ZipFile(path) as file:
        header, executable = json.loads(file.read(executables.HEADER)), file.read(executables.EXECUTABLE)
    assert (header["kind"], header["devices"], header["mesh"]) == ("h200", [0, 1, 2, 3], {"data": 4})
    assert header["peak"] == json.loads(outcome.stdout)["peak"]
    assert executable == payload
    unloaded, given, _ = Unpickler(io.BytesIO(executable)).load()
    assert b"GpuExecutableProto" in unloaded.xla_executable
    assert [x.shape for x in given] == [x.shape for x in jax.tree.leaves(compiled.args_info)]
    assert unloaded.input_shardings == jax.tree.leaves(compiled.input_shardings)

    def why(topology, rate=1e-2):
        """Where a step on these GPUs stops: without a driver, no step can load what XLA compiled."""
        tx = zero_shard(optax.adamw(rate), stage=3, mesh=absent_mesh(topology), persist_below=0)
        step, state = tx.train_step(loss), tx.create(jax.eval_shape(lambda: PARAMS))
        step.load(path, required=True)
        with pytest.raises(ValueError, match="does not load") as told:
            step.lower(state, jax.ShapeDtypeStruct((8, 16), jnp.float32))
        return str(told.value)

    assert "The executable does not load: " in why("h200:4")  # everything else agrees
    assert "for the kind h200, and this is the kind h100" in why("h100:4")
    assert "for the mesh {'data': 4}, and this is the mesh {'data': 8}" in why("h200:8")
    assert "the programs differ" in why("h200:4", rate=2e-2)
