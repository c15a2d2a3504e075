"""The main job: the example trains on real text, at any stage, and leaves its table and pictures."""

import pathlib
import re
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import optax
import pytest
import train_gpt
from conftest import mesh_of
from memory import stage_memory

from zerojax import Precision, report, zero_shard

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SMALL = "--steps 4 --width 64 --layers 2 --heads 2 --batch 8 --seq 32".split()


def train(folder, *options):
    return run("train_gpt.py", "--fresh", "--out", str(folder), *options)


def run(script, *options):
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout


def bits(printed):
    return float(re.search(r"Held out: ([\d.]+) bits per byte", printed).group(1))


def written(printed):
    """What the model wrote after "def "."""
    return re.search(r"It writes:\ndef (.*)\n\nHeld out", printed, re.S).group(1)


def parameters(printed):
    return float(re.search(r"│ 2 +│ +([\d,]+) \|", printed).group(1).replace(",", ""))


@pytest.fixture(scope="module")
def stage_0(tmp_path_factory):
    """What the example prints at stage 0 on two devices."""
    return train(tmp_path_factory.mktemp("stage_0"), "--stage", "0", "--devices", "2", *SMALL)


@pytest.mark.slow
def test_it_learns_as_at_stage_0_and_draws_its_pictures(stage_0, tmp_path):
    printed = train(tmp_path, "--stage", "3", "--devices", "2", *SMALL)
    assert bits(printed) == pytest.approx(bits(stage_0), abs=2e-3)  # printed to three digits
    assert len(written(printed)) >= 75  # of 150 bytes, several of which may be one character
    for part in ("parameters", "gradients", "optimizer"):
        assert part in printed
    for picture in ("loss.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path):
    """Stopped at one stage and gone on at another, it ends as the one that was left alone."""
    options = [*SMALL, "--steps", "40", "--save-every", "5", "--devices", "2"]
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--out", str(tmp_path / "stopped"), *options]
    with subprocess.Popen([*command, "--stage", "3"], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("stopped/checkpoints/step_*")):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    after = int(re.search(r"Stopped after step (\d+)", printed).group(1))
    assert 5 <= after < 40
    again = run("train_gpt.py", *command[2:], "--stage", "1")
    assert f"Going on from step {after}" in again
    sample = run("generate.py", *command[2:], "--stage", "2", "--bytes", "40")
    assert sample.split("def ", 1)[1][:30] == written(again)[:30]
    assert bits(again) == pytest.approx(bits(train(tmp_path / "whole", *options)), abs=2e-3)  # printed to three digits
    once_more = subprocess.run([*command, "--width", "32"], capture_output=True, text=True, timeout=300, check=False)
    assert once_more.returncode == 1
    assert "Give its options, another --out, or --fresh." in once_more.stderr
    assert "Traceback" not in once_more.stderr


@pytest.mark.slow
def test_it_learns_the_same_with_its_optimizer_state_on_disk(stage_0, tmp_path):
    printed = train(tmp_path, "--stage", "3", "--devices", "2", "--offload", "disk", *SMALL)
    assert "Optimizer state waits on disk" in printed
    assert re.search(r"│ 3 .*│ +[1-9][\d,]* │", printed)  # kB of it, in the last column
    assert list(tmp_path.glob("state/process_0/chunk_*"))
    assert bits(printed) == pytest.approx(bits(stage_0), abs=2e-3)  # printed to three digits


@pytest.mark.slow
def test_float16_and_microbatches_learn_much_the_same(stage_0, tmp_path):
    options = "--stage 2 --devices 2 --precision fp16 --accumulate 2".split()
    printed = train(tmp_path, *SMALL, *options)
    assert bits(printed) == pytest.approx(bits(stage_0), abs=1e-2)  # 11 bits are 0.05% of a logit, after four steps
    assert 2 * parameters(printed) == pytest.approx(parameters(stage_0), abs=2)  # printed in whole kB
    assert "Master weights are counted as optimizer" in " ".join(printed.split())


@pytest.mark.parametrize("precision", [Precision.fp32(), Precision.bf16()], ids=["fp32", "bf16"])
def test_the_tables_bytes_are_those_of_live_arrays_and_of_the_paper(precision, mesh):
    n = mesh.size
    paper = {4: (16, 8 + 8 / n, 4 + 12 / n, 16 / n), 2: (16, 4 + 12 / n, 2 + 14 / n, 16 / n)}[
        precision.compute.itemsize
    ]
    params = {"matrix": jnp.ones((128, 96))}  # one leaf that is cut evenly: nothing is found beyond the formula
    for stage in range(4):
        tx = zero_shard(optax.adam(1e-3), stage=stage, mesh=mesh, precision=precision)
        memory, live = stage_memory(tx, params), report(tx.create(params)).bytes
        assert sum(memory.paper.values()) == paper[stage] * params["matrix"].size
        assert memory.found["params"] == live["params"]
        assert memory.found["opt_state"] == live["opt_state"]
        sums = {0: 4, 1: precision.compute.itemsize, 2: 4 / n, 3: 4 / n}[stage]  # stage 1 holds what is not summed yet
        assert memory.found["grads"] == sums * params["matrix"].size
        beyond = memory.found["grads"] - memory.paper["grads"] if stage < 3 else 0  # at stage 3 the parts differ alone
        assert sum(memory.found.values()) - beyond == pytest.approx(sum(memory.paper.values()), abs=4)  # Adam's count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stage", "4"), "invalid choice"),
        (("--steps", "0"), "at least 1"),
        (("--devices", "3"), "does not divide"),
        (("--tensor-parallel", "3"), "--heads 4 must be a multiple of --tensor-parallel 3"),
        (("--accumulate", "3"), "does not divide over 8 devices of 3 microbatches each: give a multiple of 24"),
        (("--precision", "int8"), "invalid choice"),
        (("--offload", "host", "--stage", "0"), "needs --stage 1, 2 or 3"),
        (("--data", "nowhere.txt"), "not a file"),
    ],
)
def test_bad_options_are_one_readable_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt, "mesh_of", lambda count, _: mesh_of(count or 8))  # JAX has begun with eight
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    said = capsys.readouterr().err if ended.value.code == 2 else ended.value.code
    assert message in said.strip().splitlines()[-1]


def test_zerojax_plan_gets_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "mesh_of", lambda count, _: mesh_of(count or 8))
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--out", str(tmp_path), *SMALL])
    step, state, batch = train_gpt.make_step()
    step.trace(state, batch)


@pytest.mark.slow
def test_bfloat16_ends_where_float32_does(tmp_path):
    # The held-out loss is a mean over 64 kB, whose noise is far below 1%: nothing needs smoothing.
    size = "--steps 80 --width 64 --layers 2 --heads 2 --batch 16 --seq 64".split()
    wide = bits(train(tmp_path, "--stage", "0", *size))
    assert wide < 4  # it has learnt: 8 is knowing nothing
    narrow = bits(train(tmp_path, "--stage", "3", "--precision", "bf16", *size))
    assert narrow == pytest.approx(wide, rel=0.01)


@pytest.mark.slow
def test_the_example_in_fp8_learns_restores_what_it_saved_and_continues():
    printed = run("train_fp8.py", "--steps", "10")
    untrained, saved, restored, last = map(float, re.findall(r"(?<![\w.])\d+\.\d+", printed))
    assert untrained > saved == restored > last
    assert re.search(r"Gathered as: f(16|8e4m3fn)$", printed.strip())
