"""One process with eight devices and four with two train to the same numbers, and read each other's checkpoints."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from conftest import HELPERS

LAYOUTS = {"1x8": (), "4x2": ("1x8",), "again": ("4x2",)}  # which others' are restored
STEPS, SAVED = 20, 15


def run(folder, name, others):
    """What the first process of a layout said, by stage and view."""
    processes = {"4x2": 4}.get(name, 1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = f"--xla_force_host_platform_device_count={8 // processes} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, HELPERS / "process_layouts_child.py", str(processes)]
    options = {"env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    rest = [port, folder / name, *(folder / other for other in others)]
    children = [subprocess.Popen([*command, str(i), *rest], **options) for i in range(processes)]
    said = []
    for one in children:
        out, errors = one.communicate(timeout=900)
        assert one.returncode == 0, errors
        said.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
    assert all(lines == said[0] for lines in said), "the processes do not say the same"
    return {line["name"]: line for line in said[0]}


@pytest.mark.slow
def test_every_layout_trains_alike_and_goes_on_from_the_others_checkpoints(tmp_path):
    found = {name: run(tmp_path, name, others) for name, others in LAYOUTS.items()}
    assert list(found["1x8"]) == ["global-3", "device-1"]
    for name, one in found["1x8"].items():
        assert len(one["losses"]) == STEPS
        assert one["losses"][-1] < 0.9 * one["losses"][0]
        several = found["4x2"][name]  # the same programs on the same devices; gloo sums in another order
        np.testing.assert_allclose(several["losses"], one["losses"], rtol=2e-6, err_msg=name)
        np.testing.assert_allclose(several["weights"], one["weights"], rtol=1e-5, err_msg=name)
    losses = found["1x8"]["global-3"]["losses"][SAVED:]
    for layout, others in LAYOUTS.items():
        restored = found[layout]["global-3"]["restored"]
        assert set(restored) == set(others)
        for other, again in restored.items():
            np.testing.assert_allclose(again, losses, rtol=2e-6, err_msg=f"{layout} from {other}")
