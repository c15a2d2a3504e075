"""Memory, descriptors and threads stay flat; `ZEROJAX_SAVES=2000 pytest -m slow tests/faults/test_many_saves.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SAVES = int(os.environ.get("ZEROJAX_SAVES", "200"))
GROWTH = 8 << 20  # of the second half; one state has 0.8 MB


@pytest.mark.slow
def test_many_saves_leave_nothing_behind(tmp_path):
    command = [sys.executable, Path(__file__).parent / "many_saves.py", tmp_path, str(SAVES)]
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=True)
    print(done.stdout)
    half, full = (list(map(int, line.split())) for line in done.stdout.splitlines())
    assert full[:2] == half[:2]
    assert full[2] <= half[2] + 1
    assert full[3] - half[3] < GROWTH
