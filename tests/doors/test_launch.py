"""`zerojax launch` and the launchers of the examples: a run whose processes are killed equals an uninterrupted run."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import refused

README = Path(__file__).parents[2] / "README.md"
LAUNCH = README.parent / "examples" / "launch"
STEPS, BATCH = 30, 24  # rows that 8, 6 and 4 devices divide


def launch(program, *options, stderr=subprocess.STDOUT):
    """Start `zerojax launch`, which hears Ctrl-C even if a shell started the tests in the background."""
    command = [sys.executable, "-c", HEARS, "launch", program, *options]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    return subprocess.Popen([*map(str, command)], env=environment, text=True, stdout=subprocess.PIPE, stderr=stderr)


HEARS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("zerojax", run_name="__main__")
"""


@pytest.fixture
def launched(tmp_path):
    """Run a program to its end; return the exit status, the sorted lines of its processes, and the launcher's."""

    def run(source, *options):
        program = tmp_path / "program.py"
        program.write_text(source)
        out, err = (running := launch(program, *options, stderr=subprocess.PIPE)).communicate(timeout=120)
        own = [line for line in err.splitlines() if line.startswith("zerojax: ")]
        lines = sorted({*out.splitlines(), *err.splitlines()} - {*own})
        return running.returncode, lines, [line for line in own if "process ids" not in line]

    return run


def test_a_plain_initialize_joins_the_processes_and_their_lines_are_told_apart(launched):
    program = """
import sys, jax
jax.distributed.initialize()
print(sys.argv[1:], jax.process_index(), jax.process_count(), jax.local_device_count())
sys.stderr.write("no newline")
"""
    status, lines, _ = launched(program, "--processes", 2, "--devices", 3, "--", "--stage", "1")
    assert (status, lines[::2]) == (0, ["[0] ['--stage', '1'] 0 2 3", "[1] ['--stage', '1'] 1 2 3"])
    assert lines[1::2] == ["[0] no newline", "[1] no newline"]


FAILS = """
import os, signal, sys, time
print(os.environ["OMPI_COMM_WORLD_SIZE"])
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else sys.exit(int(sys.argv[1]))
elif os.environ["OMPI_COMM_WORLD_SIZE"] != "1":
    time.sleep(300)
"""


def test_a_failure_ends_the_other_processes_and_gives_the_exit_status(launched):
    assert launched(FAILS, "--", "7")[::2] == (7, ["zerojax: process 1 exited with status 7"])
    assert launched(FAILS, "--", "killed")[::2] == (137, ["zerojax: process 1 was ended by SIGKILL"])


def test_a_restart_after_a_kill_has_one_process_fewer_and_after_an_error_as_many(launched):
    status, lines, own = launched(FAILS, "--processes", 2, "--restarts", 3, "--", "killed")
    assert (status, "[0] 1" in lines, "[1] 1" in lines) == (0, True, False)
    assert own == ["zerojax: process 1 was ended by SIGKILL", "zerojax: restart 1 of 3 on 1 process"]
    status, _, own = launched(FAILS, "--processes", 2, "--restarts", 1, "--", "7")
    assert (status, own[1]) == (7, "zerojax: restart 1 of 1 on 2 processes")


def test_a_program_that_does_not_join_is_refused(launched):
    program = "import optax, zerojax\nzerojax.zero_shard(optax.sgd(1.0), stage=3)"
    status, lines, _ = launched(program, "--devices", 1)
    assert status == 1
    assert any("zerojax launch started 2 processes, but JAX has 1" in line for line in lines)


@pytest.mark.slow
def test_the_readmes_program_needs_two_changes_for_several_processes(launched, tmp_path, monkeypatch):
    program, printed = re.findall(r"^```(?:python|text)\n(.*?)^```$", README.read_text(), re.M | re.S)[-2:]
    program = program.replace("\nfrom", "\njax.distributed.initialize()\nfrom", 1)
    program = program.replace(", tx), start", ', tx, rows="global"), start')
    monkeypatch.chdir(tmp_path)
    status, lines, _ = launched(program, "--devices", 4)
    said = [f"[{i}] {line}" for i in (0, 1) for line in printed.splitlines()]
    assert (status, [line for line in lines if "loss" in line]) == (0, said)


def test_the_launcher_does_not_import_jax_and_names_a_missing_program():
    code = "import sys, zerojax.cli, zerojax.launcher; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "nothing.py: there is no such file" in refused("launch", "nothing.py")


def train(out, processes, devices):
    options = ["--steps", STEPS, "--batch", BATCH, "--save-every", 3, "--out", out, "--data", __file__]
    layout = ["--processes", processes, "--devices", devices, "--grace", 2, "--restarts", 10]
    return launch(LAUNCH / "train.py", *layout, "--", *options)


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", text)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = train(tmp_path_factory.mktemp("one"), 1, 8)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out
    assert [*losses(out)] == [*range(1, STEPS + 1)]
    return losses(out)


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_goes_on_with_those_that_are_left(tmp_path, uninterrupted):
    seed = int(os.environ.get("ZEROJAX_SEED", "1"))
    rng, run, found, begun, text = random.Random(seed), train(tmp_path, 4, 2), {}, [], ""
    kills = [rng.randint(2, 8), rng.randint(10, 16)]  # after these steps
    killed = list(kills)
    for line in run.stdout:
        text += line
        if match := re.search(r"from step (\d+) on (\d+) processes", line):
            begun.append(tuple(map(int, match.groups())))
        if pids := re.findall(r"\d+", line) if line.startswith("zerojax: process ids") else []:
            processes = [int(pid) for pid in pids]
        for step, loss in losses(line).items():
            found.setdefault(step, []).append(loss)
            if kills and step >= kills[0]:
                kills.pop(0)
                time.sleep(rng.uniform(0, 0.3))
                os.kill(rng.choice(processes), signal.SIGKILL)
    assert run.wait(60) == 0, text
    assert [count for _, count in begun] == [4, 3, 2], f"seed {seed}: {text}"
    assert begun[0][0] == 0
    for after, (start, _) in zip(killed, begun[1:], strict=True):
        assert start >= after - 5, f"seed {seed}: a checkpoint was lost: {text}"  # every third step is saved
    assert [*sorted(found)] == [*range(1, STEPS + 1)]
    for step, values in found.items():
        for loss in values:  # of steps that were done again, too; float32 sums over other numbers of devices
            assert loss == pytest.approx(uninterrupted[step], rel=2e-5), f"seed {seed}: step {step}"


SLEEPS = "import pathlib, sys, time; pathlib.Path(sys.argv[1], str(time.monotonic_ns())).touch(); time.sleep(300)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_the_launcher(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    begun = tmp_path / "begun"
    begun.mkdir()
    run = launch(tmp_path / "sleeps.py", "--restarts", 2, "--", begun)
    processes = [int(pid) for pid in re.findall(r"\d+", run.stdout.readline())]
    assert len(processes) == 2
    wait_until(lambda: len(list(begun.iterdir())) == 2)
    run.send_signal(number)
    assert run.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not any(map(is_alive, processes)))
    assert len(list(begun.iterdir())) == 2, "the launcher started them again"


def wait_until(condition, seconds=30):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds
        time.sleep(0.05)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_manifest_starts_as_many_processes_as_it_says():
    *_, jobset = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] > 1
    container = job["template"]["spec"]["containers"][0]
    assert container["command"][-1].endswith("train.py")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_the_slurm_script_is_one_of_bash_and_starts_a_process_a_host():
    script = LAUNCH / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert re.search(r"#SBATCH --ntasks-per-node=1\n", script.read_text())
    assert "--requeue" in script.read_text()
