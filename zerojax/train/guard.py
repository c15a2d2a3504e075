"""Guard the calls of a training step: compare and announce them over processes, and limit the time of a step.

Without it, the other processes would wait forever in their next collective if one process hangs, dies, or makes another
call.
"""

from __future__ import annotations

import faulthandler
import math
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import jax
from jax.sharding import Mesh

from zerojax.comm.processes import AGAIN, EVENTS, Call, gap_since, is_of_all, leave, say
from zerojax.train.protocol import Executor
from zerojax.train.same_run import SameCalls, require_same_programs
from zerojax.train.step_program import StepCall, StepProgram

DEFAULT_S = 1800.0  # after which a run on several processes without a limit prints what it waits for


def limit_of(timeout: float | None, mesh: Mesh) -> float | None:
    if timeout is None:
        return DEFAULT_S if is_of_all(mesh) else None
    return None if math.isinf(timeout) else timeout


class Guard:
    """Compares each new call of a step over processes, and announces each call to the other processes.

    A step may take `timeout` seconds after the previous step ends. A thread waits for the steps of one loss. If the
    user gave the limit, a step that takes longer ends the process, for a scheduler to restart. Otherwise the thread
    only prints what it knows.
    """

    def __init__(self, program: StepProgram, executor: Executor):
        self._config, self._executor, self._what = program.config, executor, f"step with {program.name}"
        self._same = SameCalls(program.config, self._what, program.options)
        self._limit, self._ends = limit_of(program.options.timeout, program.config.mesh), bool(program.options.timeout)
        self._steps: queue.SimpleQueue[tuple[int, Call] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def around(self, call: StepCall) -> Iterator[None]:
        """Compare a call and its program before the step runs. A call that compiles is watched only after it."""
        config, state = self._config, call.state
        is_new = self._same.is_new(state.plan, call.batch, call.args, state.step)
        with EVENTS.calling(f"step {call.number} with {call.program.name}", config.mesh) as event:
            if is_new and not config.params_on_disk:
                lower = lambda: self._executor.trace(state, call.rows, call.args).lower()
                require_same_programs(config, self._what, [lower])
            if not is_new:
                self._watch(call.number, event)
            yield
            event.result = call.result
            if is_new:
                self._watch(call.number, event)

    def _watch(self, number: int, event: Call) -> None:
        if self._limit is None:
            return
        if self._thread is None:
            given = self._steps, self._limit, self._ends
            self._thread = threading.Thread(target=_wait, args=given, name="zerojax watchdog", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._steps.put, None)
        self._steps.put((number, event))


def _wait(steps: queue.SimpleQueue[tuple[int, Call] | None], timeout: float, ends: bool) -> None:
    """Wait for each step in the queue, until None. Time in which this or another process was stopped does not count.

    The thread has no reference to the `Guard`, so that the `Guard` can be garbage-collected.
    """
    frozen = 0.0  # seconds for which another process has been stopped
    while (step := steps.get()) is not None:
        begun, limit = time.monotonic(), timeout
        while not step[1].has_ended:
            if time.monotonic() - begun > limit:
                before = frozen
                with suppress(Exception):  # the coordination service may be gone
                    frozen = max(one["frozen"] for one in EVENTS.others().values())
                begun += max(0.0, frozen - before)
                if time.monotonic() - begun > limit:
                    _say_late(step[0], limit, ends)
                    limit *= 2
            before, nap = time.monotonic(), min(0.05, timeout / 20)
            time.sleep(nap)
            begun += gap_since(before, nap)


def _say_late(number: int, limit: float, ends: bool) -> None:
    """Print what is known about the step that did not end, and end the process if `ends`."""
    index, count = jax.process_index(), jax.process_count()
    within = f"{'timeout=' if ends else ''}{limit:g} s"
    said = [f"step {number} did not end within {within} on process {index} of {count}.", *_behind(index, count)]
    for line in said:
        say(line)
    faulthandler.dump_traceback(sys.stderr)
    if ends:
        leave(AGAIN, " ".join(said))
    say("it goes on waiting. Give train_step(timeout=) to end a process whose step hangs.")


def _behind(index: int, count: int) -> list[str]:
    found, last = [], EVENTS.counted - 1
    with suppress(Exception):
        others = EVENTS.others() if count > 1 else {}
        for other in sorted(set(range(count)) - {index}):
            calls = others.get(other, {"calls": {}})["calls"]
            if max(calls, default=-1) < last:
                at = calls[max(calls)] if calls else "no call"
                found.append(f"process {other} was last seen in {at}: process {index} waits for it in a collective.")
    return found
