"""Several processes of one run, each of which calls a function of the tests."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time

import jax


def start(work, *args, processes=2, devices=2, flags=""):
    """Processes that call `work` with the arguments as text, each with its own devices. `flags` are further of XLA."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices} {flags}"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **paths, "XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, __file__, work.__module__, work.__name__, *map(str, [*args, port, processes])]
    options = {"env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [subprocess.Popen([*command, str(i)], **options) for i in range(processes)]


def run(work, *args, **options):
    """What each process prints until it ends without an error."""
    ended = [(child, *child.communicate(timeout=600)) for child in start(work, *args, **options)]
    for child, _, errors in ended:
        assert not child.returncode, errors[-3000:]
    return [out for _, out, _ in ended]


def printed(out):
    """The JSON that a process printed; Gloo prints, too."""
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def try_cases(cases):
    """Call functions one after the other, and print what each raises, and after how long."""
    for case in cases:
        begun, said = time.monotonic(), ""
        try:
            case()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": case.__name__, "said": said, "seconds": time.monotonic() - begun}), flush=True)


def by_case(outs):
    """What each process printed of its cases, by their names."""
    return [{line["case"]: line for line in printed(out)} for out in outs]


if __name__ == "__main__":
    module, function, *args, port, processes, process = sys.argv[1:]
    if int(processes) > 1:
        jax.distributed.initialize(f"localhost:{port}", num_processes=int(processes), process_id=int(process))
    getattr(importlib.import_module(module), function)(*args)
