"""The calls of each process of a run, in order, which the other processes can read.

Every process of a run makes the same calls in the same order: `create`, steps, evaluations, saves. If the call with one
number has different names on two processes, they differ for certain, whatever they wait for. One thread per process
publishes its calls through JAX's coordination service, and reads those of the others when a call does not end. No
device takes part. A process that ends says so first, so that the others can say why they end, too.
"""

from __future__ import annotations

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

from zerojax.compat import coordination_client

PERIOD_S = 1.0
MOST_PER_SECOND = 64  # messages of all processes to the coordinator
REMEMBERED = 32  # the last calls that are published
STUCK_S = 5.0  # after which a call is compared with those of the others
SILENT_S = 6.0  # after which a process that publishes nothing is taken for dead, where something failed
LAST_WORDS_S = 10.0  # how long a process that failed waits for the others to end
END_S = 60.0  # how long one that ended well waits for them, before JAX does
AGAIN = 75  # EX_TEMPFAIL of sysexits.h: to be tried again
STATE, NOTICE = "zerojax/state", "zerojax/notice"
THE_END = "the end of the program"


@dataclasses.dataclass
class Call:
    """A call that all processes make.

    Attributes:
        number: Its place in the run, from 0; -1 for a call that is not counted.
        name: What is called.
        result: An array that it computes; None until it is dispatched.
        failed: Whether it raised an error.
        watched: Whether it ends with its `result`; a call that asks the other processes looks after itself.
        begun: When, by the monotonic clock.
    """

    number: int
    name: str
    watched: bool = True
    result: Any = None
    failed: bool = False
    begun: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def has_ended(self) -> bool:
        """Return whether the call is done, well or not."""
        if self.failed or not self.watched:
            return True
        return self.result is not None and (self.result.is_deleted() or self.result.is_ready())


@functools.lru_cache(maxsize=64)
def is_of_all(mesh: Mesh) -> bool:
    """Return whether several processes run, and all of them have devices of a mesh."""
    if jax.process_count() == 1:
        return False
    return {getattr(device, "process_index", 0) for device in mesh.devices.flat} == set(range(jax.process_count()))


@functools.cache
def rank() -> tuple[int, int]:
    """Return the index of this process and the number of all; kept, since at exit JAX would begin anew to tell."""
    return jax.process_index(), jax.process_count()


def first_array(tree: Any) -> jax.Array:
    """Return an array of a tree, whose being ready tells that the program has ended."""
    return next((x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)), jnp.zeros(()))


class Events:
    """The calls of this process and, through the coordination service, of the others."""

    def __init__(self):
        """Record nothing yet, and start no thread."""
        self._calls: collections.deque[Call] = collections.deque(maxlen=REMEMBERED)
        self._next, self._beat, self.frozen = 0, 0, 0.0
        self._thread: int | None = None  # whose calls are counted
        self._watcher: threading.Thread | None = None  # made by the process that starts it: a fork ends those it finds
        self._at_end = threading.Event()
        self._said: set[int] = set()

    def __reduce__(self):
        """Pickle the name: another process has its own calls."""
        return "EVENTS"

    @contextmanager
    def calling(self, name: str, mesh: Mesh | None = None) -> Iterator[Call]:
        """Count a call, and watch the `result` that it leaves.

        Args:
            name: The same on every process.
            mesh: Where the call computes. It counts only if all processes have devices there; None: it counts.
        """
        counts = jax.process_count() > 1 if mesh is None else is_of_all(mesh)
        call = self.begin(name, watched=True) if counts else Call(-1, name)
        try:
            yield call
        except BaseException:
            call.failed = True
            raise

    def begin(self, name: str, *, watched: bool = False) -> Call:
        """Count a call, if it is of the thread that made the first one: two threads have no order.

        Args:
            name: The same on every process.
            watched: As for `Call`.
        """
        if self._thread is None:
            self._thread = threading.get_ident()
            self._watcher = threading.Thread(target=self._watch, name="zerojax processes", daemon=True)
            self._watcher.start()
            atexit.register(self._at_exit)  # runs before JAX's, which was registered when JAX was imported
        if self._thread != threading.get_ident():
            return Call(-1, name)
        call = Call(self._next, name, watched)
        self._next += 1
        self._calls.append(call)
        return call

    def last_number(self) -> int:
        """Return the number of the last call that was counted; -1 for none."""
        return self._next - 1

    def publish(self) -> None:
        """Tell the others this process's calls."""
        self._beat += 1
        calls = {call.number: call.name for call in list(self._calls)}
        state = json.dumps({"beat": self._beat, "frozen": self.frozen, "calls": calls})
        coordination_client().key_value_set(f"{STATE}/{rank()[0]}", state, True)

    def others(self) -> dict[int, dict[str, Any]]:
        """Return what the other processes published last: `beat`, `frozen` (seconds), and `calls` by number."""
        found = _read(STATE)
        return {i: one | {"calls": {int(n): name for n, name in one["calls"].items()}} for i, one in found.items()}

    def difference(self) -> str:
        """Return the first call that differs between this process and another one, in words; empty if none does."""
        mine = {call.number: call.name for call in list(self._calls)}
        found = []
        for index, other in self.others().items():
            numbers = [n for n in sorted(mine) if other["calls"].get(n, mine[n]) != mine[n]]
            found += [(numbers[0], index, other["calls"][numbers[0]])] if numbers else []
        if not found:
            return ""
        number, index, name = min(found)
        return (
            f"The processes do not make the same calls. Call {number} of the run is {name} on process {index}, and "
            f"{mine[number]} on process {rank()[0]}. Let every process create, train, evaluate and save in "
            f"the same order, as often."
        )

    def failures(self) -> dict[int, str]:
        """Return why other processes ended, by process, for those that failed."""
        return {index: notice["text"] for index, notice in _read(NOTICE).items() if notice["status"]}

    def leave(self, status: int, text: str) -> None:
        """Say why, to the other processes too, and end this process at once."""
        say(f"zerojax: {text}")
        self.last_words(status, text)
        os._exit(status)

    def last_words(self, status: int, text: str) -> None:
        """Tell the other processes why this one leaves, and let them read it if it keeps the coordination service."""
        if rank()[1] == 1 or coordination_client() is None:
            return
        with suppress(Exception):
            give_notice(status, text, leaves=True)
            if rank()[0] == 0:
                time.sleep(3 * period())  # JAX aborts the others as soon as the service is gone

    def _watch(self) -> None:
        """Publish and read, in the thread, until the process has ended together with the others."""
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
        """Say which processes ended; leave if this one waits for them, or for others that do something else."""
        index, count = rank()
        for other in [i for i in notices if notices[i]["status"] and i not in self._said]:
            self._said.add(other)
            service = ", and JAX's coordination service with it," if other == 0 else ""
            say(f"zerojax: process {other} of {count} ended{service} after: {notices[other]['text']}")
        call = self._calls[-1] if self._calls else None
        if call is None or call.has_ended or time.monotonic() - call.begun < STUCK_S:
            return
        if failed := [i for i in notices if notices[i]["status"]]:
            text = notices[failed[0]]["text"]
            why = text if text.startswith("process") else f"process {failed[0]} ended after: {text}"
            self.leave(notices[failed[0]]["status"], f"process {index} cannot end {call.name}: {why}")
        if difference := self.difference():
            self.leave(1, difference)

    def _at_exit(self) -> None:
        """End together with the others, or alone if they cannot; JAX would wait for those that died."""
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
            # Python ends a daemon thread that returns from C++ to a finished interpreter, and C++ aborts the process.
            self._at_end.set()
            if self._watcher is not None:
                self._watcher.join(STUCK_S)

    def _end_well(self) -> None:
        """Wait for the others to come to their end, so that one that never will can say so."""
        if self._thread == threading.get_ident():
            self.begin(THE_END)
        self.publish()
        give_notice(0, THE_END)
        begun = time.monotonic()
        while time.monotonic() - begun < END_S:
            notices = _read(NOTICE)
            for other in [i for i in notices if notices[i]["status"]]:
                text = f"process {rank()[0]} came to its end, but process {other}: {notices[other]['text']}"
                say(f"zerojax: {text}")
                self.last_words(notices[other]["status"], text)
                _exit(notices[other]["status"])
            if len(notices) == rank()[1] - 1:
                return
            time.sleep(0.1)

    def _end_badly(self, error: BaseException) -> None:
        """Wait for the others to fail as well; leave without them if they do not, or are dead."""
        text, begun = one_line(error), time.monotonic()
        first = {index: state["beat"] for index, state in self.others().items()}
        give_notice(1, text)
        left, silent = set(range(rank()[1])) - {rank()[0]}, []
        while left and time.monotonic() - begun < LAST_WORDS_S * max(1.0, period()):
            notices = _read(NOTICE)
            left -= set(notices)
            if not left and not any(one["leaves"] for one in notices.values()):
                return  # all come to JAX's end
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
    """Tell the other processes that this one ends.

    Args:
        status: Its exit status; 0 if all is well.
        text: Why.
        leaves: Whether it ends at once, so that the others must not wait for it in JAX's shutdown.
    """
    notice = json.dumps({"status": status, "text": text, "leaves": leaves})
    coordination_client().key_value_set(f"{NOTICE}/{rank()[0]}", notice, True)


def period() -> float:
    """Return how often a process publishes its calls, in seconds: less often where there are many processes."""
    return PERIOD_S * max(1.0, rank()[1] / MOST_PER_SECOND)


def gap_since(before: float, slept: float) -> float:
    """Return for how long the process was stopped, by a debugger or with its machine, while a thread slept."""
    gap = time.monotonic() - before - slept
    return gap if gap > 1.0 else 0.0


def say(text: str) -> None:
    """Print a line for whoever reads the logs."""
    print(text, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _read(folder: str) -> dict[int, dict[str, Any]]:
    """Return the messages of the other processes in a folder of the coordination service."""
    found = coordination_client().key_value_dir_get(f"{folder}/")
    messages = {int(name.rsplit("/", 1)[-1]): json.loads(text) for name, text in found}
    messages.pop(rank()[0], None)
    return messages


def _exit(status: int) -> None:
    """End the process without what JAX does at the end, which waits for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


EVENTS = Events()  # one per process, as the coordination service is
