"""Runs that are killed, interrupted and given bad disks at random instants: nothing is lost, or falsely reported.

`ZEROJAX_FAULTS=2000 ZEROJAX_SEED=1 pytest -m slow tests/faults/test_faults.py` does as many rounds, from that seed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("ZEROJAX_FAULTS", "200"))
SEED = int(os.environ.get("ZEROJAX_SEED", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("way", ["device", "host", "disk"])
def test_a_disturbed_run_is_the_uninterrupted_one(tmp_path, way, processes):
    rounds = -(-ROUNDS * (3 - processes) // 9)  # those of two take twice as long
    program = Path(__file__).parent / "lives.py"
    command = [sys.executable, program, tmp_path, way, str(processes), str(SEED), str(rounds)]
    done = subprocess.run(command, timeout=1200 + 10 * rounds, capture_output=True, text=True, check=False)
    print(f"ZEROJAX_SEED={SEED}\n{done.stdout}")
    print(done.stderr, file=sys.stderr)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith(" 0 wrong\n")
