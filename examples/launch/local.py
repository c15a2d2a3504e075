"""Start a program on several processes of this machine, and restart it on fewer if a process is killed.

    python examples/launch/local.py --processes 2 --devices 4
    python examples/launch/local.py --processes 4 --devices 2 -- --stage 1 --steps 50

Arguments after `--` are passed to the program, which is `train.py` in this folder unless `--program` names another. A
killed process stands for a host that fails: the other processes are ended, and the run restarts from its last
checkpoint on one process fewer. If a process ends with any other error, the run restarts on as many processes.

SIGTERM, SIGHUP and Ctrl-C are passed on, and end the run. The processes end with this launcher: if it is killed, the
Linux kernel kills them.
"""

import argparse
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def main() -> int:
    args = options()
    count = args.processes
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    for attempt in range(args.restarts + 1):
        statuses = run(args, count)
        if not any(statuses):
            return 0
        count = max(1, count - sum(status == -signal.SIGKILL for status in statuses))
        print(f"local: ended with {statuses}; restart {attempt + 1} on {count} processes", flush=True)
    return 1


def run(args: argparse.Namespace, count: int) -> list[int]:
    """The exit statuses of all processes, the others ended once one has failed; those we ended count as 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    shared = {**os.environ, "ZEROJAX_COORDINATOR": coordinator, "ZEROJAX_PROCESSES": str(count), "XLA_FLAGS": flags}
    command = [sys.executable, str(args.program), *args.rest]
    follow = functools.partial(end_with, os.getpid(), libc()) if sys.platform == "linux" else None
    processes: list[subprocess.Popen] = []
    try:
        for index in range(count):
            environment = {**shared, "ZEROJAX_PROCESS": str(index)}
            processes.append(subprocess.Popen(command, env=environment, preexec_fn=follow))
        print(f"local: processes {[one.pid for one in processes]}", flush=True)
        while all(one.poll() is None or one.returncode == 0 for one in processes):
            if all(one.returncode == 0 for one in processes):
                return [0] * count
            time.sleep(0.05)
        # what failed first, before the others fail for its sake
        return [one.poll() or 0 for one in processes]
    finally:
        end(processes, args.grace)


def leave(number: int, frame: object) -> None:
    """Let a signal end the launcher as Ctrl-C does: by way of `finally`."""
    signal.signal(number, signal.SIG_IGN)  # once is enough
    sys.exit(128 + number)


def libc() -> ctypes.CDLL:
    """Load the C library, in the launcher: a process that was just forked should load nothing."""
    return ctypes.CDLL(None, use_errno=True)


def end_with(launcher: int, library: ctypes.CDLL) -> None:
    """Ask the kernel to kill this process when the launcher ends; called in each process before its program."""
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before
        os._exit(1)


def end(processes: list[subprocess.Popen], grace: float) -> None:
    """Ask the processes that still run to end; those that have not after so many seconds are ended."""
    for one in processes:
        one.terminate()
    limit = time.monotonic() + grace
    for one in processes:
        try:
            one.wait(max(0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--devices", type=int, default=4, help="simulated devices per process (default: %(default)s)")
    parser.add_argument("--restarts", type=int, default=10, help="number of restarts (default: %(default)s)")
    parser.add_argument("--grace", type=float, default=10, help="seconds for the others to end (default: %(default)s)")
    parser.add_argument("--program", type=Path, default=Path(__file__).parent / "train.py", help="(default: train.py)")
    parser.add_argument("rest", nargs="*", help="options of the program, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
