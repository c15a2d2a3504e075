"""Keep the processes of a run together, through JAX's coordination service and without devices.

Every process of a run must make the same calls in the same order: `create`, steps, evaluations, saves. If two processes
give different names to calls with the same number, their programs differ. `EVENTS` counts the calls of this process,
and a thread publishes them. If a call takes too long, the thread compares it with the calls of the other processes. A
process that ends publishes the reason, which the other processes report. The thread also limits the time of steps.

`Processes` exchanges messages within a timeout, and notices if an awaited process has ended or makes another call.
"""

import atexit
import collections
import dataclasses
import faulthandler
import functools
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax.internals import coordination_client

TICK_S, LONGEST_TICK_S = 0.05, 1.0
PERIOD_S = 1.0  # between two publications of one process, if there are few
MOST_PER_SECOND = 64  # messages to the coordinator from all processes together
REMEMBERED = 32  # how many of the last calls a process publishes
STUCK_S = 5.0  # a call that takes longer is compared with the calls of other processes
LAST_WORDS_S = 10.0  # how long a process that failed waits for the others; one that publishes nothing counts as dead
END_S = 60.0  # how long a process that ended without error waits for the others, before JAX's shutdown waits
AGAIN = 75  # the exit status EX_TEMPFAIL of sysexits.h, which asks to try again
STATE, NOTICE = "zerojax/state", "zerojax/notice"
THE_END = "the end of the program"
NOT_SAME = (
    "The processes do not make the same calls. {}. Let every process create, train, evaluate and save in the same "
    "order, as often, with batches of the same shapes."
)
TIMEOUT_S = 300.0  # how long messages are awaited: as long as jax.distributed.initialize waits
LOOK_EVERY_S = 1.0
# The service accepts each key only once per run, so keys are numbered. The numbers agree, because all processes
# exchange the messages about one purpose in the same order.
SERIALS: dict[str, Any] = collections.defaultdict(itertools.count)


@dataclasses.dataclass
class Call:
    """A call that all processes make."""

    number: int  # the number of the call in the run, from 0, or -1 if the call is not counted
    name: str  # such as `"step 3"`
    # whether the call ends when its `result` is ready; calls that exchange messages have a timeout instead
    watched: bool = True
    result: Any = None  # an array that the call computes, or None if the call has not dispatched it yet
    failed: bool = False  # whether the call raised an error
    begun: float = dataclasses.field(default_factory=time.monotonic)
    limit: float = math.inf  # how many seconds the call may take after the previous call with a limit
    ends: bool = False  # whether the process ends if the call takes longer

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
    return {device.process_index for device in mesh.devices.flat} == set(range(jax.process_count()))


@functools.cache
def rank() -> tuple[int, int]:
    """Return this process's index and the number of processes. The cache serves the exit, when JAX has no backend."""
    return jax.process_index(), jax.process_count()


class Events:
    """Records the calls of this process, such as steps, and reads the records of the other processes."""

    def __init__(self):
        self._calls: collections.deque[Call] = collections.deque(maxlen=REMEMBERED)
        self._limited: collections.deque[Call] = collections.deque()
        self.counted, self._beat = 0, 0  # the number of calls, and of publications
        self._thread: int | None = None  # the thread whose calls are counted
        self._watcher: threading.Thread | None = None  # made by the first call, because a forked process has no threads
        self._at_end = threading.Event()
        self._said: set[int] = set()

    @contextmanager
    def calling(self, name: str, mesh: Mesh) -> Iterator[Call]:
        """Count a call, and yield its `Call`, whose `result` the caller sets. All processes must give the same name.

        The call computes on `mesh`. It is counted only if there are several processes, all with devices of `mesh`.
        """
        call = self.begin(name, watched=True) if is_of_all(mesh) else Call(-1, name)
        try:
            yield call
        except BaseException:
            call.failed = True
            raise

    def begin(self, name: str, *, watched: bool = False) -> Call:
        """Give a call the next number, or -1 if another thread made the first call: the order is not known then."""
        if self._thread is None:
            self._thread = threading.get_ident()
            self._start()
        if self._thread != threading.get_ident():
            return Call(-1, name)
        call = Call(self.counted, name, watched)
        self.counted += 1
        self._calls.append(call)
        return call

    def limit(self, call: Call, seconds: float | None, *, ends: bool) -> None:
        """Print a message if a call has not ended `seconds` after the previous one. If `ends`, also end the process."""
        if seconds is None:
            return
        call.limit, call.ends = seconds, ends
        self._limited.append(call)
        self._start()

    def _start(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="zerojax processes", daemon=True)
            self._watcher.start()
            atexit.register(self._at_exit)  # runs before JAX's function, which `import jax` has registered

    def publish(self) -> None:
        self._beat += 1
        state = json.dumps({"beat": self._beat, "calls": self._named_calls()})
        coordination_client().key_value_set(f"{STATE}/{rank()[0]}", state, True)

    def difference(self) -> str:
        """Describe the first call that differs between this process and another process, or return an empty string."""
        mine = dict(self._named_calls())
        theirs = [(n, index, name) for index, state in _of_others(STATE).items() for n, name in state["calls"]]
        differing = [(n, index, name) for n, index, name in theirs if mine.get(n, name) != name]
        if not differing:
            return ""
        number, index, name = min(differing)
        both = f"Call {number} of the run is {name} on process {index}, and {mine[number]} on process {rank()[0]}"
        return NOT_SAME.format(both)

    def _named_calls(self) -> list[tuple[int, str]]:
        return [(call.number, call.name) for call in list(self._calls)]

    def _watch(self) -> None:
        """Watch calls, publish them, and read other processes' notices, until the process ends. Runs in a thread."""
        waited, slept, before = 0.0, 0.0, time.monotonic()
        while not self._at_end.wait(TICK_S):
            now = time.monotonic()
            # Time in which a debugger or the machine stopped the process does not count.
            passed, before = min(now - before, LONGEST_TICK_S), now
            while self._limited and self._limited[0].has_ended:
                self._limited.popleft()
                waited = 0.0
            waited, slept = waited + passed if self._limited else 0.0, slept + passed
            if self._limited and waited > self._limited[0].limit:
                self._say_late(self._limited[0])
            if rank()[1] > 1 and slept > period():
                slept = 0.0
                with suppress(Exception):  # jax.distributed.shutdown may have been called
                    self.publish()
                    self._heed(failures())

    def _say_late(self, call: Call) -> None:
        """Print what is known about a call that takes too long, and end the process if `call.ends` is true."""
        (index, count), name = rank(), call.name.partition(" with ")[0]
        within = f"{'timeout=' if call.ends else ''}{call.limit:g} s"
        said = [say(f"{name} did not end within {within} on process {index} of {count}.")]
        with suppress(Exception):  # the coordination service may be gone
            said += [say(line) for line in self._behind()] if count > 1 else []
        faulthandler.dump_traceback(sys.stderr)
        if call.ends:
            leave(AGAIN, " ".join(said))
        say("it goes on waiting. Give train_step(timeout=) to end a process whose step hangs.")
        call.limit *= 2

    def _behind(self) -> list[str]:
        """Say which processes have not made this process's last call."""
        index, count = rank()
        last = {other: (-1, "no call") for other in range(count) if other != index}
        last |= {other: state["calls"][-1] for other, state in _of_others(STATE).items() if state["calls"]}
        return [
            f"process {other} was last seen in {name}: process {index} waits for it in a collective."
            for other, (number, name) in last.items()
            if number < self.counted - 1
        ]

    def _heed(self, failed: dict[int, dict[str, Any]]) -> None:
        """Print which processes failed. End this process if its call hangs because of another process."""
        index, count = rank()
        for other in sorted(failed.keys() - self._said):
            self._said.add(other)
            service = ", and JAX's coordination service with it," if other == 0 else ""
            say(f"process {other} of {count} ended{service} after: {failed[other]['text']}")
        call = self._calls[-1] if self._calls else None
        if call is None or call.has_ended or time.monotonic() - call.begun < STUCK_S:
            return
        if failed:
            other, notice = next(iter(failed.items()))
            text = notice["text"]
            why = text if text.startswith("process") else f"process {other} ended after: {text}"
            leave(notice["status"], say(f"process {index} cannot end {call.name}: {why}"))
        if difference := self.difference():
            leave(1, say(difference))

    def _at_exit(self) -> None:
        """End together with the other processes. If one is dead, end alone: JAX's shutdown would wait for it."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        try:
            if coordination_client() is not None:
                self._end_well() if error is None else self._end_badly(one_line(error))
        except Exception as failure:  # the coordinator is gone
            if error is not None:
                say(f"JAX's coordination service, of process 0, does not answer: {one_line(failure)}")
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
            for other, notice in failures().items():
                why = f"process {rank()[0]} came to its end, but process {other}: {notice['text']}"
                leave(notice["status"], say(why))
            if len(_of_others(NOTICE)) == rank()[1] - 1:
                return
            time.sleep(0.1)

    def _end_badly(self, text: str) -> None:
        """Wait a limited time for the other processes to end, and then end: JAX's shutdown would wait for dead ones."""
        (index, count), before = rank(), _of_others(STATE)
        give_notice(1, text)
        begun = time.monotonic()
        while len(ended := _of_others(NOTICE)) < count - 1 and time.monotonic() - begun < LAST_WORDS_S * period():
            time.sleep(0.2)
        left = set(range(count)) - {index, *ended}
        if not left and not any(notice["leaves"] for notice in ended.values()):
            return  # all processes reach JAX's own end
        if difference := self.difference():
            leave(1, say(difference))
        beats = lambda states: {other: state["beat"] for other, state in states.items()}
        first, now = beats(before), beats(_of_others(STATE))
        if silent := sorted(other for other in left if first.get(other) == now.get(other)):
            who = ", ".join(map(str, silent))
            say(f"process {who} of {count} died or hangs: process {index} ends, to be started again.")
        leave(AGAIN if silent else 1, text)


def failures() -> dict[int, dict[str, Any]]:
    """Return, by rank, what `give_notice` received in each other process that ended with an error."""
    return {index: notice for index, notice in _of_others(NOTICE).items() if notice["status"]}


def give_notice(status: int, text: str, *, leaves: bool = False) -> None:
    """Tell the other processes that this process ends, and why. A `status` of 0 means that there was no error.

    `leaves` says that this process ends at once. The other processes must then not wait for it in JAX's shutdown.
    """
    notice = json.dumps({"status": status, "text": text, "leaves": leaves})
    coordination_client().key_value_set(f"{NOTICE}/{rank()[0]}", notice, True)


def leave(status: int, text: str) -> None:
    """Tell the other processes why this process ends, and end this process at once."""
    if rank()[1] > 1 and coordination_client() is not None:
        with suppress(Exception):
            give_notice(status, text, leaves=True)
            if rank()[0] == 0:
                time.sleep(3 * period())  # the service ends with process 0, and JAX then aborts the others
    _exit(status)


def period() -> float:
    return PERIOD_S * max(1.0, rank()[1] / MOST_PER_SECOND)


def say(text: str) -> str:
    print(f"zerojax: {text}", file=sys.stderr, flush=True)
    return text


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def _of_others(folder: str) -> dict[int, Any]:
    return {index: message for index, message in _messages(folder).items() if index != rank()[0]}


def _messages(folder: str) -> dict[int, Any]:
    found = coordination_client().key_value_dir_get(f"{folder}/")
    return {int(name.rsplit("/", 1)[-1]): json.loads(text) for name, text in found}


def _exit(status: int) -> None:
    # JAX's shutdown would wait for the other processes.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


EVENTS = Events()  # one per process, like the client of the coordination service


class Processes:
    """The processes of the run. This process has the number `index`.

    An exception of type `error` is raised if a process does not answer in `timeout` seconds, or `agree` gets a failure.
    """

    def __init__(self, purpose: str, timeout: float | None = None, *, call: Any = None, error: Any = TimeoutError):
        self.index, self.count = jax.process_index(), jax.process_count()
        self.timeout, self._error = TIMEOUT_S if timeout is None else timeout, error
        place = f"call/{call.number}" if call and call.number >= 0 else f"{purpose}/{next(SERIALS[purpose])}"
        self._key, self._topics = f"zerojax/{place}", itertools.count()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def exchange(self, topic: str, message: str) -> list[str]:
        """Send a message to all other processes, and return the message of each process, in the order of their indices.

        `topic` is a verb that says what this process is about to do. Raise an `error`, which names the process, if one
        sends nothing within the timeout or has ended. Raise a ValueError if another process makes a different call.
        """
        if self.count == 1:
            return [message]
        key = f"{self._key}/{next(self._topics)}"
        coordination_client().key_value_set(f"{key}/{self.index}", json.dumps([topic, message]))
        begun = time.monotonic()
        while missing := sorted(set(range(self.count)) - (found := _messages(key)).keys()):
            left = self.timeout - (time.monotonic() - begun)
            if left <= 0:
                raise self._error(
                    f"Process {', '.join(map(str, missing))} of {self.count} did not answer within "
                    f"{self.timeout:g} s: it died, or hangs, or did not {topic} as the others did."
                )
            self._wait_for(missing, f"{key}/{missing[0]}", min(left, LOOK_EVERY_S), topic)
        for index, (theirs, _) in found.items():
            if theirs != found[0][0]:
                both = f"Process {index} is about to {theirs}, and process 0 is about to {found[0][0]}"
                raise ValueError(NOT_SAME.format(both))
        return [text for _, (_, text) in sorted(found.items())]

    def _wait_for(self, missing: list[int], key: str, seconds: float, topic: str) -> None:
        """Wait a while for a message. Raise an error if a missing process ended, or makes a different call."""
        begun = time.monotonic()
        try:
            coordination_client().blocking_key_value_get(key, max(1, round(1000 * seconds)))
        except jax.errors.JaxRuntimeError:
            if time.monotonic() - begun < 0.9 * seconds:  # The service failed before the time was over.
                raise
            EVENTS.publish()
            if ended := {index: notice for index, notice in failures().items() if index in missing}:
                index, notice = min(ended.items())
                why = f"Process {index} of {self.count} ended before it did {topic}: {notice['text']}"
                raise self._error(why) from None
            if difference := EVENTS.difference():
                raise ValueError(difference) from None

    def agree(self, topic: str, failure: str = "", message: str = "") -> str:
        """Return the first process's message once all processes have succeeded.

        `topic` is the task of every process, as a verb phrase, and `failure` the error of this process, if it failed.
        Raise an `error` that lists the failures of all processes.
        """
        answers = [json.loads(text) for text in self.exchange(topic, json.dumps([failure, message]))]
        prefix = lambda i: f"process {i}: " if self.count > 1 else ""
        if failed := [f"{prefix(i)}{text}" for i, (text, _) in enumerate(answers) if text]:
            raise self._error("; ".join(failed))
        return answers[0][1]
