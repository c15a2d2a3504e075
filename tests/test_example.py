"""The main job: the example trains on real text, at any stage, and leaves its table and pictures."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "train_gpt.py"
SMALL = "--steps 4 --width 32 --layers 2 --heads 2 --batch 8 --seq 32".split()


def train(folder, *options):
    """What the example prints."""
    command = [sys.executable, str(EXAMPLE), "--out", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def bits(printed):
    return float(re.search(r"Held out: ([\d.]+) bits per byte", printed).group(1))


@pytest.mark.parametrize(("stage", "devices"), [(2, 8), (3, 2)])
def test_it_trains_a_little_and_draws_its_pictures(stage, devices, tmp_path):
    printed = train(tmp_path, "--stage", str(stage), "--devices", str(devices), *SMALL)
    assert 0 < bits(printed) < 9
    for part in ("parameters", "gradients", "optimizer"):
        assert part in printed
    for picture in ("loss.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_every_stage_learns_the_same(tmp_path):
    found = [bits(train(tmp_path, "--stage", str(stage), "--devices", "8", *SMALL)) for stage in (0, 3)]
    assert found[0] == pytest.approx(found[1], abs=2e-3)  # printed to three digits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stage", "4"), "invalid choice"),
        (("--steps", "0"), "at least 1"),
        (("--devices", "3"), "does not divide"),
        (("--data", "nowhere.txt"), "not a file"),
    ],
)
def test_bad_options_are_one_readable_line(options, message, tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        train(tmp_path, *options)
    assert message in failed.value.stderr
    assert "Traceback" not in failed.value.stderr


@pytest.mark.slow
def test_the_default_run_learns_the_standard_library(tmp_path):
    assert bits(train(tmp_path)) < 2.5
