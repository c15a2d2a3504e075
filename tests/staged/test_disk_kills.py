"""Runs with parameters on disk that are killed at random moments, and go on from their checkpoints bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from conftest import HELPERS

KILLS, STEPS = 8, 3
CHILD = HELPERS / "disk_child.py"


class Template:
    """A process that has imported everything, and forks a process for each run."""

    def __init__(self, folder):
        environment = {
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "PYTHONPATH": os.pathsep.join([str(HELPERS), str(HELPERS.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self._errors = (folder / "errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, CHILD],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def run(self, folder, steps=STEPS, moment=-1, delay=0.0, is_reference=0):
        """The lines that a run printed, until it ended, or was killed some time after the transfer `moment`."""
        self._process.stdin.write(f"{folder} {steps} {moment} {is_reference}\n")
        self._process.stdin.flush()
        lines, wanted, pid = [], 0, None
        for line in self._process.stdout:
            match line.split():
                case ["pid", number]:
                    pid = int(number)
                case ["now"]:
                    time.sleep(delay)
                    os.kill(pid, signal.SIGKILL)
                    wanted = -signal.SIGKILL
                case ["ended", status]:
                    self._errors.seek(0)
                    assert int(status) == wanted, self._errors.read()[-3000:]
                    return lines
                case words:
                    lines.append(words)
        raise AssertionError("the template ended")

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


@pytest.fixture
def template(tmp_path):
    template = Template(tmp_path)
    yield template
    template.close()


def digests_of(lines):
    """The digest of each state that a run printed, by its step."""
    return {int(words[1]): words[2] for words in lines if words[0] == "digest"}


@pytest.mark.slow
def test_a_run_that_is_killed_eight_times_is_restored_exactly_each_time(template, tmp_path):
    """Moments are spread evenly over the transfers of three steps and their checkpoints, and their order is random."""
    wanted = digests_of(template.run(tmp_path / "straight", steps=KILLS * STEPS, is_reference=1))
    _, transfers, seconds = template.run(tmp_path / "saved")[-1]
    draw, per_kill = random.Random(0), int(transfers) / KILLS
    moments = [int((i + draw.random()) * per_kill) for i in range(KILLS)]
    draw.shuffle(moments)
    phases = []
    for moment in moments:
        delay = draw.uniform(0, float(seconds) / int(transfers))
        # One step more, so that a kill that comes late does not miss the run.
        lines = template.run(tmp_path / "killed", steps=STEPS + 1, moment=moment, delay=delay)
        restored, names = digests_of(lines), [words[0] for words in lines]
        assert len(restored) == 1
        assert restored.items() <= wanted.items()
        phases.append((moment, names.count("passes"), names[-1]))
    assert digests_of(template.run(tmp_path / "killed")).items() <= wanted.items()
    assert {step for _, step, _ in phases} >= set(range(1, STEPS + 1))
    print(*(f"\ntransfer {moment} of {transfers}: step {step}, {phase}" for moment, step, phase in sorted(phases)))
