"""Runs, saves and files are disturbed at random: nothing is lost, falsely reported, or left behind.

`ZEROJAX_FAULTS=2000 ZEROJAX_CHANGES=100000 ZEROJAX_SAVES=2000 ZEROJAX_SEED=1 pytest -m slow tests/faults` does as many
rounds, changes and saves, from that seed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS, CHANGES, SAVES, SEED = (
    int(os.environ.get(f"ZEROJAX_{name}", default))
    for name, default in (("FAULTS", 60), ("CHANGES", 150), ("SAVES", 200), ("SEED", 1))
)
GROWTH = 8 << 20  # bytes of the second half of the saves; one state has 0.8 MB
pytestmark = pytest.mark.slow


def run(name, *args, devices=None, timeout=1200):
    flags = {} if devices is None else {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, Path(__file__).parent / f"{name}.py", *map(str, args)]
    done = subprocess.run(command, timeout=timeout, env={**os.environ, **flags}, capture_output=True, text=True)
    print(f"ZEROJAX_SEED={SEED}\n{done.stdout}")
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("way", "processes"),
    [*((way, count) for way in ("device", "host", "disk", "params") for count in (1, 2)), ("narrow", 1)],
)
def test_a_disturbed_run_is_the_uninterrupted_one(tmp_path, way, processes):
    """Killed, interrupted and given bad disks at random instants."""
    rounds = -(-ROUNDS * (3 - processes) // 9)  # those of two take twice as long
    printed = run("lives", tmp_path, way, processes, SEED, rounds, timeout=1200 + 10 * rounds)
    assert printed.endswith(" 0 wrong\n")


def test_changed_files_are_refused_or_restored(tmp_path):
    """Files of a checkpoint, and of safetensors: by name, or right."""
    assert f"\n{CHANGES} changes, 0 wrong" in f"\n{run('fuzz', tmp_path, SEED, CHANGES, devices=2)}"


def test_many_saves_leave_nothing_behind(tmp_path):
    """Memory, descriptors and threads stay flat."""
    half, full = (list(map(int, line.split())) for line in run("many_saves", tmp_path, SAVES, devices=2).splitlines())
    assert full[:2] == half[:2]
    assert full[2] <= half[2] + 1
    assert full[3] - half[3] < GROWTH
