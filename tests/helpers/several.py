"""Several processes of one run: a script of this folder or by its path gets its arguments, a port and its number."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def start(script, *args, processes=2, devices=2, flags=""):
    """Processes that begin, each with its own devices. `flags` are further ones of XLA."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} {flags}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, args), str(port)]
    options = {"env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [subprocess.Popen([*command, str(i)], **options) for i in range(processes)]


def run(script, *args, **options):
    """What each process prints until it ends without an error."""
    ended = [(child, *child.communicate(timeout=600)) for child in start(script, *args, **options)]
    for child, _, errors in ended:
        assert not child.returncode, errors[-3000:]
    return [out for _, out, _ in ended]
