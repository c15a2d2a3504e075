"""Trace, lower and describe a training step without running it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerojax.train.arguments import NO_BATCH, place_batch, separated
from zerojax.train.state import ZeroState
from zerojax.train.step_program import StepProgram

if TYPE_CHECKING:
    from zerojax.train.fitting import MemoryFit
    from zerojax.train.protocol import Executor


class AheadOfTime:
    """The methods of a `Step` that run nothing. `program` has the functions that are traced and compiled."""

    program: StepProgram
    _executor: Executor

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Return the options of XLA with which the step is compiled: those of the user, or those for the mesh."""
        return self.program.compiler_options

    @property
    def compiled_with(self) -> tuple[str, ...]:
        """Return a sentence about the compiler options, if there are any, for `report` and `plan`."""
        given = ", ".join(f"{name}={value}" for name, value in self.compiler_options.items())
        return (f"Compiled with the options {given}.",) if given else ()

    def trace(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Trace the step without lowering it, like `jax.jit(...).trace`. The arguments may be shapes.

        With offloaded state, trace only the first program, without the update of this state.
        """
        return self._executor.trace(state, *self._placed_rows(state, batch, args, keywords))

    def _placed_rows(self, state: ZeroState, batch: Any, args: tuple, keywords: dict[str, Any]) -> tuple[Any, tuple]:
        """Check the arguments of the step. Return the placed rows and the further arguments."""
        self.program.check_state(state)
        _, batch, args = separated((batch, *args), keywords)
        return place_batch(self.program.config, batch, self.program.options.accumulate), args

    def lower(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Lower the step without running it, like `jax.jit(...).lower`. The arguments may be shapes.

        With offloaded state, lower only the first program. `lower_update` returns the programs that update this state.
        With `memory=`, the first call with new shapes compiles the step to find the share that fits.
        """
        return self.trace(state, batch, *args, **keywords).lower()

    def memory_fit(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any) -> MemoryFit:
        """Return the compilations of a step with `memory=`, and the bytes that its blocks save.

        The arguments may be shapes. The first call with new shapes compiles the step.

        Raises:
            ValueError: If the step has no `memory=`, or does not fit.
        """
        if self.program.options.memory is None:
            raise ValueError("The step has no memory= to fit. Make it with tx.train_step(loss, memory=...).")
        fitted: Any = self._executor
        return fitted.fit(state, *self._placed_rows(state, batch, args, keywords))

    def lower_update(self, state: ZeroState) -> list[Any]:
        """Lower the programs that update offloaded chunks on the device, and return one `jax.stages.Lowered` for each.

        Equal chunks share one program. The leaves of `state` may be shapes. If nothing is offloaded, the list is empty.
        """
        self.program.check_state(state)
        return self._executor.lower_update(state)
