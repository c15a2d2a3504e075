"""A training step is one compiled program that donates its state. A streamed update of offloaded state follows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.core

from zerojax.comm.events import EVENTS
from zerojax.comm.mesh import on_auto_mesh, wait_if_simulated, with_types
from zerojax.config import Config
from zerojax.layout.leaf import is_chunked
from zerojax.optim.update import check_state
from zerojax.placement.storage import in_storage
from zerojax.placement.usable import PlacementCheck, unusable_named
from zerojax.train.arguments import NO_BATCH, place_batch, separated
from zerojax.train.fitting import MemoryFit, StepFitting
from zerojax.train.loss import Loss
from zerojax.train.same_run import SameCalls, require_same_programs
from zerojax.train.staged_step import StagedStep
from zerojax.train.state import ZeroState, check_is_state, donatable, ready_state
from zerojax.train.step_program import JittedStep, Metrics, StepOptions, StepProgram, resident_state
from zerojax.train.watchdog import Watchdog, limit_of


class Step:
    """A jitted training step: `step(state, batch, *args, **keywords) -> (state, metrics)`.

    The step donates its state, so continue with the state that it returns. `tx.train_step` creates a `Step`.

    Attributes:
        program: The functions that are traced and compiled.

    Examples:
        >>> step = tx.train_step(loss_fn)
        >>> state = tx.create(params)
        >>> for batch in batches:
        ...     state, metrics = step(state, batch)
        >>> float(metrics["loss"])
    """

    def __init__(self, config: Config, loss: Loss, options: StepOptions):
        self.program = program = StepProgram(config, options, loss)
        if options.compiler_options not in ("auto", {}) and config.params_on_disk:
            raise ValueError(
                'train_step(compiler_options=) is for one compiled program, and with Offload(params="disk") a step is '
                "many. Set the options for all programs in the environment variable XLA_FLAGS."
            )
        if options.memory is not None and config.params_on_disk:
            raise ValueError(
                f'train_step(memory={options.memory!r}) fits one compiled program, and with Offload(params="disk") a '
                f"step is many. Leave out memory=, and give the blocks of the loss budgets with zerojax.remat_within."
            )
        self._fitting = None if options.memory is None else StepFitting(program)

        def stream(plan):
            from zerojax.streaming.stream import StreamedUpdate

            return StreamedUpdate(config, plan, options.users_options)

        self._streamed = functools.lru_cache(maxsize=4)(stream)
        self._staged = functools.lru_cache(maxsize=4)(functools.partial(StagedStep, program))
        self._name = getattr(loss.fn, "__name__", "a loss")
        self._calls, self._placed = itertools.count(), PlacementCheck()
        self._same = SameCalls(config, f"step with {self._name}", options)

    def __reduce__(self):
        """Pickle only the arguments of `Step`. The process that unpickles the `Step` compiles its own programs."""
        return Step, (self.config, self.program.loss, self.options)

    @property
    def config(self) -> Config:
        return self.program.config

    @property
    def options(self) -> StepOptions:
        return self.program.options

    @functools.cached_property
    def _jitted(self) -> JittedStep:
        # Not in `__init__`, for the same reason as the watchdog.
        return JittedStep(self.program, self.program.compiler_options)

    @functools.cached_property
    def _within(self) -> JittedStep:
        # A jitted function with compiler options cannot be called in another one.
        return JittedStep(self.program)

    @functools.cached_property
    def _watchdog(self) -> Watchdog | None:
        # Do not do this in `__init__`, because a process may unpickle this step before JAX knows the devices.
        timeout = limit_of(self.options.timeout, self.config.mesh)
        return None if timeout is None else Watchdog(timeout, ends=self.options.timeout is not None)

    def under(self, config: Config) -> Step:
        """Return a step with the same loss for `config`, which may have another mesh or stage.

        The options are the same but for `memory=`, which belongs to the mesh and the stage of this step.
        """
        return Step(config, dataclasses.replace(self.program.loss), dataclasses.replace(self.options, memory=None))

    def __repr__(self) -> str:
        return f"<training step of {self._name}: stage={self.config.stage}, mesh={dict(self.config.mesh.shape)}>"

    def __call__(
        self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any
    ) -> tuple[ZeroState, Metrics]:
        """Do one training step.

        The call does not wait until the devices have finished. On simulated devices, it first waits for the previous
        step. Traces of `jax.profiler` show the number of each call.

        Args:
            state: The state that `create` or the previous step returned. It is donated.
            batch: Arrays with all rows on dim 0. The number of rows is a multiple of devices times microbatches.
            *args: Further arguments of the loss, which every device gets in full. Typed PRNG keys are folded with the
                index of the microbatch and, in device view, of the device. Values that are neither arrays nor numbers,
                such as flags, are not traced, so the step is compiled once per value.
            **keywords: Further keyword arguments of the loss. If `batch` is not given, the keyword arguments that
                contain arrays with rows are the batch.

        Returns:
            The next state, and a dict of metrics:

            - `loss`: the mean loss; float scalar.
            - `grad_norm`: the norm of the gradient of the mean loss, without the loss scale; float scalar.
            - `skipped`: whether the step left the state unchanged; bool scalar.
            - `aux`: only with `has_aux`; the combined auxiliary results of the loss.
            - `loss_scale`: only with a loss scale; the loss scale that the step used.
            - `grad_norms`: only with `leaf_norms`; the norm of each parameter's gradient.
            - `param_norms`, `update_norms`: only with `leaf_norms`, and without offloaded parameters or optimizer
              state; the norm of each trained parameter before the update, and of its change, as they are stored: if
              they are narrower than their master weights, a small change is rounded away.
            - `learning_rate`: only with `optax.inject_hyperparams`; the learning rate that it stores in its state.

        Raises:
            TypeError: If `state` is not a `ZeroState`, there is no batch, or a PRNG key is untyped.
            ValueError: If the batch cannot be divided evenly, the state belongs to other parameters or was donated, the
                step does not fit into `memory`, or an earlier step had weights that were negative or summed to zero.
            FloatingPointError: If more than `max_skips` steps in a row were skipped.
        """
        check_is_state(state, self.program.loss.mutable)
        state = ready_state(self.config, state)
        watched = self.options.max_skips is not None or self.program.loss.weighted
        if watched and not isinstance(state.scaling.skips, jax.core.Tracer):
            from zerojax.train.loss_scaling import raise_if_stuck

            raise_if_stuck(state.scaling, state.plan.trained, self.options.max_skips)
        _, batch, args = separated((batch, *args), keywords)
        if isinstance(state.step, jax.core.Tracer):
            self._check_one_program()
            if self._fitting is not None:
                raise TypeError(
                    "train_step(memory=) compiles the step to see what fits, which is not possible while it is traced. "
                    "Call the step as it is, outside of jax.jit, or use zerojax.remat_within in the loss instead."
                )
            if self.options.users_options:
                raise TypeError(
                    "train_step(compiler_options=) is for a program of its own, and here the step is a part of another "
                    "program. Pass the options to the jax.jit that calls the step: compiler_options="
                    f"{dict(self.options.users_options)}."
                )
            return self._within.whole(state, place_batch(self.config, batch, self.options.accumulate), *args)
        state = donatable(state)
        plan = state.plan
        is_new = self._same.is_new(plan, batch, args, state.step)
        parts = [("params", state.params, plan.layout.params), ("opt_state", state.opt_state, plan.state)]
        self._placed.first(parts, self.config.data.batch, stacklevel=2)
        number = next(self._calls)  # counted here, because reading `state.step` would wait for the device
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
        self.config.require_jit()
        rows = place_batch(self.config, batch, self.options.accumulate)
        wait_if_simulated(self.config.mesh, state)
        if is_new and not self.config.params_on_disk:
            lower = lambda: self._traced(state, rows, args).lower()
            require_same_programs(self.config, f"step with {self._name}", [lower])
        annotated = jax.profiler.StepTraceAnnotation("train", step_num=number)
        with annotated, unusable_named(self.config.mesh, donates=True, state=state):
            if self.config.params_on_disk:
                return on_auto_mesh(self.config.user_mesh, self._staged(state.plan).run, state, rows, with_types(args))
            jitted = self._fitted(state, rows, args)
            if not state.plan.offloaded:
                return jitted.whole(state, rows, *args)
            return on_auto_mesh(self.config.user_mesh, self._stream, jitted, state, rows, with_types(args))

    def _fitted(self, state: ZeroState, rows: Any, args: tuple) -> JittedStep:
        return self._jitted if self._fitting is None else self._fitting.chosen(state, rows, args)

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Return the options of XLA with which the step is compiled: those of the user, or those for the mesh."""
        return self.program.compiler_options

    @property
    def compiled_with(self) -> tuple[str, ...]:
        """Return a sentence about the compiler options, if there are any, for `report` and `plan`."""
        given = ", ".join(f"{name}={value}" for name, value in self.compiler_options.items())
        return (f"Compiled with the options {given}.",) if given else ()

    def _stream(self, jitted: JittedStep, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Metrics]:
        """Run a step with offloaded state. The first program leaves out this state, and one per chunk updates it."""
        from zerojax.streaming.stores import store_for

        plan = state.plan
        check_state(plan, state.opt_state)
        leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
        store = store_for(self.config, plan, leaves)
        new, metrics, begun = jitted.resident(state.replace(opt_state=resident_state(state)), rows, *args)
        params, held = self._streamed(plan).run(begun, store)
        opt_state = jax.tree.unflatten(plan.state_def, held)
        return new.replace(params=in_storage(params, plan.layout), opt_state=opt_state), metrics

    def trace(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Trace the step without lowering it, like `jax.jit(...).trace`. The arguments may be shapes.

        With offloaded state, trace only the first program, without the update of this state.
        """
        return self._traced(state, *self._placed_rows(state, batch, args, keywords))

    def _placed_rows(self, state: ZeroState, batch: Any, args: tuple, keywords: dict[str, Any]) -> tuple[Any, tuple]:
        """Check the arguments of a step that is one program. Return the placed rows and the further arguments."""
        check_is_state(state, self.program.loss.mutable)
        self._check_one_program()
        _, batch, args = separated((batch, *args), keywords)
        return place_batch(self.config, batch, self.options.accumulate), args

    def _check_one_program(self) -> None:
        if self.config.params_on_disk:
            raise TypeError(
                'With Offload(params="disk") a step is many programs, which Python runs while files are read and '
                "written. Call the step as it is, outside of jax.jit; there is no single program to trace or lower."
            )

    def _traced(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        return self._fitted(state, rows, args).trace(state, rows, args)

    def lower(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Lower the step without running it, like `jax.jit(...).lower`. The arguments may be shapes.

        With offloaded state, lower only the first program. `lower_update` returns the programs that update this state.
        With `memory=`, the first call with new shapes compiles the step to find the share that fits.
        """
        return self._traced(state, *self._placed_rows(state, batch, args, keywords)).lower()

    def memory_fit(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any) -> MemoryFit:
        """Return the compilations of a step with `memory=`, and the bytes that its blocks save.

        The arguments may be shapes. The first call with new shapes compiles the step.

        Raises:
            ValueError: If the step has no `memory=`, or does not fit.
        """
        if self._fitting is None:
            raise ValueError("The step has no memory= to fit. Make it with tx.train_step(loss, memory=...).")
        return self._fitting.fit(state, *self._placed_rows(state, batch, args, keywords))

    def lower_update(self, state: ZeroState) -> list[Any]:
        """Lower the programs that update offloaded chunks on the device, and return one `jax.stages.Lowered` for each.

        Equal chunks share one program. The leaves of `state` may be shapes. If nothing is offloaded, the list is empty.
        """
        check_is_state(state, self.program.loss.mutable)
        if not state.plan.offloaded:
            return []
        return on_auto_mesh(self.config.user_mesh, self._streamed(state.plan).lower)
