"""A training step: place the batch, run the program, and return state and metrics.

`zerojax.train.attachments` lists the options whose code a step imports only if they are given.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from zerojax.comm.mesh import wait_if_simulated
from zerojax.config import Config
from zerojax.placement.storage import is_placed
from zerojax.train.arguments import NO_BATCH, place_batch, separated
from zerojax.train.loss import Loss
from zerojax.train.state import ZeroState
from zerojax.train.step_program import JittedStep, StepOptions, StepProgram

if TYPE_CHECKING:
    from zerojax.train.attachments import Executor, Guard, Metrics
    from zerojax.train.fitting import MemoryFit


def executor_of(program: StepProgram) -> "Executor":
    """Return the `Executor` that runs the step's programs. `Offload` and `memory=` decide which class it has."""
    offload, executor = program.config.offload, JittedStep(program)
    if offload is not None and offload.params == "disk":
        from zerojax.train.staged_step import StagedStep

        return StagedStep(program)
    if offload is not None:
        from zerojax.train.streamed_step import StreamedStep

        executor = StreamedStep(program)
    if program.options.memory is not None:
        from zerojax.train.fitting import FittedStep

        return FittedStep(executor)
    return executor


def guard_of(program: StepProgram, executor: "Executor") -> "Guard | None":
    """Return the guard that watches the calls of a step, or None with one process and no `timeout=`."""
    if program.options.timeout is None and jax.process_count() == 1:
        return None
    from zerojax.train.attachments import Guard

    return Guard(program, executor)


def ready_state(config: Config, state: ZeroState) -> ZeroState:
    """Return `state` on the mesh. Copy an array that occurs in two leaves, because a step donates every leaf.

    To find out whether the state is on the mesh, only `state.step` is checked. Checking every leaf would take time.

    Raises:
        ValueError: If the leaves are shapes, or an earlier step donated them. Also if the caller moved a state with
            offloaded leaves.
    """
    count = state.step
    if isinstance(count, jax.core.Tracer):
        return state
    if not (is_placed(config.mesh, count) and not count.is_deleted()):
        from zerojax.train.moved_state import placed_again

        state = placed_again(config, state)
    leaves = jax.tree.leaves(state)
    if len(set(map(id, leaves))) == len(leaves) and not any(isinstance(x, int | float) for x in leaves):
        return state
    from zerojax.train.moved_state import donatable

    return donatable(state)


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
        self.config, self.options = config, options
        self.program = StepProgram(config, options, loss)
        self._executor = executor_of(self.program)
        self._calls = itertools.count()

    def __reduce__(self):
        """Pickle only the arguments of `Step`. A process that unpickles the step compiles its programs again."""
        return Step, (self.config, self.program.loss, self.options)

    @functools.cached_property
    def _guard(self) -> "Guard | None":
        # Not made in `__init__`, because a process may unpickle this step before JAX knows the devices.
        return guard_of(self.program, self._executor)

    def under(self, config: Config) -> "Step":
        """Return a step with the same loss for `config`, which may have another mesh or stage.

        The options are the same, except that `memory=` is dropped, because it belongs to this step's mesh and stage.
        """
        return Step(config, dataclasses.replace(self.program.loss), dataclasses.replace(self.options, memory=None))

    def __repr__(self) -> str:
        return f"<training step of {self.program.name}: stage={self.config.stage}, mesh={dict(self.config.mesh.shape)}>"

    def __call__(
        self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any
    ) -> "tuple[ZeroState, Metrics]":
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
              state; the norm of each trained parameter before the update, and of its change. Both are of stored
              values, so an update norm is 0 if every change is too small for the stored type.
            - `learning_rate`: only with `optax.inject_hyperparams`; the learning rate that it stores in its state.

        Raises:
            TypeError: If `state` is not a `ZeroState`, there is no batch, or a PRNG key is untyped.
            ValueError: If the batch cannot be divided evenly, the state belongs to other parameters or was donated, the
                step does not fit into `memory`, or an earlier step had weights that were negative or summed to zero.
            FloatingPointError: If more than `max_skips` steps in a row were skipped.
        """
        config, program = self.config, self.program
        program.check_state(state)
        state = ready_state(config, state)
        watched = self.options.max_skips is not None or program.loss.weighted
        if watched and not isinstance(state.scaling.skips, jax.core.Tracer):
            from zerojax.train.loss_scaling import raise_if_stuck

            raise_if_stuck(state.scaling, state.plan.trained, self.options.max_skips)
        _, batch, args = separated((batch, *args), keywords)
        if isinstance(state.step, jax.core.Tracer):
            return self._executor.inside(state, place_batch(config, batch, self.options.accumulate), args)
        number = next(self._calls)  # `state.step` is not read, because that would wait for the devices
        if number == 0:
            self._warn_of_misplaced(state)
        place = functools.cache(lambda: place_batch(config, batch, self.options.accumulate))
        if self._guard is None:
            return self._run(number, state, place(), args)
        with self._guard.around(number, state, batch, place, args) as event:
            state, metrics = self._run(number, state, place(), args)
            event.result = metrics["loss"]
        return state, metrics

    def _run(self, number: int, state: ZeroState, rows: Any, args: tuple) -> "tuple[ZeroState, Metrics]":
        wait_if_simulated(self.config.mesh, state)
        try:
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                return self._executor.run(state, rows, args)
        except ValueError:
            from zerojax.placement.problems import unusable_named

            with unusable_named(self.config.mesh, donates=True, state=state):
                raise

    def _warn_of_misplaced(self, state: ZeroState) -> None:
        """Warn about arrays that are not sharded as planned. If no `PartitionSpec` differs, check nothing else."""
        plan, arrays = state.plan, jax.tree.leaves((state.params, state.opt_state))
        specs = [getattr(getattr(x, "sharding", None), "spec", None) for x in arrays]
        if specs != [leaf.spec for leaf in (*plan.layout.params, *plan.state)]:
            from zerojax.placement.problems import warn_of_misplaced

            parts = [("params", state.params, plan.layout.params), ("opt_state", state.opt_state, plan.state)]
            warn_of_misplaced(parts, self.config.data.batch, stacklevel=3)

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Return the options of XLA with which the step is compiled: the user's options, or options for the mesh."""
        return self.program.compiler_options

    @property
    def compiled_with(self) -> tuple[str, ...]:
        """Return one sentence that lists the compiler options, for `report` and `plan`; () if there are no options."""
        given = ", ".join(f"{name}={value}" for name, value in self.compiler_options.items())
        return (f"Compiled with the options {given}.",) if given else ()

    def trace(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Trace the step without lowering it, like `jax.jit(...).trace`. The arguments may be shapes.

        With offloaded state, trace only the first program, which does not update this state.
        """
        return self._executor.trace(state, *self._placed_rows(state, batch, args, keywords))

    def _placed_rows(self, state: ZeroState, batch: Any, args: tuple, keywords: dict[str, Any]) -> tuple[Any, tuple]:
        """Check the arguments of the step. Return the placed rows and the further arguments."""
        self.program.check_state(state)
        _, batch, args = separated((batch, *args), keywords)
        return place_batch(self.config, batch, self.options.accumulate), args

    def lower(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any):
        """Lower the step without running it, like `jax.jit(...).lower`. The arguments may be shapes.

        With offloaded state, lower only the first program. `lower_update` returns the programs that update this state.
        With `memory=`, the first call with new shapes compiles the step, to find out which activations fit.
        """
        return self.trace(state, batch, *args, **keywords).lower()

    def memory_fit(self, state: ZeroState, batch: Any = NO_BATCH, *args: Any, **keywords: Any) -> "MemoryFit":
        """Return the compilations of a step with `memory=`, and the bytes that its blocks save.

        The arguments may be shapes. The first call with new shapes compiles the step.

        Raises:
            ValueError: If the step has no `memory=`, or does not fit.
        """
        if self.options.memory is None:
            raise ValueError("The step has no memory= to fit. Make it with tx.train_step(loss, memory=...).")
        fitted: Any = self._executor
        return fitted.fit(state, *self._placed_rows(state, batch, args, keywords))

    def lower_update(self, state: ZeroState) -> list[Any]:
        """Lower the programs that update offloaded chunks on the device, and return one `jax.stages.Lowered` for each.

        Equal chunks share one program. The leaves of `state` may be shapes. If nothing is offloaded, the list is empty.
        """
        self.program.check_state(state)
        return self._executor.lower_update(state)
