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

from jax.sharding import Mesh

from zerojax.comm.processes import AGAIN, EVENTS, Call, is_of_all, leave, rank, say
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
    """Wait for each step in the queue, until None.

    The thread has no reference to the `Guard`, so that the `Guard` can be garbage-collected. It counts how often it
    slept: time in which a debugger or the machine stopped the process does not count.
    """
    nap = min(0.05, timeout / 20)
    while (step := steps.get()) is not None:
        waited, limit = 0.0, timeout
        while not step[1].has_ended:
            if waited > limit:
                _say_late(step[0], limit, ends)
                limit *= 2
            time.sleep(nap)
            waited += nap


def _say_late(number: int, limit: float, ends: bool) -> None:
    """Print what is known about the step that did not end, and end the process if `ends`."""
    index, count = rank()
    within = f"{'timeout=' if ends else ''}{limit:g} s"
    said = [f"step {number} did not end within {within} on process {index} of {count}."]
    with suppress(Exception):  # the coordination service may be gone
        said += _behind(index, count) if count > 1 else []
    for line in said:
        say(line)
    faulthandler.dump_traceback(sys.stderr)
    if ends:
        leave(AGAIN, " ".join(said))
    say("it goes on waiting. Give train_step(timeout=) to end a process whose step hangs.")


def _behind(index: int, count: int) -> list[str]:
    """Say which processes have not made the last call of this one."""
    states = EVENTS.others()
    calls = {other: states[other]["calls"] if other in states else {} for other in range(count) if other != index}
    return [
        f"process {other} was last seen in {made[max(made)] if made else 'no call'}: process {index} waits for it in a "
        f"collective."
        for other, made in calls.items()
        if max(made, default=-1) < EVENTS.counted - 1
    ]
