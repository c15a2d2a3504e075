"""The command line, as a new user would try it: every error is one line and exit status 2."""

import contextlib
import json
import re
import sys
from types import SimpleNamespace

import optax
import pytest
from command_line import refused, run
from typer.testing import CliRunner

from zerojax import doctor, estimate
from zerojax.cli import app, main
from zerojax.gpus.devices import Rates, Topology

MODELS = """
from __future__ import annotations
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from beside import WIDTH

print("said at once")

class Wide(nn.Module):  # its annotations are strings, which dataclasses look up in the module
    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)

def own():
    return Wide().init(jax.random.key(0), jnp.zeros((1, 64)))

def params():
    print("said later")
    from later import NOTHING
    return {"w": jnp.zeros((WIDTH, 100_000))}

def nnx_module():
    from flax import nnx
    return nnx.Linear(64, WIDTH, rngs=nnx.Rngs(0))

def broken():
    return {"w": jnp.zeros((2, 3)) @ jnp.zeros((2, 3))}

dense = nn.Dense(WIDTH)
made = nnx_module()
tx = optax.sgd(1.0)

def no_tx():
    raise AssertionError

def leaving():
    raise SystemExit(3)
"""


@pytest.fixture
def models(tmp_path):
    """A file of models that imports another one beside it."""
    (tmp_path / "beside.py").write_text("WIDTH = 256\n")
    (tmp_path / "later.py").write_text("NOTHING = 0\n")
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


def estimated(*arguments):
    outcome = run("estimate", *arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.output)


def test_colours_are_for_terminals_and_lines_are_not_wrapped():
    plain = run("estimate", "7.5e9", "--devices", 64).output
    colored = CliRunner().invoke(app, ["estimate", "7.5e9", "--devices", "64"], env={"FORCE_COLOR": "1"}).output
    assert "\x1b[" not in plain
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == plain == f"{estimate(7.5e9, tx=optax.adamw(1.0), devices=64)}\n"


def test_a_number_of_parameters():
    outcome = run("estimate", "7.5e9", "--devices", 64)
    assert outcome.exit_code == 0
    assert "31.4 GB" in outcome.output
    found = estimated("7.5e9", "--devices", 4, "--devices", 64, "--stage", 3)
    assert [(row["stage"], row["devices"]) for row in found["rows"]] == [(3, 4), (3, 64)]
    assert found["parameters"] == 7_500_000_000
    assert [row["total"] for row in found["rows"]] == [16 * 7_500_000_000 // 4 + 4, 16 * 7_500_000_000 // 64 + 4]


@pytest.mark.parametrize(
    ("name", "parameters"), [("params", 25_600_000), ("own", 16_640), ("nnx_module", 16_640), ("made", 16_640)]
)
def test_a_model_in_a_file(name, parameters, models):
    assert estimated(f"{models}:{name}")["parameters"] == parameters


def test_the_users_own_optimizer_precision_and_offload(models):
    rows = estimated(f"{models}:params", "--optimizer", f"{models}:tx", "--precision", "bf16", "--stage", 2)["rows"]
    assert (rows[0]["opt_state"], rows[0]["master"]) == (0, 4 * 25_600_000 // 8)
    assert estimated("1e6", "--optimizer", "lion", "--stage", 0)["rows"][0]["opt_state"] == 4 * 10**6 + 4
    for where in ("host", "disk"):
        (row,) = estimated("1e6", "--offload", where, "--stage", 3)["rows"]
        assert row[where] == 12 * 10**6 // 8
    (row,) = estimated("1e6", "--offload", "disk+params", "--stage", 3)["rows"]
    assert (row["disk"], row["read"]) == (18 * 10**6 // 8, 22 * 10**6 // 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("many",), "is no number of parameters"),
        (("-5e9",), "at least 1 is required"),
        (("nowhere.py:f",), "There is no file nowhere.py"),
        (("{models}:absent",), "does not define absent; it defines Wide, own, params, nnx_module"),
        (("{models}:broken",), "cannot be traced: TypeError"),
        (("{models}:dense",), "dense cannot be traced: "),
        (("{models}:leaving",), "models.py cannot be used: it exits with 3"),
        (("1e9", "--optimizer", "{models}:no_tx"), "no_tx fails: AssertionError"),
        (("1e9", "--devices", "0"), "at least 1"),
        (("1e9", "--stage", "7"), "Unknown ZeRO stage 7"),
        (("1e9", "--optimizer", "adamx"), "no optimizer 'adamx'"),
        (("1e9", "--optimizer", "chain"), "optax.chain(1e-3) is no optimizer: "),
        (("1e9", "--optimizer", "cosine_decay_schedule"), "Give one that needs only a learning rate"),
        (("1e9", "--optimizer", "{models}:own"), "own is a dict, which lacks the init and update"),
        (("1e9", "--precision", "int8"), "Give one of fp32, bf16, fp16"),
        (("1e9", "--offload", "tape"), "'host', 'disk', not 'tape'"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, models):
    filled = [x.replace("{models}", str(models)) for x in arguments]
    assert message in refused("estimate", *(["--"] if filled[0].startswith("-") else []), *filled)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('a result'); raise SystemExit(3)", "cannot be used: it exits with 3"),
        ("raise SystemExit('no data')", "cannot be used: no data"),
        ("import nothing_of_the_sort", "cannot be run: ModuleNotFoundError: No module named 'nothing_of_the_sort'"),
    ],
)
def test_a_file_that_fails_says_why_and_not_what_it_printed(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text)
    outcome = run("estimate", f"{tmp_path}/bad.py:f")
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"zerojax: {tmp_path}/bad.py {said}")


def test_json_is_all_that_is_printed(tmp_path, capfd):
    """Also beside a file that writes past Python, and where something is wrong."""
    (tmp_path / "noisy.py").write_text("import os\nos.write(1, b'noise')\n")
    outcome = run("estimate", f"{tmp_path}/noisy.py:absent", "--json")
    assert json.loads(outcome.stdout)["error"].startswith(f"{tmp_path}/noisy.py does not define")
    assert capfd.readouterr() == ("", "noise")


def test_a_wrong_use_is_json_where_that_is_wanted(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax", "verify", "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out)["error"].startswith("Missing argument")


@pytest.mark.slow
def test_the_doctor_passes_a_healthy_machine(tmp_path):
    outcome = run("doctor", "--path", tmp_path, "--json")
    assert outcome.exit_code == 0, outcome.output
    findings = json.loads(outcome.output)
    measured = {name: rate for finding in findings for name, rate in finding["measured"].items()}
    assert set(measured) >= {"device", "products", "memory", "link", "host_link"}
    assert min(measured["products"]["bf16"], measured["memory"], measured["link"], measured["host_link"]) > 0
    with pytest.raises(ValueError, match="measured on 'cpu', and this plan is for h200"):
        Rates.parse(measured).of(Topology.parse("h200:8"))
    results = {finding["name"]: finding["result"] for finding in findings}
    assert results["devices"] == "8 x cpu (cpu)"
    assert "pinned_host" in results["memory kinds"]
    assert "B/s each way per device" in results["link and host memory"]
    assert results["update on the host"] == "correct, in pinned_host memory"
    assert results["offloaded activations"] == "supported here"
    assert "B/s" in results[f"disk at {tmp_path}"]
    assert "tokens per step" in results[f"disk at {tmp_path}"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_doctor_names_what_is_wrong(tmp_path, monkeypatch):
    def wrong(device):
        raise RuntimeError("gradients differ")

    monkeypatch.setattr(doctor, "offloaded_activations", wrong)
    monkeypatch.setattr(doctor, "bandwidths", lambda: "1 GB/s")
    monkeypatch.setattr(doctor, "version_of", {"jaxlib": "0.12.0", "jax-cuda13-plugin": "0.11.2"}.get)
    outcome = run("doctor", "--path", tmp_path / "nowhere")
    assert outcome.exit_code == 1
    bad = [line for line in outcome.output.splitlines() if line.startswith("BAD")]
    assert [line.split()[1] for line in bad] == ["jax-cuda13-plugin", "offloaded", "disk"]
    assert "0.11.2, but jaxlib is 0.12.0: install the same version" in bad[0]
    assert "RuntimeError: gradients differ" in bad[1]


@pytest.mark.parametrize(
    ("platform", "kind", "jaxlib", "found"),
    [
        ("cuda", "pinned_host", "0.11.1", r"openxla/xla#46231.*Install jaxlib 0\.11\.2 or newer"),
        ("other", "unpinned_host", "0.12.0", "memory kinds unpinned_host, not pinned_host"),
        ("cuda", "pinned_host", "0.12.0rc1", None),
        ("tpu", "pinned_host", "0.10.2", None),
    ],
)
def test_the_doctor_knows_where_activations_can_be_offloaded(platform, kind, jaxlib, found, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", {"jaxlib": jaxlib}.get)
    device = SimpleNamespace(platform=platform, addressable_memories=lambda: [SimpleNamespace(kind=kind)])
    with contextlib.nullcontext() if found is None else pytest.raises(RuntimeError, match=found):
        assert doctor.offloaded_activations(device) == "supported here"


def test_the_doctor_says_when_a_disk_of_parameters_is_the_limit(tmp_path, monkeypatch):
    """Adam moves 40 bytes per float32 parameter: 8 + 16 are read, and 16 are written."""
    monkeypatch.setattr(doctor, "chunk_bandwidths", lambda path: (2e9, 1e9))
    said = doctor.disk_bandwidth(tmp_path)
    assert "writes 2 GB/s, reads 1 GB/s" in said
    assert "takes 32 s or more per billion parameters" in said  # 24 s of reads, 8 s of writes
    assert "below 4,000 tokens per step for each TFLOP/s" in said  # 32 s of 8 FLOPs per parameter and token


def test_a_time_is_the_median_of_the_rounds_after_a_warm_up(monkeypatch):
    clock = iter([0, 1, 1, 3, 3, 103, 103, 107, 107, 115])  # 1, 2, 100, 4 and 8 seconds
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    calls = []
    assert doctor.timed(lambda: calls.append(1)) == 4
    assert len(calls) == 6


def test_bandwidths_count_the_bytes_of_each_device(monkeypatch):
    monkeypatch.setattr(doctor, "ELEMENTS", 1 << 10)
    monkeypatch.setattr(doctor, "timed", lambda work: work() is None or 2.0)
    assert doctor.bandwidths()[1] == {"host_link": 4 * 1024 / 2}
    assert "6.14 kB/s of host memory" in doctor.bandwidths()[0]


def test_the_doctor_does_not_wait_long_for_a_slow_disk(tmp_path, monkeypatch):
    written, write = [], doctor.DiskStore.write
    monkeypatch.setattr(doctor.DiskStore, "write", lambda *args, **given: (written.append(1), write(*args, **given)))
    monkeypatch.setattr(doctor, "MOST_SECONDS", 0)
    assert min(doctor.chunk_bandwidths(tmp_path)) > 0
    assert len(written) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nonsense", "No such command 'nonsense'."),
        ("estimate", "Missing argument 'MODEL'."),
        ("estimate -7e9", "No such option: -7."),
        ("estimate 7e9 --stage x", "Invalid value for '--stage'"),
    ],
)
def test_a_wrong_use_is_one_line_too(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zerojax: {said}")
    assert line.endswith(". See zerojax --help.")


def test_help_is_what_nothing_gives(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["zerojax"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "estimate" in capsys.readouterr().out
