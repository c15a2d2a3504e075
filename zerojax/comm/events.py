"""Publish the calls of each process of a run, in order, so that the other processes can read them.

Every process of a run must make the same calls in the same order: `create`, steps, evaluations, saves. If two processes
give different names to calls with the same number, their programs differ. A thread in each process publishes the
process's calls through JAX's coordination service, without devices. If a call takes too long, the thread compares it
with the calls of the other processes. A process that ends publishes the reason, which the other processes report.
"""

import atexit
import collections
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.internals import coordination_client

PERIOD_S = 1.0
MOST_PER_SECOND = 64  # messages to the coordinator from all processes together
REMEMBERED = 32  # how many of the last calls a process publishes
STUCK_S = 5.0  # a call that takes longer is compared with the calls of other processes
SILENT_S = 6.0  # after a failure, a process that publishes nothing for this time counts as dead
LAST_WORDS_S = 10.0  # how long a process that failed waits until the others end
END_S = 60.0  # how long a process that ended without error waits for the others, before JAX's shutdown waits
AGAIN = 75  # the exit status EX_TEMPFAIL of sysexits.h, which asks to try again
STATE, NOTICE = "zerojax/state", "zerojax/notice"
THE_END = "the end of the program"


@dataclasses.dataclass
class Call:
    """A call that all processes make."""

    number: int  # the number of the call in the run, from 0, or -1 if the call is not counted
    name: str  # the name of the call, such as `"step 3"`
    # whether the call ends when its `result` is ready; calls that exchange messages have a timeout instead
    watched: bool = True
    result: Any = None  # an array that the call computes, or None if the call has not dispatched it yet
    failed: bool = False  # whether the call raised an error
    begun: float = dataclasses.field(default_factory=time.monotonic)  # when the call began, by the monotonic clock

    @property
    def has_ended(self) -> bool:
        if self.failed or not self.watched:
            return True
        return self.result is not None and (self.result.is_deleted() or self.result.is_ready())


@functools.lru_cache(maxsize=64)
def is_of_all(mesh: Mesh) -> bool:
    """Return whether there are several processes, and each process has devices of the mesh."""
    if jax.process_count() == 1:
        return False
    return {getattr(device, "process_index", 0) for device in mesh.devices.flat} == set(range(jax.process_count()))


@functools.cache
def rank() -> tuple[int, int]:
    """Return the index of this process and the number of processes.

    Both are cached, because asking JAX at exit would initialise its backend again.
    """
    return jax.process_index(), jax.process_count()


def first_array(tree: Any) -> jax.Array:
    """Return the first array of a tree. When this array is ready, the program that computes the tree has ended."""
    return next((x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)), jnp.zeros(()))


class Events:
    """A record of this process's calls, such as steps. It also reads the records of the other processes."""

    def __init__(self):
        self._calls: collections.deque[Call] = collections.deque(maxlen=REMEMBERED)
        self.counted, self._beat, self.frozen = 0, 0, 0.0  # `counted` is the number of calls
        self._thread: int | None = None  # the thread whose calls are counted
        self._watcher: threading.Thread | None = None  # made by the first call, because a forked process has no threads
        self._at_end = threading.Event()
        self._said: set[int] = set()

    def __reduce__(self):
        """Pickle only the name `EVENTS`, so that a process that unpickles this object gets its own `EVENTS`."""
        return "EVENTS"

    @contextmanager
    def calling(self, name: str, mesh: Mesh | None = None) -> Iterator[Call]:
        """Count a call, and yield its `Call`, whose `result` the caller sets. All processes must give the same name.

        The call computes on `mesh`. If any process has no devices of `mesh`, the call is not counted.
        """
        counts = jax.process_count() > 1 if mesh is None else is_of_all(mesh)
        call = self.begin(name, watched=True) if counts else Call(-1, name)
        try:
            yield call
        except BaseException:
            call.failed = True
            raise

    def begin(self, name: str, *, watched: bool = False) -> Call:
        """Count a call, unless another thread made the first call. Calls of two threads have no fixed order."""
        if self._thread is None:
            self._thread = threading.get_ident()
            self._watcher = threading.Thread(target=self._watch, name="zerojax processes", daemon=True)
            self._watcher.start()
            atexit.register(self._at_exit)  # runs before JAX's function, which `import jax` has registered
        if self._thread != threading.get_ident():
            return Call(-1, name)
        call = Call(self.counted, name, watched)
        self.counted += 1
        self._calls.append(call)
        return call

    def publish(self) -> None:
        self._beat += 1
        state = json.dumps({"beat": self._beat, "frozen": self.frozen, "calls": self._names()})
        coordination_client().key_value_set(f"{STATE}/{rank()[0]}", state, True)

    def others(self) -> dict[int, dict[str, Any]]:
        """Return the last state of each other process, with `beat`, `frozen` (in seconds), and `calls` by number."""
        found = _read(STATE)
        return {i: one | {"calls": {int(n): name for n, name in one["calls"].items()}} for i, one in found.items()}

    def difference(self) -> str:
        """Describe the first call that differs between this process and another process, or return an empty string."""
        mine = self._names()
        theirs = [(n, index, name) for index, other in self.others().items() for n, name in other["calls"].items()]
        differing = [(n, index, name) for n, index, name in theirs if mine.get(n, name) != name]
        if not differing:
            return ""
        number, index, name = min(differing)
        return (
            f"The processes do not make the same calls. Call {number} of the run is {name} on process {index}, and "
            f"{mine[number]} on process {rank()[0]}. Let every process create, train, evaluate and save in "
            f"the same order, as often."
        )

    def failures(self) -> dict[int, str]:
        return {index: notice["text"] for index, notice in _failed(_read(NOTICE)).items()}

    def leave(self, status: int, text: str) -> None:
        say(f"zerojax: {text}")
        self.last_words(status, text)
        _exit(status)

    def _names(self) -> dict[int, str]:
        return {call.number: call.name for call in list(self._calls)}

    def last_words(self, status: int, text: str) -> None:
        if rank()[1] == 1 or coordination_client() is None:
            return
        with suppress(Exception):
            give_notice(status, text, leaves=True)
            if rank()[0] == 0:
                time.sleep(3 * period())  # the service ends with process 0, and JAX then aborts the others

    def _watch(self) -> None:
        """Publish the calls of this process and read notices of others, until the process ends. Runs in a thread."""
        before = time.monotonic()
        while not self._at_end.wait(period()):
            self.frozen += gap_since(before, period())
            try:
                self.publish()
                self._heed(_read(NOTICE))
            except Exception:
                if coordination_client() is None:  # jax.distributed.shutdown was called
                    return
            before = time.monotonic()

    def _heed(self, notices: dict[int, dict[str, Any]]) -> None:
        """Print which processes failed. End this process if its call hangs and another failed or differs."""
        (index, count), failed = rank(), _failed(notices)
        for other in sorted(failed.keys() - self._said):
            self._said.add(other)
            service = ", and JAX's coordination service with it," if other == 0 else ""
            say(f"zerojax: process {other} of {count} ended{service} after: {failed[other]['text']}")
        call = self._calls[-1] if self._calls else None
        if call is None or call.has_ended or time.monotonic() - call.begun < STUCK_S:
            return
        if failed:
            other, notice = next(iter(failed.items()))
            text = notice["text"]
            why = text if text.startswith("process") else f"process {other} ended after: {text}"
            self.leave(notice["status"], f"process {index} cannot end {call.name}: {why}")
        if difference := self.difference():
            self.leave(1, difference)

    def _at_exit(self) -> None:
        """End together with the other processes, or alone if one is dead, because JAX would wait for it."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        try:
            if coordination_client() is None:
                return
            if error is None:
                self._end_well()
            else:
                self._end_badly(error)
        except Exception as failure:  # the coordinator is gone
            if error is not None:
                say(f"zerojax: JAX's coordination service, of process 0, does not answer: {one_line(failure)}")
                _exit(AGAIN)
        finally:
            # A daemon thread that returns from C++ to a finished interpreter would abort the process.
            self._at_end.set()
            if self._watcher is not None:
                self._watcher.join(STUCK_S)

    def _end_well(self) -> None:
        """Wait until the other processes end. End this process with an error if one of them fails."""
        if self._thread == threading.get_ident():
            self.begin(THE_END)
        self.publish()
        give_notice(0, THE_END)
        begun = time.monotonic()
        while time.monotonic() - begun < END_S:
            notices = _read(NOTICE)
            if failed := _failed(notices):
                other, notice = next(iter(failed.items()))
                why = f"process {rank()[0]} came to its end, but process {other}: {notice['text']}"
                self.leave(notice["status"], why)
            if len(notices) == rank()[1] - 1:
                return
            time.sleep(0.1)

    def _end_badly(self, error: BaseException) -> None:
        """Wait a limited time until the other processes fail, too, and then end. Do not wait for dead processes."""
        text, begun = one_line(error), time.monotonic()
        first = {index: state["beat"] for index, state in self.others().items()}
        give_notice(1, text)
        left, silent = set(range(rank()[1])) - {rank()[0]}, []
        while left and time.monotonic() - begun < LAST_WORDS_S * max(1.0, period()):
            notices = _read(NOTICE)
            left -= set(notices)
            if not left and not any(one["leaves"] for one in notices.values()):
                return  # all processes reach JAX's own end
            beats = {index: state["beat"] for index, state in self.others().items()}
            silent = sorted(i for i in left if beats.get(i) == first.get(i))
            if len(silent) == len(left) and time.monotonic() - begun > SILENT_S * max(1.0, period()):
                break
            time.sleep(0.2)
        index, count = rank()
        if difference := self.difference():
            text, silent = difference, []
            say(f"zerojax: {difference}")
        elif silent:
            who = ", ".join(map(str, silent))
            say(f"zerojax: process {who} of {count} died or hangs: process {index} ends, to be started again.")
        status = AGAIN if silent else 1
        self.last_words(status, text)
        _exit(status)


def give_notice(status: int, text: str, *, leaves: bool = False) -> None:
    """Tell the other processes that this process ends, and why. A status of 0 means that there is no error.

    `leaves` says whether the process ends at once, so that the others must not wait for this process in JAX's
    shutdown.
    """
    notice = json.dumps({"status": status, "text": text, "leaves": leaves})
    coordination_client().key_value_set(f"{NOTICE}/{rank()[0]}", notice, True)


def period() -> float:
    """Return the seconds between two publications of one process. The period is longer if there are many processes."""
    return PERIOD_S * max(1.0, rank()[1] / MOST_PER_SECOND)


def gap_since(before: float, slept: float) -> float:
    """Return for how many seconds a debugger or the machine stopped the process while a thread slept."""
    gap = time.monotonic() - before - slept
    return gap if gap > 1.0 else 0.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _read(folder: str) -> dict[int, dict[str, Any]]:
    found = coordination_client().key_value_dir_get(f"{folder}/")
    messages = {int(name.rsplit("/", 1)[-1]): json.loads(text) for name, text in found}
    messages.pop(rank()[0], None)
    return messages


def _failed(notices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {index: notice for index, notice in notices.items() if notice["status"]}


def _exit(status: int) -> None:
    """End the process without JAX's shutdown, which waits for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


EVENTS = Events()  # one per process, like the client of the coordination service
