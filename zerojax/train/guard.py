"""Guard the calls of a training step: compare and announce them over processes, and limit the time of a step.

Without it, the other processes would wait forever in their next collective if one process hangs, dies, or makes another
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from zerojax.comm.processes import EVENTS, Call, is_of_all
from zerojax.train.protocol import Executor
from zerojax.train.same_run import SameCalls, require_same_programs
from zerojax.train.state import ZeroState
from zerojax.train.step_program import StepProgram

DEFAULT_S = 1800.0  # after which a run on several processes without a limit prints what it waits for


def limit_of(timeout: float | None, mesh: Mesh) -> float | None:
    if timeout is None:
        return DEFAULT_S if is_of_all(mesh) else None
    return None if math.isinf(timeout) else timeout


class Guard:
    """Compares each new call of a step over processes, and announces each call to the other processes.

    A step may take `timeout` seconds after the previous step ends. If the user gave the limit, a step that takes longer
    ends the process, for a scheduler to restart. Otherwise the process only prints what it knows.
    """

    def __init__(self, program: StepProgram, executor: Executor):
        self._program, self._executor, self._what = program, executor, f"step with {program.name}"
        self._same = SameCalls(program.config, self._what, program.options)
        self._limit, self._ends = limit_of(program.options.timeout, program.config.mesh), bool(program.options.timeout)

    @contextmanager
    def around(
        self, number: int, state: ZeroState, batch: Any, place: Callable[[], Any], args: tuple
    ) -> Iterator[Call]:
        """Compare a call and its program before the step runs. A call that compiles is watched only after it.

        `place` returns the batch on the devices.

        Yield the call that the other processes see. The caller sets its `result` when the step is dispatched.
        """
        program, config = self._program, self._program.config
        is_new = self._same.is_new(state.plan, batch, args, state.step)
        with EVENTS.calling(f"step {number} with {program.name}", config.mesh) as event:
            if is_new and not config.params_on_disk:
                lower = lambda: self._executor.trace(state, place(), args).lower()
                require_same_programs(config, self._what, [lower])
            if not is_new:
                EVENTS.limit(event, self._limit, ends=self._ends)
            yield event
            if is_new:
                EVENTS.limit(event, self._limit, ends=self._ends)
