"""Files of a checkpoint, and of safetensors, that were changed are refused by name, or restored right.

`ZEROJAX_CHANGES=100000 ZEROJAX_SEED=1 pytest -m slow tests/faults/test_fuzz.py` makes as many, from that seed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHANGES = int(os.environ.get("ZEROJAX_CHANGES", "150"))
SEED = int(os.environ.get("ZEROJAX_SEED", "1"))


@pytest.mark.slow
def test_changed_files_are_refused_or_restored(tmp_path):
    print(f"ZEROJAX_SEED={SEED}")
    command = [sys.executable, Path(__file__).parent / "fuzz.py", tmp_path, str(SEED), str(CHANGES)]
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        command, timeout=1200, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]  # a crash
    assert f"\n{CHANGES} changes, 0 wrong" in f"\n{done.stdout}", done.stdout
