"""What attaches to a training step from outside.

A step places the batch, runs its program, and returns state and metrics. `step`, `step_program` and `state` do this.
Everything else attaches in `executor_of` and `guard_of` of `step`. These functions import a module only if its option
is given, or its condition holds:

| attached | by | option or condition | module |
|---|---|---|---|
| offloaded optimizer state | `Executor` | `Offload` | `streamed_step`, then `zerojax.streaming` |
| parameters on disk | `Executor` | `Offload(params="disk")` | `staged_step`, then `zerojax.staged` |
| activations that fit into memory | `Executor` around another one | `memory=` | `fitting`, then `zerojax.budget` |
| the same calls on all processes, and a limit of time | `Guard` | several processes, or `timeout=` | `attachments` |

Without an option, the executor is a `JittedStep`, and there is no guard. Smaller parts have no protocol, and are
imported where they are needed: aux, mutable state and norms per parameter (`optional_outputs`), compiler options for
hybrid sharding (`config.tuning`), a state that the caller moved (`moved_state`), and a warning about misplaced arrays
and an error that names an unusable array (`zerojax.placement.problems`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypedDict

import jax
from jax.sharding import Mesh

from zerojax.comm.processes import EVENTS, Call, is_of_all
from zerojax.train.same_run import SameCalls, require_same_programs
from zerojax.train.state import ZeroState
from zerojax.train.step_program import StepProgram

DEFAULT_S = 1800.0  # without `timeout=`, a step on several processes that takes longer prints what it waits for


class Metrics(TypedDict):
    """The dict of metrics that `Step.__call__` returns and describes, as a type for editors and type checkers."""

    loss: jax.Array  # shape=(), dtype=float
    grad_norm: jax.Array  # shape=(), dtype=jnp.float32
    skipped: jax.Array  # shape=(), dtype=bool
    aux: Any
    loss_scale: jax.Array  # shape=(), dtype=jnp.float32
    grad_norms: Any
    param_norms: Any
    update_norms: Any
    learning_rate: jax.Array  # shape=(), dtype=float


class Executor(Protocol):
    """Runs the step of a `StepProgram`. The caller has checked the arguments, and has placed the batch, `rows`."""

    def run(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Metrics]:
        """Run a step, which donates the state, and return the next state and the metrics."""
        ...

    def inside(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Metrics]:
        """Run a step as a part of the program that is being traced, or raise a TypeError."""
        ...

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        """Trace the step's program, or the first of its programs, like `jax.jit(...).trace`. Also accept shapes."""
        ...

    def lower_update(self, state: ZeroState) -> list[Any]:
        """Lower the programs that update offloaded state. The leaves of `state` may be shapes."""
        ...


def limit_of(timeout: float | None, mesh: Mesh) -> float | None:
    if timeout is None:
        return DEFAULT_S if is_of_all(mesh) else None
    return None if math.isinf(timeout) else timeout


class Guard:
    """Compares calls with new shapes over processes, and announces every call of a step to the other processes.

    Without a guard, if one process hangs, dies, or calls something else, the other processes would wait forever in
    their next collective.

    A step may take `timeout` seconds after the previous step ends. If the user gave `timeout=`, a longer step ends the
    process, so that a scheduler can restart it. Otherwise the process only prints for which process it waits.
    """

    def __init__(self, program: StepProgram, executor: Executor):
        self._program, self._executor, self._what = program, executor, f"step with {program.name}"
        self._same = SameCalls(program.config, self._what, program.options)
        self._limit, self._ends = limit_of(program.options.timeout, program.config.mesh), bool(program.options.timeout)

    @contextmanager
    def around(
        self, number: int, state: ZeroState, batch: Any, place: Callable[[], Any], args: tuple
    ) -> Iterator[Call]:
        """Yield the record of a call, which other processes see.

        If the call has new shapes, first check that all processes lower the same program. The time limit of this call
        begins only after the dispatch. `place` returns the batch on the devices. The caller sets the record's `result`.
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
