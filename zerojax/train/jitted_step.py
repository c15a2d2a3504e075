"""Compile a whole step program, or only the part that does not need offloaded optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from zerojax.comm.explicit import on_auto_mesh, with_types
from zerojax.comm.mesh import row_shardings
from zerojax.layout.chunked import is_chunked
from zerojax.train.state import ZeroState
from zerojax.train.step_program import StepProgram


class JittedStep:
    """A step program under `jax.jit`. The functions donate their state.

    Attributes:
        whole: The whole step: `whole(state, batch, *args)` returns `(state, metrics)`.
        resident: `StepProgram.resident_step`, the part of a step that does not need offloaded state.
    """

    def __init__(self, program: StepProgram, compiler_options: Mapping[str, Any] = MappingProxyType({})):
        """Prepare the functions. They are compiled with `compiler_options` when they are first called."""
        self._config = config = program.config
        options = dict(compiler_options) or None  # with options, a jitted function cannot be called in another one

        def step(state, batch, *args):
            def shardings(returned):
                metrics = row_shardings(config.mesh, config.data, returned[1], batch)
                return ZeroState.shardings(config, state.plan), metrics

            return on_auto_mesh(config.user_mesh, program.step, state, batch, *with_types(args), shardings=shardings)

        self.whole = jax.jit(step, donate_argnums=0, compiler_options=options)
        self.resident = jax.jit(program.resident_step, donate_argnums=0, compiler_options=options)

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        """Trace the step, or only `resident` if the state has offloaded leaves. The arguments may be shapes."""
        if not state.plan.offloaded:
            return self.whole.trace(state, rows, *args)
        resident = state.replace(opt_state=resident_state(state))
        return on_auto_mesh(self._config.user_mesh, self.resident.trace, resident, rows, *with_types(args))


def resident_state(state: ZeroState) -> list:
    """Return the leaves of the optimizer state that are on the device, and None for each offloaded leaf."""
    return [None if is_chunked(x) else x for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked)]
