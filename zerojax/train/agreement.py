"""Compare the calls of a training step over processes, and announce each call to the other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerojax.comm.events import EVENTS
from zerojax.train.protocol import Executor
from zerojax.train.same_run import SameCalls, require_same_programs
from zerojax.train.step_program import StepCall, StepProgram


class Agreement:
    """Compares each new call of a step over processes, and announces each call to the other processes."""

    def __init__(self, program: StepProgram, executor: Executor):
        self._config, self._executor, self._what = program.config, executor, f"step with {program.name}"
        self._same = SameCalls(program.config, self._what, program.options)

    @contextmanager
    def around(self, call: StepCall) -> Iterator[None]:
        """Compare a call and its program before the step runs, and say in `call.is_new` whether the step compiles."""
        config, state = self._config, call.state
        call.is_new = self._same.is_new(state.plan, call.batch, call.args, state.step)
        with EVENTS.calling(f"step {call.number} with {call.program.name}", config.mesh) as event:
            if call.is_new and not config.params_on_disk:
                lower = lambda: self._executor.trace(state, call.rows, call.args).lower()
                require_same_programs(config, self._what, [lower])
            yield
            event.result = call.result
