"""Start the processes of a run on this host, and start them again after one has died.

The processes get the variables of Open MPI's `mpirun` that JAX reads. So a program that calls
`jax.distributed.initialize()` without arguments joins the other processes, as it does under Slurm or Kubernetes.
"""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from subprocess import DEVNULL, PIPE, Popen
from typing import BinaryIO


def run_processes(command: Sequence[str], count: int, *, devices: int | None, restarts: int, grace: float) -> int:
    """Run a command in several processes until all of them have ended. If one fails, end the remaining ones.

    A killed process stands for a lost host: for each, a restart has one process fewer. After any other failure, a
    restart has as many processes as before. SIGTERM, SIGHUP and Ctrl-C end the run without a restart. The result is the
    exit status that the command `zerojax launch` documents.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `zerojax launch ... | head` ends the run
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # as Ctrl-C does, through `finally`
    for attempt in range(restarts + 1):
        if attempt:
            announce(f"restart {attempt} of {restarts} on {count} process{'' if count == 1 else 'es'}")
        statuses = run_once(command, count, devices, grace)
        if not any(statuses):
            return 0
        count = max(1, count - statuses.count(-signal.SIGKILL))
    first = next(filter(None, statuses))
    return first if first > 0 else 128 - first


def run_once(command: Sequence[str], count: int, devices: int | None, grace: float) -> list[int]:
    """Run the processes until all have ended or one has failed. Return the statuses of all at this moment."""
    tie = functools.partial(end_with, os.getpid(), ctypes.CDLL(None)) if sys.platform == "linux" else None
    # In its own group, a process does not get the Ctrl-C of a terminal, which is for the launcher.
    start = functools.partial(Popen, command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, process_group=0, preexec_fn=tie)
    processes: list[Popen[bytes]] = []
    readers: list[threading.Thread] = []
    shared = shared_environment(count, devices)
    try:
        for index in range(count):
            ranks = {"OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_LOCAL_RANK": str(index)}
            processes.append(start(env=shared | ranks))
        announce("process ids " + " ".join(str(one.pid) for one in processes))
        for index, one in enumerate(processes):  # after all forks, because a process with threads should not fork
            for source, sink in ((one.stdout, sys.stdout.buffer), (one.stderr, sys.stderr.buffer)):
                readers.append(threading.Thread(target=copy_lines, args=(source, sink, index), daemon=True))
                readers[-1].start()
        while not any(one.poll() for one in processes) and any(one.returncode is None for one in processes):
            time.sleep(0.05)
        statuses = [one.returncode or 0 for one in processes]
        for index, status in enumerate(statuses):  # before the other processes complain about this one
            if status:
                how = f"exited with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
                announce(f"process {index} {how}")
        return statuses
    finally:
        end(processes, grace)
        for reader in readers:
            reader.join(5)  # with a limit, because a daemon that the program started may hold the pipe open


def shared_environment(count: int, devices: int | None) -> dict[str, str]:
    """Return the environment of all processes, without their ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    simulated = {} if devices is None else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return {
        **(os.environ | simulated),
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # by default, JAX listens on all network interfaces
        "OMPI_MCA_orte_hnp_uri": "zerojax launch",  # JAX only looks whether it is set
        "OMPI_COMM_WORLD_SIZE": str(count),
        "ZEROJAX_PROCESSES": str(count),
        "PYTHONUNBUFFERED": "1",  # otherwise Python prints to a pipe only when its buffer is full
    }


def copy_lines(source: BinaryIO, sink: BinaryIO, index: int) -> None:
    for line in source:
        sink.write(b"[%d] %s\n" % (index, line.rstrip(b"\n")))  # one write, so that lines are not mixed
        sink.flush()


def end(processes: Sequence[Popen[bytes]], grace: float) -> None:
    """Send SIGTERM to all processes. After `grace` seconds or a signal, send SIGKILL to those that still run."""
    limit = time.monotonic() + grace
    try:
        for one in processes:
            one.terminate()
        while any(one.poll() is None for one in processes) and time.monotonic() < limit:
            time.sleep(0.05)
    finally:
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def end_with(launcher: int, libc: ctypes.CDLL) -> None:
    """Let Linux kill this process when the launcher ends. Called in each process before its program."""
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != launcher:
        os._exit(1)  # the launcher had ended before


def check_joined() -> None:
    """Raise an error if `zerojax launch` started this process with others, but JAX does not know them."""
    import jax

    count = os.environ["ZEROJAX_PROCESSES"]
    if count != "1" and jax.process_count() == 1:
        raise ValueError(
            f"zerojax launch started {count} processes, but JAX has 1, so each process would train alone. Call "
            f"jax.distributed.initialize() right after importing jax."
        )


def announce(text: str) -> None:
    print(f"zerojax: {text}", file=sys.stderr, flush=True)
