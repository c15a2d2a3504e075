"""What attaches to a training step from outside.

A step places the batch, runs its program, and returns state and metrics. `step`, `step_program` and `state` do this.
Everything else attaches in `executor_of` and `guard_of` of `step`. These functions import a module when its option is
given, or its condition holds, and only then:

| attached | by | option or condition | module |
|---|---|---|---|
| offloaded optimizer state | `Executor` | `Offload` | `streamed_step`, then `zerojax.streaming` |
| parameters on disk | `Executor` | `Offload(params="disk")` | `staged_step`, then `zerojax.staged` |
| activations that fit into memory | `Executor` around one of these | `memory=` | `fitting`, then `zerojax.budget` |
| the same calls on all processes, and a limit of time | `Guard` | several processes, or `timeout=` | `guard` |

Without an option, the executor is a `JittedStep`, and there is no guard. Smaller parts have no protocol, and are
imported where they are needed: norms per parameter (`leaf_norms`), compiler options for two groups of collectives
(`config.tuning`), a state that the caller moved (`moved_state`), and in `zerojax.placement` the warning of the first
call about misplaced arrays, and the name of an unusable array after an error.
"""

from __future__ import annotations

from typing import Any, Protocol, TypedDict

import jax

from zerojax.train.state import ZeroState


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
    """Runs the step of a `StepProgram`. The rows are placed, and the arguments are checked."""

    def run(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Metrics]:
        """Run a step, which donates the state, and return the next state and the metrics."""
        ...

    def inside(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Metrics]:
        """Run a step as a part of the program that is being traced, or raise a TypeError."""
        ...

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        """Trace the program of the step, or its first program, like `jax.jit(...).trace`. Shapes are enough."""
        ...

    def lower_update(self, state: ZeroState) -> list[Any]:
        """Lower the programs that update offloaded state. Shapes are enough."""
        ...
