"""The plan of a step with parameters on disk: its trace is the step's, and absent GPUs get all of its programs."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import mesh_of, quick_or_slow
from disk_models import LOSSES, batch_of, model_params, on_disk

from zerojax import Offload, estimate, plan, zero_shard
from zerojax.compat import opened
from zerojax.gpus.topology import installed
from zerojax.jaxprs import equations
from zerojax.offload.state_files import StateFiles
from zerojax.planning import staged_program
from zerojax.planning.compiled_plan import STATE_PARTS
from zerojax.planning.shapes import abstract
from zerojax.planning.staged_program import compile_trace
from zerojax.planning.staged_trace import trace_step
from zerojax.plot import timeline
from zerojax.staged.microbatch import Microbatch
from zerojax.staged.model_files import ModelFiles

aot = pytest.mark.skipif(
    not installed() or jax.__version_info__ < (0, 11), reason="needs the extra aot, of the newest jax"
)


def traced(tx, loss, batch=batch_of, **options):
    return trace_step(tx.train_step(loss, **options), tx.create(jax.eval_shape(model_params)), abstract(batch()), ())


def moved_in(trace):
    """Bytes that a trace reads and writes: of a chunk that is copied to the devices, or of a result copied back."""
    read = written = 0
    for eqn in trace.jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            (x,) = eqn.invars
            size = x.aval.size * x.aval.dtype.itemsize
            read, written = (read + size, written) if x in trace.chunks else (read, written + size)
    return read, written


@pytest.fixture
def moved(monkeypatch):
    """Bytes that steps copy to the devices, and back to the files."""
    counts = {"read": 0, "written": 0}
    receive = StateFiles.receive

    def received(self, *args):
        array = receive(self, *args)
        counts["read"] += array.nbytes
        return array

    def written(write):
        def counted(self, k, n, array):
            counts["written"] += array.nbytes
            write(self, k, n, array)

        return counted

    monkeypatch.setattr(StateFiles, "receive", received)
    for files in (StateFiles, ModelFiles):
        monkeypatch.setattr(files, "write", written(files.write))
    return counts


CASES = {name: {} for name in LOSSES} | {"accumulate": {"accumulate": 2}, "may skip": {"skip_nonfinite": True}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), quick_or_slow([(n, d) for n in CASES for d in (1, 8)], [("loop", 1)]))
def test_a_trace_moves_the_bytes_of_a_step(tmp_path, moved, name, devices):
    options, loss = CASES[name], LOSSES.get(name, LOSSES["loop"])
    tx = on_disk(tmp_path, devices=devices)
    state, step = tx.create(model_params()), tx.train_step(loss, **options)
    moved.update(read=0, written=0)
    step(state, batch_of())
    assert (moved["read"], moved["written"]) == moved_in(traced(tx, loss, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "one_by_one"])
def test_the_arrays_between_programs_are_those_that_python_holds(tmp_path, monkeypatch, name):
    """Without the programs' temporary memory, whose arrays Python does not hold."""
    tx = on_disk(tmp_path, devices=1, chunk_bytes=4096)
    state, step, held = tx.create(model_params()), tx.train_step(LOSSES[name]), []
    others = sum(x.nbytes for x in jax.live_arrays()) - sum(x.nbytes for x in jax.tree.leaves(state))
    ran = Microbatch._ran

    def counted(self, results):
        held.append(sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()) - others)
        return ran(self, results)

    monkeypatch.setattr(Microbatch, "_ran", counted)
    step(state, batch_of())
    analysis = staged_program.memory_analysis

    def of_results(program):
        found = analysis(program)
        sizes = {name: getattr(found, f"{name}_size_in_bytes") for name in ("output", "alias")}
        return SimpleNamespace(temp_size_in_bytes=0, **{f"{name}_size_in_bytes": x for name, x in sizes.items()})

    monkeypatch.setattr(staged_program, "memory_analysis", of_results)
    found = compile_trace(traced(tx, LOSSES[name]), step.config.mesh, STATE_PARTS).peak
    assert found == pytest.approx(max(held), rel=0.03)  # Python also holds scalars and chunks that wait to be written


def test_chunks_are_copied_before_the_program_of_the_use_before_is_waited_for(tmp_path, monkeypatch):
    """So copies can run while the devices compute."""
    events, launched = [], []
    receive, ran, block = StateFiles.receive, Microbatch._ran, jax.block_until_ready

    def copy(self, *args):
        events.append(("copy", len(launched)))  # for the program that is launched next
        return receive(self, *args)

    def launch(self, results):
        events.append(("launch", len(launched)))
        launched.append(jax.tree.leaves(results))
        return ran(self, results)

    def wait(x):
        events.extend(("wait", n) for n, results in enumerate(launched) if any(x is y for y in results))
        return block(x)

    tx = on_disk(tmp_path, devices=1, chunk_bytes=4096)
    state, step = tx.create(model_params()), tx.train_step(LOSSES["loop"])
    monkeypatch.setattr(StateFiles, "receive", copy)
    monkeypatch.setattr(Microbatch, "_ran", launch)
    monkeypatch.setattr(jax, "block_until_ready", wait)
    step(state, batch_of())
    waits = [n for event, n in events if event == "wait"]
    uses = {n for event, n in events if event == "copy" and 0 < n < len(launched)}
    assert len(uses) >= 8  # three layers each way, and the parameters outside of the loop
    assert len(waits) >= len(uses)
    for n in waits:
        assert events.index(("wait", n)) > events.index(("launch", n + 1))
        if n + 1 in uses:
            assert events.index(("launch", n)) < events.index(("copy", n + 1)) < events.index(("wait", n))


WIDTH, DEPTH = 256, 8


def layers():
    return {"layers": jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)}


def deep(params, batch):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
    return jnp.mean(jax.lax.scan(layer, batch, params["layers"])[0] ** 2)


def step_of(offload):
    tx = zero_shard(optax.adam(1e-3), stage=3, mesh=mesh_of(8), offload=offload)
    return tx.train_step(deep), tx.create(layers())


DISK = Offload(params="disk", optimizer="disk", path="anywhere")
BATCH = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)


@aot
@pytest.mark.slow
def test_absent_gpus_hold_less_than_with_parameters_in_host_memory():
    """Also without the parameters, which the plan for host memory counts as memory of the device."""
    disk = plan(*step_of(DISK), BATCH)
    host = plan(*step_of(Offload(optimizer="host", params="host")), BATCH)
    assert disk.peak <= host.peak - host.memory["parameters"]
    assert disk.memory["between programs"] > 0
    assert disk.memory["parameters"] == 4  # the version of the files
    product = 2 * (64 // 8) * WIDTH**2  # of one device's rows
    assert disk.roofline.operations == {"f32": 4 * DEPTH * product}
    # Within one program, XLA also sees that the batch needs no cotangent.
    assert host.roofline.operations == {"f32": (4 * DEPTH - 1) * product}
    for found in disk, host:
        gathers = [c for c in found.collectives.of("all-gather") if c.elements >= WIDTH**2]
        assert sum(c.bytes * c.times for c in gathers) == 2 * DEPTH * WIDTH**2 * 4


def copies_in(jaxpr):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "device_put"]


def test_no_program_copies_from_host_memory():
    """With parameters in host memory, the one program does. Compiled programs of absent GPUs do not show it."""
    step, state = step_of(DISK)
    trace = trace_step(step, state, BATCH, ())
    inside = [copies_in(opened(eqn.params["jaxpr"])[0]) for eqn in trace.jaxpr.eqns if eqn.primitive.name == "jit"]
    assert len(inside) >= 2 * DEPTH
    assert not any(inside)
    assert len(copies_in(trace.jaxpr)) > 2 * DEPTH
    step, state = step_of(Offload(optimizer="host", params="host"))
    assert copies_in(step.trace(state, BATCH).jaxpr.jaxpr)


@aot
@pytest.mark.slow
def test_the_time_is_the_longest_of_compute_link_and_disk():
    step, state = step_of(DISK)
    row = estimate(layers(), tx=optax.adam(1e-3), stages=(3,), offload=DISK)[3]
    found = plan(step, state, BATCH)
    assert (found.disk, found.read, found.written) == (row.disk, row.read, row.written)
    assert found.transfers == {"host link": row.read / 50e9}
    assert found.seconds == max(found.roofline.seconds, row.read / 50e9)
    assert found.disk_bandwidth == (row.read + row.written) / found.seconds
    slow = plan(step, state, BATCH, disk=1e9, host_link=25e9)
    assert slow.transfers == {"host link": row.read / 25e9, "disk": (row.read + row.written) / 1e9}
    assert slow.seconds == slow.transfers["disk"] > slow.roofline.seconds
    text = str(slow)
    for line in ("read per step", "written per step", "the disk is the limit below"):
        assert line in text
    assert json.loads(json.dumps(slow.to_dict()))["disk_bandwidth"] == slow.disk_bandwidth
    with pytest.raises(ValueError, match="no program to draw"):
        timeline(slow)


@aot
@pytest.mark.slow
def test_further_arguments_may_be_keys_and_numbers():
    """Also where a constant of the loss, and the update of a matrix, are programs of the plan."""
    noise = jnp.linspace(0, 1, WIDTH)
    loss = lambda params, x, key, scale: deep(params, x + noise * scale * jax.random.normal(key, x.shape[1:]))
    tx = zero_shard(optax.contrib.muon(1e-3), stage=3, mesh=mesh_of(8), offload=DISK)
    step = tx.train_step(loss, skip_nonfinite=True, accumulate=2)
    found = plan(step, tx.create(layers()), BATCH, jax.random.key(0), 0.5)
    assert found.fits
    row = estimate(layers(), tx=optax.contrib.muon(1e-3), stages=(3,), offload=DISK, accumulate=2)[3]
    assert (found.read, found.written) == (row.read, row.written)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [({"disk": 0}, ValueError, "disk= is in bytes per second of one GPU"), ({"dsk": 1}, TypeError, "'dsk'")],
)
def test_wrong_hardware(option, error, message):
    step, state = step_of(DISK)
    with pytest.raises(error, match=message):
        plan(step, state, BATCH, **option)
