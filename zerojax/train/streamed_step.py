"""Run a training step whose optimizer state, or a part of it, is in host memory or on disk.

The first program does everything except the update of offloaded state. Then `zerojax.streaming` runs this update.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from zerojax.comm.mesh import on_auto_mesh, with_types
from zerojax.layout.leaf import is_chunked
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.optim.update import check_state
from zerojax.placement.storage import in_storage
from zerojax.streaming.stores import store_for
from zerojax.streaming.stream import StreamedUpdate
from zerojax.train.loss import Loss
from zerojax.train.state import ZeroState
from zerojax.train.step_program import JittedStep, StepProgram


class StreamedStep(JittedStep):
    """The executor of a step with offloaded state. If the sharding plan offloads nothing, the step is one program.

    `updates(plan)` returns the `StreamedUpdate` for a sharding plan.
    """

    def __init__(self, program: StepProgram, updates: Callable[[ShardingPlan], StreamedUpdate] | None = None):
        super().__init__(program)
        options = program.options.users_options
        stream = functools.cache(lambda plan: StreamedUpdate(program.config, plan, options))
        self.updates = stream if updates is None else updates

    @functools.cached_property
    def resident(self) -> Any:
        """Return the jitted `StepProgram.resident_step`, which does not need offloaded state."""
        return self.jit(self.program.resident_step)

    def run(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        self.program.config.offload.require_jit()
        if not state.plan.offloaded:
            return super().run(state, rows, args)
        return on_auto_mesh(self.program.config.user_mesh, self._stream, state, rows, with_types(args))

    def _stream(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        plan = state.plan
        check_state(plan, state.opt_state)
        leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
        store = store_for(self.program.config, plan, leaves)
        new, metrics, begun = self.resident(state.replace(opt_state=resident_state(state)), rows, *args)
        params, held = self.updates(plan).run(begun, store)
        opt_state = jax.tree.unflatten(plan.state_def, held)
        return new.replace(params=in_storage(params, plan.layout), opt_state=opt_state), metrics

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        """Trace the first program. The arguments may be shapes."""
        if not state.plan.offloaded:
            return super().trace(state, rows, args)
        resident = state.replace(opt_state=resident_state(state))
        return on_auto_mesh(self.program.config.user_mesh, self.resident.trace, resident, rows, *with_types(args))

    def lower_update(self, state: ZeroState) -> list[Any]:
        if not state.plan.offloaded:
            return []
        return on_auto_mesh(self.program.config.user_mesh, self.updates(state.plan).lower)

    def with_loss(self, loss: Loss) -> "StreamedStep":
        """Return an executor of the same step with another loss function, and with the same update."""
        return StreamedStep(dataclasses.replace(self.program, loss=loss), self.updates)


def resident_state(state: ZeroState) -> list:
    """Return the leaves of the optimizer state that are on the device, and None for each offloaded leaf."""
    return [None if is_chunked(x) else x for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked)]
