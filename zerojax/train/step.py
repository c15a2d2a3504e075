"""A training step: one compiled program that donates the state, then the streamed update of what is offloaded."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import jax
import jax.core
import numpy as np

from zerojax.comm.collectives import LABEL
from zerojax.comm.events import EVENTS
from zerojax.comm.explicit import on_auto_mesh, with_types
from zerojax.comm.mesh import row_shardings, wait_if_simulated
from zerojax.config import Config
from zerojax.layout.chunked import is_chunked
from zerojax.optim.checks import check_state
from zerojax.placement.misplaced import PlacementCheck
from zerojax.placement.storage import in_storage
from zerojax.streaming.stores import store_for
from zerojax.streaming.stream import StreamedUpdate
from zerojax.train.arguments import NO_BATCH, separated
from zerojax.train.batch import place_batch
from zerojax.train.loss import Loss
from zerojax.train.loss_scaling import raise_if_stuck
from zerojax.train.metrics import Metrics
from zerojax.train.refs import refs_named
from zerojax.train.same_run import SameCalls
from zerojax.train.state import ZeroState, ready_state
from zerojax.train.step_program import StepOptions, StepProgram
from zerojax.train.watchdog import Watchdog, limit_of


def resident_state(state: ZeroState) -> list:
    """Return the leaves of the optimizer state that are on the device, with None for offloaded leaves."""
    return [None if is_chunked(x) else x for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked)]


def shape_of(x: Any) -> Any:
    """Return an array's shape, type and sharding, or a value that is not an array unchanged."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)) if is_array else x


def labels_of(step: weakref.ref[Step]) -> list[str]:
    """Return the collectives of a step, if the step still exists."""
    found = step()
    return [] if found is None else found.collective_labels()


class Step:
    """A jitted training step: `step(state, batch, *args) -> (state, metrics)`.

    The state passed in is donated: use the one that comes back.

    Attributes:
        program: The step as a function to be traced.
    """

    def __init__(self, config: Config, loss: Loss, options: StepOptions):
        """Wrap one loss function; nothing is traced yet."""
        self.program = program = StepProgram(config, options, loss)

        def step(state, batch, *args):
            def shardings(returned):
                metrics = row_shardings(config.mesh, config.data, returned[1], batch)
                return ZeroState.shardings(config, state.plan), metrics

            return on_auto_mesh(config.user_mesh, program.step, state, batch, with_types(args), shardings=shardings)

        def resident_step(state, batch, *args):
            return program.resident_step(state, batch, args)

        self._jitted = jax.jit(step, donate_argnums=0)
        self._resident = jax.jit(resident_step, donate_argnums=0)
        self._streamed = functools.lru_cache(maxsize=4)(functools.partial(StreamedUpdate, config))
        self._name = getattr(loss.fn, "__name__", "a loss")
        self._calls, self._placed = itertools.count(), PlacementCheck()
        self._same = SameCalls(config, f"step with {self._name}", options)
        self._shapes: Any = None

    def __reduce__(self):
        """Pickle what the step was made of; another process compiles its own programs."""
        return Step, (self.config, self.program.loss, self.options)

    @property
    def config(self) -> Config:
        """Return the transformation and where its parts live."""
        return self.program.config

    @property
    def options(self) -> StepOptions:
        """Return the options of the step."""
        return self.program.options

    @functools.cached_property
    def _watchdog(self) -> Watchdog | None:
        # At the first step: before it, in a process that unpickles this one, the devices are not known.
        timeout = limit_of(self.options.timeout, self.config.mesh)
        return None if timeout is None else Watchdog(timeout, functools.partial(labels_of, weakref.ref(self)))

    def under(self, config: Config) -> Step:
        """Return the same step under another configuration: another mesh, stage or precision."""
        return Step(config, self.program.loss, self.options)

    def __repr__(self) -> str:
        """Return the loss, the stage and the mesh."""
        return f"<training step of {self._name}: stage={self.config.stage}, mesh={dict(self.config.mesh.shape)}>"

    def __call__(
        self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any
    ) -> tuple[ZeroState, Metrics]:
        """Do one step; simulated devices first finish the one before. Traces of `jax.profiler` number the calls.

        Args:
            state: From `create` or the step before; donated.
            batch: Arrays with the global batch on dim 0, which the axis and the
                microbatches must divide.
            *args: Replicated. Typed PRNG keys are folded where the loss is called several times: with the
                number of the microbatch, and in device view the device's index. What is no array and no
                number, such as a flag, is not traced: the step is compiled for each of its values.
            **keywords: Further arguments too. Without `batch`, those that have rows are the batch.

        Returns:
            The next state, and metrics: `loss` and `grad_norm`, float scalars; `skipped`,
            whether the step left the state as it was; `aux`, `loss_scale` and
            `grad_norms` (a tree) where they were asked for; `learning_rate`, that of this update, where
            the transformation's state has one.

        Raises:
            TypeError: If `state` is no `ZeroState`, there is no batch, or a PRNG key is untyped.
            ValueError: If the batch cannot be divided, the state is of other parameters or was
                donated, or the weights of a step before were negative or summed to zero.
            FloatingPointError: If more than `max_skips` steps in a row were skipped.
        """
        self._check(state)
        state = ready_state(self.config, state)
        watched = self.options.max_skips is not None or self.program.loss.weighted
        if watched and not isinstance(state.scaling.skips, jax.core.Tracer):
            raise_if_stuck(state.scaling, state.plan.trained, self.options.max_skips)
        _, batch, args = separated((batch, *args), keywords)
        if isinstance(state.step, jax.core.Tracer):
            with refs_named(self.config.view):
                return self._jitted(state, place_batch(self.config, batch, self.options.accumulate), *args)
        plan = state.plan
        is_new = self._same.is_first(plan, batch, args, state.step)
        parts = [("params", state.params, plan.layout.params), ("opt_state", state.opt_state, plan.state)]
        self._placed.first(parts, self.config.data.batch, stacklevel=2)
        number = next(self._calls)  # the state's own count is on the device, and to read it would be to wait
        if is_new and self._watchdog is not None:
            self._shapes = jax.tree.map(shape_of, (state, batch, args))
        with EVENTS.calling(f"step {number} with {self._name}", self.config.mesh) as call:
            if self._watchdog is None:
                state, metrics = self._run(number, state, batch, args, is_new=is_new)
            else:
                with self._watchdog.watching(number, compiles=is_new) as watched:
                    state, metrics = self._run(number, state, batch, args, is_new=is_new)
                    watched.result = metrics["loss"]
            call.result = metrics["loss"]
        return state, metrics

    def _run(
        self, number: int, state: ZeroState, batch: Any, args: tuple, *, is_new: bool
    ) -> tuple[ZeroState, Metrics]:
        rows = place_batch(self.config, batch, self.options.accumulate)
        wait_if_simulated(self.config.mesh, state)
        if is_new:
            self._same.require_same_program(lambda: self._lowered(state, rows, args))
        with jax.profiler.StepTraceAnnotation("train", step_num=number), refs_named(self.config.view):
            if not state.plan.offloaded:
                return self._jitted(state, rows, *args)
            return on_auto_mesh(self.config.user_mesh, self._stream, state, rows, with_types(args))

    def collective_labels(self) -> list[str]:
        """Return the collectives outside of loops of the compiled step, for the last arguments of new shapes."""
        state, batch, args = self._shapes
        text = self.lower(state, batch, *args).compile().as_text() or ""
        entry = text.partition("\nENTRY ")[2]
        found = dict.fromkeys(LABEL.findall(entry.replace("\\", "")))
        return [f"{kind.replace('_', '-')} of {leaves}" for kind, leaves in found]

    def _stream(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Metrics]:
        """Run the step with a streamed update: one program up to the gradients, then one per chunk."""
        plan = state.plan
        check_state(plan, state.opt_state)
        leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
        store = store_for(self.config, plan, leaves)
        new, metrics, begun = self._resident(state.replace(opt_state=resident_state(state)), rows, *args)
        params, held = self._streamed(plan).run(begun, store)
        opt_state = jax.tree.unflatten(plan.state_def, held)
        return new.replace(params=in_storage(params, plan.layout), opt_state=opt_state), metrics

    def trace(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Trace without lowering, as `jax.jit(...).trace` does: its `jaxpr` is the step's. Shapes are enough.

        With offloaded state this is the program up to the gradients.
        """
        self._check(state)
        _, batch, args = separated((batch, *args), keywords)
        return self._traced(state, place_batch(self.config, batch, self.options.accumulate), args)

    def _lowered(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        return self._traced(state, rows, args).lower()

    def _traced(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        with refs_named(self.config.view):
            if not state.plan.offloaded:
                return self._jitted.trace(state, rows, *args)
            resident = state.replace(opt_state=resident_state(state))
            return on_auto_mesh(self.config.user_mesh, self._resident.trace, resident, rows, *with_types(args))

    def lower(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Lower without running, as `jax.jit(...).lower` does; shapes are enough.

        With offloaded state this is the program up to the gradients; `lower_update` has the rest.
        """
        return self.trace(state, batch, *args, **keywords).lower()

    def lower_update(self, state: ZeroState) -> list[Any]:
        """Lower the programs that update offloaded chunks on the device, one for each kind of chunk.

        Args:
            state: From `create`; shapes are enough.

        Returns:
            What `jax.jit(...).lower` gives; empty if nothing is offloaded.
        """
        self._check(state)
        if not state.plan.offloaded:
            return []
        return on_auto_mesh(self.config.user_mesh, self._streamed(state.plan).lower)

    def _check(self, state: ZeroState) -> None:
        if not isinstance(state, ZeroState):
            raise TypeError(
                f"The step takes a ZeroState, not {type(state).__name__}. Make one with tx.create(params). "
                f"In a loop of your own, use tx.value_and_grad and tx.update."
            )
        if self.program.loss.mutable and state.mutable is None:
            raise ValueError(
                "The loss function updates a mutable state. Give its start: tx.create(params, mutable=...)."
            )
        if not self.program.loss.mutable and state.mutable is not None:
            raise ValueError(
                "The state has mutable parts, which this step would not update. Pass mutable=True to train_step, "
                "or make the state without them."
            )
