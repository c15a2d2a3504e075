"""Benchmarks that no other test runs work to their end, with models as small as they take."""

import json
import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_time_to_compile_is_measured_and_compared(tmp_path):
    given = "--model small --layers 2 --remat no --rounds 1".split()
    command = [sys.executable, "compile.py", *given, "--out", tmp_path / "compile.json"]
    subprocess.run(command, cwd=BENCHMARKS, check=True, timeout=300)
    rows = json.loads((tmp_path / "compile.json").read_text())["seconds"]
    ours = [row for row in rows if row["way"].startswith("stage")]
    assert [row["way"] for row in ours] == ["stage 3 gradient", "stage 1 step", "stage 3 step"]
    for row in ours:
        assert 0 < row["rows / trace"] < 1
        assert row["least"] == row["both / plain"] == row["most"] > 0
        assert row["processor s"] > 0
