"""The FP8 example: it learns, its checkpoint restores what it saved, and it continues."""

import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "train_fp8.py"


@pytest.mark.slow
def test_the_script_trains_restores_and_continues():
    command = [sys.executable, str(SCRIPT), "--steps", "10"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
    untrained, saved, restored, last = map(float, re.findall(r"(?<![\w.])\d+\.\d+", printed))
    assert untrained > saved == restored > last
    assert re.search(r"Gathered as: f(16|8e4m3fn)$", printed.strip())
