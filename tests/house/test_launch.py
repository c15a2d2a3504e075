"""The launchers of the examples: a run on several processes, of which some are killed, is the uninterrupted one."""

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

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
STEPS, BATCH = 30, 24  # rows that 8, 6, 4 and 2 devices divide
pytestmark = pytest.mark.slow


def local(out, processes, devices):
    options = ["--steps", str(STEPS), "--batch", str(BATCH), "--save-every", "3", "--out", str(out), "--data", __file__]
    layout = ["--processes", str(processes), "--devices", str(devices), "--grace", "2"]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, LAUNCH / "local.py", *layout, "--", *options]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def losses(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", text)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = local(tmp_path_factory.mktemp("one"), 1, 8)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 0, out
    assert [*losses(out)] == [*range(1, STEPS + 1)]
    return losses(out)


def test_a_run_whose_processes_are_killed_goes_on_with_those_that_are_left(tmp_path, uninterrupted):
    seed = int(os.environ.get("ZEROJAX_SEED", "1"))
    rng, run, found, begun, text = random.Random(seed), local(tmp_path, 3, 2), {}, [], ""
    kills = [rng.randint(2, 8), rng.randint(10, 16)]  # after these steps
    killed = list(kills)
    for line in run.stdout:
        text += line
        if match := re.search(r"from step (\d+) on (\d+) processes", line):
            begun.append(tuple(map(int, match.groups())))
        if pids := re.findall(r"\d+", line) if line.startswith("local: processes") else []:
            processes = [int(pid) for pid in pids]
        for step, loss in losses(line).items():
            found.setdefault(step, []).append(loss)
            if kills and step >= kills[0]:
                kills.pop(0)
                time.sleep(rng.uniform(0, 0.3))
                os.kill(rng.choice(processes), signal.SIGKILL)
    assert run.wait(60) == 0, text
    assert [count for _, count in begun] == [3, 2, 1], f"seed {seed}: {text}"
    assert begun[0][0] == 0
    for after, (start, _) in zip(killed, begun[1:], strict=True):
        assert start >= after - 5, f"seed {seed}: a checkpoint was lost: {text}"  # every third step is saved
    assert [*sorted(found)] == [*range(1, STEPS + 1)]
    for step, values in found.items():
        for loss in values:  # of steps that were done again, too; float32 sums over other numbers of devices
            assert loss == pytest.approx(uninterrupted[step], rel=2e-5), f"seed {seed}: step {step}"


SLEEPS = "import pathlib, sys, time; pathlib.Path(sys.argv[1], str(time.monotonic_ns())).touch(); time.sleep(300)"
# A job that a shell started in the background ignores Ctrl-C, and its children do.
HEARS = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_the_launcher(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    begun = tmp_path / "begun"
    begun.mkdir()
    command = [sys.executable, "-c", HEARS, LAUNCH / "local.py", "--program", tmp_path / "sleeps.py", "--", str(begun)]
    run = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    processes = [int(pid) for pid in re.findall(r"\d+", run.stdout.readline())]
    assert len(processes) == 2
    wait_until(lambda: len(list(begun.iterdir())) == 2)
    run.send_signal(number)
    assert run.wait(30) not in (0, None)
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
    (jobset,) = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
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
