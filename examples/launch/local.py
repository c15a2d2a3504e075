"""Start a program on several processes of this machine, and again with one fewer when one of them dies.

    python examples/launch/local.py --processes 2 --devices 4
    python examples/launch/local.py --processes 4 --devices 2 -- --stage 1 --steps 50

What follows `--` is for the program, `train.py` beside this file unless `--program` names another. A process that was
killed takes its devices with it, as a host does that fails: the others are ended, and the run starts again on one
process fewer, from its last checkpoint. Any other end of a process with an error restarts it on as many.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    args = options()
    count = args.processes
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
    processes = [subprocess.Popen(command, env={**shared, "ZEROJAX_PROCESS": str(index)}) for index in range(count)]
    print(f"local: processes {[one.pid for one in processes]}", flush=True)
    try:
        while all(one.poll() is None or one.returncode == 0 for one in processes):
            if all(one.returncode == 0 for one in processes):
                return [0] * count
            time.sleep(0.05)
        # what failed first, before the others fail for its sake
        statuses = [one.poll() or 0 for one in processes]
        end(processes, args.grace)
        return statuses
    except KeyboardInterrupt:
        end(processes, args.grace)
        raise


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
    parser.add_argument("--devices", type=int, default=4, help="simulated, of each (default: %(default)s)")
    parser.add_argument("--restarts", type=int, default=10, help="how often to try again (default: %(default)s)")
    parser.add_argument("--grace", type=float, default=10, help="seconds for the others to end (default: %(default)s)")
    parser.add_argument("--program", type=Path, default=Path(__file__).parent / "train.py", help="(default: train.py)")
    parser.add_argument("rest", nargs="*", help="options of the program, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
