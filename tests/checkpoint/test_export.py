"""Export to safetensors and back; the command line; leaving on a signal."""

import json
import os
import signal
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same, saved
from command_line import refused, run
from jax.experimental import multihost_utils
from models import awkward_params
from safetensors.numpy import load_file
from test_round_trips import transformation

from zerojax import Precision
from zerojax.checkpoint import Checkpointer, export, export_checkpoint, import_params, on_preemption

PARAMS = awkward_params()
EXPECTED = {"layer.w": PARAMS["layer"]["w"], "layer.bias": PARAMS["layer"]["bias"]}
EXPECTED |= {name: x for name, x in PARAMS.items() if name != "layer"}


@pytest.mark.parametrize("precision", [None, Precision.bf16()], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_exported_parameters_are_the_logical_ones(stage, precision, tmp_path):
    """Padding is gone, and master weights are written, not their narrow copies."""
    state = transformation(stage, precision=precision).create(PARAMS)
    assert export(state, tmp_path / "out") == [tmp_path / "out" / "model.safetensors"]
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), EXPECTED)
    saved(tmp_path / "saved", state)
    export_checkpoint(tmp_path / "saved", tmp_path / "from")
    assert_same(load_file(tmp_path / "from" / "model.safetensors"), EXPECTED)


def test_floats_are_cast_to_the_type_chosen(tmp_path):
    export(transformation(3).create(PARAMS), tmp_path / "out", dtype=jnp.bfloat16)
    cast = {k: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for k, x in EXPECTED.items()}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), cast)


def test_past_the_limit_files_are_divided_and_indexed(tmp_path):
    written = export(transformation(3).create(PARAMS), tmp_path / "out", file_bytes=1500)
    assert len(written) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in EXPECTED.values())
    assert set(index["weight_map"]) == set(EXPECTED)
    found = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert_same(found, EXPECTED)
    jax.tree.map(np.testing.assert_array_equal, import_params(tmp_path / "out", jax.eval_shape(awkward_params)), PARAMS)


def test_the_host_holds_about_one_leaf(tmp_path):
    leaf = 4 << 20
    state = transformation(3).create({f"w{i}": jnp.ones((1024, 1024)) for i in range(8)})
    export(state, tmp_path / "warm")
    tracemalloc.start()
    export(state, tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * leaf


def test_what_is_not_wanted_is_warned_of(tmp_path):
    export({"w": jnp.ones((2, 3))}, tmp_path / "out")
    with pytest.raises(ValueError, match=r"nothing was read:\n  v is missing\n  w is only in the file"):
        import_params(tmp_path / "out", {"v": jnp.ones(1)})
    with pytest.warns(UserWarning, match="1 tensors of .* are not wanted: w"):
        import_params(tmp_path / "out", {})


@pytest.mark.parametrize(("limit", "files"), [(24, 1), (23, 2)])
def test_a_file_is_full_at_its_limit_and_has_at_least_one_byte(tmp_path, limit, files):
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}  # 12 bytes each
    assert len(export(params, tmp_path / "out", file_bytes=limit)) == files
    with pytest.raises(ValueError, match=r"file_bytes=0 is no size"):
        export(params, tmp_path / "none", file_bytes=0)
    assert os.listdir(tmp_path) == ["out"]


def test_tied_leaves_are_compared_before_a_cast(tmp_path):
    """Equal ones may have different types."""
    params = {"a": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16), "c": jnp.ones(3) + 2.0**-20}
    export({name: params[name] for name in "ab"}, tmp_path / "out", mapping={"t": ["a", "b"]})
    assert load_file(tmp_path / "out" / "model.safetensors")["t"].dtype == np.float32
    with pytest.raises(ValueError, match="'a' and 'c' the same tensor 't', but they are not equal"):
        export({name: params[name] for name in "ac"}, tmp_path / "x", mapping={"t": ["a", "c"]}, dtype=jnp.bfloat16)


# --- the command line --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory) as checkpoints:
        for step in (3, 5):
            checkpoints.save(transformation(3).create(PARAMS), step=step)
    return directory


def test_the_command_line_verifies_and_exports(steps, tmp_path):
    done = run("verify", steps)
    assert (done.exit_code, done.stdout) == (0, "step 3: intact\nstep 5: intact\n")
    done = run("export", steps, tmp_path / "out", "--step", 3, "--dtype", "bfloat16")
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path}/out/model.safetensors\n"), done.stderr
    assert load_file(tmp_path / "out" / "model.safetensors")["tied"].dtype == jnp.bfloat16
    assert json.loads(run("verify", steps, "--json").stdout) == {"intact": [3, 5]}
    written = json.loads(run("export", steps, tmp_path / "again", "--json").stdout)
    assert written == {"written": [f"{tmp_path}/again/model.safetensors"]}


def test_errors_of_the_command_line_are_one_line(steps, tmp_path):
    cases = {
        ("verify", tmp_path / "nowhere"): "There is no checkpoint in",
        ("export", steps, tmp_path / "out", "--step", "4"): "no checkpoint of step 4 in",
        ("export", steps, tmp_path / "out", "--dtype", "float17"): "float17",
        ("export", steps, steps): "exists already and is not empty",
    }
    for args, text in cases.items():
        assert text in refused(*args)


# --- preemption --------------------------------------------------------------------------------------------------


def send(number, preemption):
    """A signal to this process, and its arrival: another thread may get it first, and two that wait become one."""
    os.kill(os.getpid(), number)
    while preemption.signal is None:
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_loop_save_and_leave(number, tmp_path, caplog):
    tx = transformation(1)
    state, before = tx.create({"w": jnp.ones(4)}), signal.getsignal(number)
    with Checkpointer(tmp_path, every=100) as checkpoints, on_preemption() as preemption:
        for i in range(1, 50):
            if i == 7:
                send(number, preemption)
            stop = preemption.reached(i)
            checkpoints.save(state, {"i": i}, step=i, force=stop)
            if stop:
                break
    assert i == 7
    assert preemption.signal == number.name
    assert signal.getsignal(number) is before
    assert f"{number.name}: saving after this step" in caplog.text
    assert Checkpointer(tmp_path, read_only=True).restore(state).data == {"i": 7}


@pytest.mark.parametrize(
    ("processes", "asked", "stops"), [(1, [], [False] * 4), (2, [1, 2, 3], [False, False, True, True])]
)
def test_several_processes_leave_at_the_step_that_jax_gives(processes, asked, stops, monkeypatch):
    seen = []
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: seen.append(step) or step == 3)
    with on_preemption() as preemption:
        assert [preemption.reached(step) for step in range(1, 5)] == stops
    assert seen == asked


def test_a_signal_may_come_while_its_handler_is_set(monkeypatch):
    real = signal.signal
    before = real(signal.SIGUSR1, signal.SIG_IGN)

    def interrupted(number, handler):
        previous = real(number, handler)
        if callable(handler) and handler.__module__.startswith("zerojax"):
            signal.raise_signal(number)
        return previous

    monkeypatch.setattr(signal, "signal", interrupted)
    try:
        with on_preemption([signal.SIGUSR1]) as preemption:
            assert preemption.reached(1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        real(signal.SIGUSR1, before)


def test_a_second_signal_stops_at_once():
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def block():
        with on_preemption() as preemption:
            send(signal.SIGINT, preemption)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

    try:
        with pytest.raises(KeyboardInterrupt):
            block()
    finally:
        signal.signal(signal.SIGINT, usual)
