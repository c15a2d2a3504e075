"""Print why a step exceeds its time limit, and end the process if the user gave the limit, for a scheduler to restart.

Without a watchdog, the other processes would wait forever in their next collective if one process hangs or dies.
"""

from __future__ import annotations

import faulthandler
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax
from jax.sharding import Mesh

from zerojax.comm.events import AGAIN, EVENTS, Call, gap_since, is_of_all, say
from zerojax.train.step_program import StepCall, StepProgram

EXIT_STATUS = AGAIN
DEFAULT_S = 1800.0  # after which a run on several processes without a limit prints what it waits for


def limit_of(timeout: float | None, mesh: Mesh) -> float | None:
    if timeout is None:
        return DEFAULT_S if is_of_all(mesh) else None
    return None if math.isinf(timeout) else timeout


def watchdogs(program: StepProgram) -> tuple[Watchdog, ...]:
    timeout = program.options.timeout
    limit = limit_of(timeout, program.config.mesh)
    return () if limit is None else (Watchdog(limit, ends=timeout is not None),)


class Watchdog:
    """Waits in a thread for the steps of one loss. A step may take `timeout` seconds after the previous step ends.

    If `ends`, a step that takes longer ends the process. Otherwise the watchdog only prints what it knows.
    """

    def __init__(self, timeout: float, *, ends: bool):
        self.timeout, self._ends = timeout, ends
        self._steps: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def around(self, call: StepCall) -> Iterator[None]:
        """Watch a call of the step, and then its result. A call that compiles is watched only after it."""
        step = Call(call.number, f"step {call.number}")
        if not call.is_new:
            self._watch(step)
        try:
            yield
        except BaseException:
            step.failed = True
            raise
        step.result = call.result
        if call.is_new:
            self._watch(step)

    def _watch(self, step: Call) -> None:
        if self._thread is None:
            given = self._steps, self.timeout, self._ends
            self._thread = threading.Thread(target=_wait, args=given, name="zerojax watchdog", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._steps.put, None)
        self._steps.put(step)


def _wait(steps: queue.SimpleQueue[Call | None], timeout: float, ends: bool) -> None:
    """Wait for each step in the queue, until None. Time in which this or another process was stopped does not count.

    The thread has no reference to the `Watchdog`, so that the `Watchdog` can be garbage-collected.
    """
    frozen = 0.0  # seconds for which another process has been stopped
    while (step := steps.get()) is not None:
        begun, limit = time.monotonic(), timeout
        while not step.has_ended:
            if time.monotonic() - begun > limit:
                before = frozen
                with suppress(Exception):  # the coordination service may be gone
                    frozen = max(one["frozen"] for one in EVENTS.others().values())
                begun += max(0.0, frozen - before)
                if time.monotonic() - begun > limit:
                    _say_late(step, limit, ends)
                    limit *= 2
            before, nap = time.monotonic(), min(0.05, timeout / 20)
            time.sleep(nap)
            begun += gap_since(before, nap)


def _say_late(step: Call, limit: float, ends: bool) -> None:
    """Print what is known about the step that did not end, and end the process if `ends`."""
    index, count = jax.process_index(), jax.process_count()
    within = f"{'timeout=' if ends else ''}{limit:g} s"
    late = f"step {step.number} did not end within {within} on process {index} of {count}."
    say(f"zerojax: {late}")
    behind = _behind(index, count)
    for line in behind:
        say(f"zerojax: {line}")
    faulthandler.dump_traceback(sys.stderr)
    if not ends:
        return say("zerojax: it goes on waiting. Give train_step(timeout=) to end a process whose step hangs.")
    EVENTS.last_words(EXIT_STATUS, " ".join([late, *behind]))
    os._exit(EXIT_STATUS)


def _behind(index: int, count: int) -> list[str]:
    if count == 1:
        return []
    found, last = [], EVENTS.counted - 1
    with suppress(Exception):
        others = EVENTS.others()
        for other in sorted(set(range(count)) - {index}):
            calls = others.get(other, {"calls": {}})["calls"]
            if max(calls, default=-1) < last:
                at = calls[max(calls)] if calls else "no call"
                found.append(f"process {other} was last seen in {at}: process {index} waits for it in a collective.")
    return found
