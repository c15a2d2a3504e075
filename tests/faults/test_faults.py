"""Runs that are killed, interrupted and given bad disks at random instants: nothing is lost, or falsely reported.

`ZEROJAX_FAULTS=2000 ZEROJAX_SEED=1 pytest -m slow tests/faults` does as many rounds, from that seed.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "disturbed.py"
ROUNDS = int(os.environ.get("ZEROJAX_FAULTS", "12"))
SEED = int(os.environ.get("ZEROJAX_SEED", "1"))
LIMIT_S = 300  # for what hangs
WAYS = ["device", "host", "disk"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seed():
    print(f"ZEROJAX_SEED={SEED}")
    return random.Random(SEED)


def start(folder, way, rounds, processes=1):
    """A run of one or two processes of two devices each."""
    folder.mkdir(exist_ok=True)
    flags = "--xla_force_host_platform_device_count=2"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, CHILD, folder, way, str(SEED), str(rounds), *([str(i), str(port)] * (processes > 1))],
            env={**os.environ, "XLA_FLAGS": flags},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(processes)
    ]


def begun(child):
    """The step from which a run goes on; other lines are gloo's."""
    for line in child.stdout:
        if line.startswith("begun"):
            return int(line.split()[1])
    raise AssertionError(child.stderr.read()[-3000:])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_disturbed_run_is_the_uninterrupted_one(tmp_path, way, processes):
    rounds = -(-ROUNDS // (5 * processes))
    children = start(tmp_path, way, rounds, processes)
    for child in children:
        out, error = child.communicate(timeout=LIMIT_S)
        print(out)
        assert out.endswith("done\n"), error[-3000:]
        assert child.returncode == 0


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_killed_run_goes_on_from_what_it_reported(tmp_path, way, processes, seed):
    saved = 0
    for number in range(-(-ROUNDS // (20 * processes))):
        folder = tmp_path / str(number // 8)  # before the run is at its end
        children = start(folder, way, 0, processes)
        restored, *_ = map(begun, children)
        assert number % 8 == 0 or saved <= restored <= saved + 1
        time.sleep(seed.uniform(0, 1))
        for child in seed.sample(children, processes):
            child.send_signal(signal.SIGKILL)
        lines = [child.communicate(timeout=LIMIT_S)[0].splitlines() for child in children]
        saved = max([restored, *(int(line.split()[1]) for one in lines for line in one if line.startswith("saved"))])
        print(f"kill {number}: restored {restored}, saved {saved}")
