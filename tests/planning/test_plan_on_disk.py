"""The plan of a step with parameters on disk: its trace is the step's, and absent GPUs get all of its programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import quick_or_slow
from disk_models import LOSSES, batch_of, model_params, on_disk, sharded

import zerojax
from zerojax import Offload, Precision
from zerojax.gpus.topology import installed
from zerojax.offload.state_files import StateFiles
from zerojax.planning import staged_program
from zerojax.planning.absent_program import program_of_step
from zerojax.planning.compiled_plan import STATE_PARTS
from zerojax.planning.shapes import abstract
from zerojax.planning.staged_program import compile_trace
from zerojax.planning.staged_trace import trace_step
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


CASES = {name: {} for name in LOSSES} | {"accumulate": {"accumulate": 2}, "may skip": {"precision": Precision.fp16()}}


@pytest.mark.parametrize(("name", "devices"), quick_or_slow([(n, d) for n in CASES for d in (1, 8)], [("loop", 8)]))
def test_a_trace_moves_the_bytes_of_a_step(tmp_path, moved, name, devices):
    options, loss = dict(CASES[name]), LOSSES.get(name, LOSSES["loop"])
    config = {"precision": options.pop("precision")} if "precision" in options else {}
    tx = on_disk(tmp_path, devices=devices, **config)
    state, step = tx.create(model_params()), tx.train_step(loss, **options)
    moved.update(read=0, written=0)
    step(state, batch_of())
    assert (moved["read"], moved["written"]) == moved_in(traced(tx, loss, **options))


@pytest.mark.parametrize("name", ["loop", pytest.param("one_by_one", marks=pytest.mark.slow)])
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
    print(held, found)
    assert found == pytest.approx(max(held), rel=0.1)
