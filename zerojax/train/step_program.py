"""The traced functions of a training step for gradients, update and metrics, and their compilation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from zerojax import names
from zerojax.comm.collectives import UPDATE
from zerojax.comm.mesh import constrain, on_auto_mesh, replicated, row_shardings, with_types
from zerojax.config import Config, check_count, check_flag
from zerojax.layout.leaf import replace_items
from zerojax.optim.update import (
    ResidentResults,
    StreamedInputs,
    check_params,
    check_state,
    resident_update,
    roll_back,
    shard_for_update,
    state_to_device,
    state_to_host,
    unshard_after_update,
)
from zerojax.placement.storage import cast, in_storage, pin_to_plan, return_to_host, storage_leaves, to_device
from zerojax.train.arguments import batch_shardings
from zerojax.train.gradients import StepGradients, check_trained, gradients_of_one
from zerojax.train.loss import Loss, LossInputs, ScalingState, View
from zerojax.train.state import ZeroState


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a training step. `ZeroTransformation.train_step` describes its arguments of the same names."""

    accumulate: int = 1
    skip_nonfinite: bool = False
    max_skips: int | None = None
    leaf_norms: bool = False
    timeout: float | None = None
    memory: float | str | None = None
    compiler_options: Mapping[str, Any] | Literal["auto"] = "auto"

    def __post_init__(self):
        """Raise an error if a count, the timeout or the memory has a wrong type or is out of range."""
        if self.compiler_options != "auto" and not isinstance(self.compiler_options, Mapping):
            raise TypeError(
                f'compiler_options is "auto", or a dict of XLA\'s options, such as {{"xla_gpu_..._limit": 2}}, and not '
                f"{self.compiler_options!r}. With {{}} the step has no options."
            )
        for name, value in self.users_options.items():
            if not (isinstance(name, str) and isinstance(value, str | bool | int | float)):
                raise TypeError(
                    f"compiler_options has {name!r}: {value!r}. Names of options are str, and their values are str, "
                    f"bool, int or float."
                )
        if self.memory is not None and self.memory != "auto":
            from zerojax.units import parse_bytes

            object.__setattr__(self, "memory", parse_bytes("train_step(memory=)", self.memory, least=1))
        check_count("accumulate", self.accumulate, "microbatches", least=1)
        for name in ("skip_nonfinite", "leaf_norms"):
            check_flag(f"train_step({name}=)", getattr(self, name))
        if self.max_skips is not None:
            check_count("max_skips", self.max_skips, "steps", least=0)
        if self.timeout is not None and (isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float)):
            raise TypeError(f"timeout is a number of seconds, such as 600, not {self.timeout!r}.")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be above 0 seconds. float('inf') sets no limit.")

    @property
    def users_options(self) -> Mapping[str, Any]:
        return {} if isinstance(self.compiler_options, str) else self.compiler_options


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The functions of a training step that `jax.jit` traces. They take and return a `ZeroState`."""

    config: Config
    options: StepOptions
    loss: Loss

    @property
    def name(self) -> str:
        return getattr(self.loss.fn, "__name__", "a loss")

    @property
    def compiler_options(self) -> Mapping[str, Any]:
        """Return the options of XLA for the step's program. Updates of offloaded state have only `users_options`."""
        needs_none = not self.config.data.across and self.config.mesh.size <= 32
        if self.options.compiler_options != "auto" or needs_none:
            return self.options.users_options
        from zerojax.config.tuning import options_of_mesh

        return options_of_mesh(self.config)

    @property
    def scales_loss(self) -> bool:
        return self.config.precision is not None and self.config.precision.loss_scale is not None

    @property
    def skips_nonfinite(self) -> bool:
        return self.scales_loss or self.options.skip_nonfinite or self.options.max_skips is not None

    @property
    def may_skip(self) -> bool:
        """Return whether a step can be skipped. Otherwise the program has no code for skipping."""
        return self.skips_nonfinite or self.loss.weighted

    def check_state(self, state: Any) -> None:
        """Raise an error if `state` is not a `ZeroState`, or if only one of `state` and the loss has mutable state."""
        if not (isinstance(state, ZeroState) and (state.mutable is not None) == self.loss.mutable):
            from zerojax.train.moved_state import raise_unusable_state

            raise_unusable_state(state, self.loss.mutable)

    def step(self, state: ZeroState, batch: Any, *args: Any) -> tuple[ZeroState, dict]:
        """Run a whole step: differentiate, update, and gather the parameters that the stage replicates."""
        config, plan = self.config, state.plan
        check_state(plan, state.opt_state)
        leaves = jax.tree.leaves(state_to_device(config, plan, state.opt_state))
        on_device = dataclasses.replace(state, opt_state=leaves)
        new, metrics, updated = self.resident_step(on_device, batch, *args)
        opt_state = state_to_host(config, plan, jax.tree.unflatten(plan.state_def, updated.state))
        return dataclasses.replace(new, params=in_storage(updated.params, plan.layout), opt_state=opt_state), metrics

    def resident_step(self, state: ZeroState, batch: Any, *args: Any) -> tuple[ZeroState, dict, StreamedInputs]:
        """Run the part of a step that does not need offloaded state, and return `(state, metrics, inputs)`.

        `state.opt_state` must be a list with one array per leaf, and None for each offloaded leaf. The returned state
        has no parameters and no optimizer state. `inputs` has the parameters and state that are updated already, and
        what the streamed update needs to compute the others. If nothing is offloaded, there are no others.
        """
        done = self._gradients(state, batch, args)
        grads = cast(done.gradients.grads, [leaf.dtype for leaf in state.plan.grads])
        with jax.named_scope(UPDATE):
            run = resident_update
            if self.config.state is not None and not state.plan.offloaded:
                from zerojax.streaming.resident_chunks import update_in_chunks as run
            resident = run(self.config, state.plan, grads, state.opt_state, done.old, done.gradients.loss)
        return self.finished(state, done, resident)

    def finished(
        self, state: ZeroState, done: "Differentiated", resident: ResidentResults
    ) -> tuple[ZeroState, dict, StreamedInputs]:
        """Return the results of `resident_step`. The update of a skipped step is undone. Arrays in files are None."""
        config, plan = self.config, state.plan
        updated, leaves, mutable = resident.params, resident.state, done.gradients.mutable
        metrics = self.metrics(state, done, jax.tree.unflatten(plan.state_def, leaves))
        if self.may_skip:
            old = ({i: to_device(done.old[i]) for i in updated}, state.opt_state, state.mutable)
            updated, leaves, mutable = roll_back(~done.skipped, (updated, leaves, mutable), old)
        if self.options.leaf_norms and len(updated) == len(plan.grads):
            from zerojax.train.optional_outputs import norms_of_update

            metrics |= norms_of_update(plan, done.old, updated)
        on_host = return_to_host(config, updated, plan.trained.params)
        params = unshard_after_update(config, plan, [on_host.get(i) for i in range(len(plan.grads))], done.stored)
        pending = {i: x for i, x in enumerate(done.old) if i not in updated and x is not None}
        grads = {i: x for i in resident.grads if (x := done.gradients.grads[i]) is not None}
        skipped = done.skipped if self.may_skip else None
        inputs = StreamedInputs(params, pending, leaves, grads, resident.shared, skipped)
        with jax.named_scope(UPDATE):
            step = state.step + jnp.where(done.skipped, 0, 1)
        return ZeroState(step, None, None, done.scaling, mutable, plan), metrics, inputs

    def _gradients(self, state: ZeroState, batch: Any, args: tuple) -> "Differentiated":
        """Differentiate the loss, and decide whether the step is skipped."""
        config, plan, scaling = self.config, state.plan, state.scaling
        check_params(config, plan, state.params)
        stored = pin_to_plan(config, storage_leaves(state.params, plan.layout.params), plan.layout.params)
        view = View(config, plan.layout, plan.grads, self.loss, self.options.accumulate)
        given = LossInputs(stored, state.mutable, batch, args)
        gradients = loss_and_grads(view, given, scaling.scale if self.scales_loss else 1.0)
        scaling, skipped = self.next_scaling(scaling, gradients.squares, gradients.weights_valid)
        values = gradients.overwritten
        if self.may_skip:
            values = roll_back(~skipped, values, [stored[i] for i in plan.layout.overwritten])
        stored = replace_items(stored, plan.layout.overwritten, values)
        old = shard_for_update(config, plan, in_storage(stored, plan.layout))
        return Differentiated(gradients, stored, old, scaling, skipped)

    def next_scaling(self, scaling: ScalingState, squares: Array, weights_valid: Array) -> tuple[ScalingState, Array]:
        """Return the new `ScalingState`, and whether to skip the step. `StepGradients` describes the two arrays."""
        if not self.may_skip:
            return scaling, jnp.zeros((), bool)
        from zerojax.train.loss_scaling import update_scaling

        # The sum of squares is not finite if an element is not, or if the norm overflows. Skip in both cases.
        finite = jnp.isfinite(squares) if self.skips_nonfinite else jnp.ones(squares.shape, bool)
        new = update_scaling(scaling, self.config.precision, finite=finite, weights_valid=weights_valid)
        return new, new.skips > 0

    @jax.named_scope(names.GRAD_NORM)
    def metrics(self, state: ZeroState, done: "Differentiated", opt_state: Any) -> dict:
        """Return the step's metrics. `opt_state` is the updated optimizer state, even if the step will be skipped."""
        gradients = done.gradients
        metrics = {"loss": gradients.loss, "grad_norm": jnp.sqrt(gradients.squares.sum()), "skipped": done.skipped}
        if self.loss.has_aux:
            metrics["aux"] = gradients.aux
        if self.scales_loss:
            metrics["loss_scale"] = state.scaling.scale
        if self.options.leaf_norms:
            metrics["grad_norms"] = jax.tree.unflatten(state.plan.trained.treedef, list(jnp.sqrt(gradients.squares)))
        return metrics | _learning_rate(opt_state)


def loss_and_grads(view: View, given: LossInputs, scale: Float[Array, ""] | float) -> StepGradients:
    """Return the mean loss and its gradient over all devices. Parameters and gradients are in storage shape.

    The batch axes divide dim 0 of the batch, and each device divides its rows into microbatches. `scale` is the loss
    scale: the backward pass uses the scaled loss, and the gradients are divided by `scale`.
    """
    config, layout = view.config, view.layout
    check_trained(layout)
    scale = jnp.asarray(scale, jnp.float32)
    if config.view == "global" or config.batch_spec is not None:
        batch = lax.with_sharding_constraint(given.batch, batch_shardings(config, config.mesh, given.batch))
        given = given._replace(batch=batch)
    if view.is_one_loss:
        found = gradients_of_one(view, given, scale)
    else:
        from zerojax.train.several_losses import gradients_of_several

        found = gradients_of_several(view, given, scale)
    if view.loss.has_aux:
        from zerojax.train.optional_outputs import whole_aux

        found = found._replace(aux=whole_aux(found.aux, found.rows))
    if config.view == "device":
        return found
    constrained = [constrain(config.mesh, *pair) for pair in zip(found.grads, view.grads, strict=True)]
    # Keep the mutable state replicated. If the compiler sharded it, the next step would have to be compiled again.
    mutable = lax.with_sharding_constraint(found.mutable, replicated(config.mesh))
    pairs = zip(found.overwritten, layout.overwritten, strict=True)
    values = [constrain(config.mesh, x, layout.params[i]) for x, i in pairs]
    return found._replace(grads=constrained, mutable=mutable, overwritten=values)


def _learning_rate(opt_state: Any) -> dict:
    """Return a dict with the learning rate of `optax.inject_hyperparams`, or {} unless there is exactly one rate."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    names = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]
    rates = [x for name, x in names if f".{name}".endswith(".hyperparams.learning_rate")]
    # The rate is stored flat if a parameter is called `learning_rate`.
    return {"learning_rate": rates[0].ravel()[0]} if len(rates) == 1 else {}


class Differentiated(NamedTuple):
    """The intermediate results of a step after its backward pass."""

    gradients: StepGradients  # the gradients over all devices and microbatches
    stored: list  # one stored array per parameter; overwritten parameters have their new values
    old: list  # the trained parameters before the update, sharded for the update
    scaling: ScalingState  # the loss scale, and the record of skipped steps, after this step
    skipped: Any  # whether the step is skipped


class JittedStep:
    """An `Executor` that runs a step as one compiled program. The program donates the state."""

    def __init__(self, program: StepProgram):
        self.program = program

    def step(self, state: ZeroState, batch: Any, *args: Any) -> tuple[ZeroState, dict]:
        """Run `StepProgram.step` with Auto mesh axes. `jax.jit` traces this method."""
        config = self.program.config

        def shardings(returned):
            metrics = row_shardings(config.mesh, config.data, returned[1], batch)
            return ZeroState.shardings(config, state.plan), metrics

        return on_auto_mesh(config.user_mesh, self.program.step, state, batch, *with_types(args), shardings=shardings)

    @functools.cached_property
    def whole(self) -> Any:
        """Return the jitted `step`. It is jitted late, because a process may unpickle a step before JAX has devices."""
        return self.jit(self.step)

    def jit(self, step: Callable) -> Any:
        """Return `step` jitted with this step's compiler options. The result donates its first argument, a state."""
        return jax.jit(step, donate_argnums=0, compiler_options=dict(self.program.compiler_options) or None)

    def run(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        return self.whole(state, rows, *args)

    def inside(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, Any]:
        """Run the step inside of a program that JAX is tracing. Only the outer program can have compiler options."""
        options = self.program.options
        if options.users_options:
            raise TypeError(
                "train_step(compiler_options=) is for a program of its own, and here the step is a part of another "
                "program. Pass the options to the jax.jit that calls the step: compiler_options="
                f"{dict(options.users_options)}."
            )
        return self._nested(state, rows, *args)

    @functools.cached_property
    def _nested(self) -> Any:
        # A jitted function with compiler options cannot be called in another one. The outer program donates.
        return jax.jit(self.step)

    def trace(self, state: ZeroState, rows: Any, args: tuple) -> Any:
        return self.whole.trace(state, rows, *args)

    def lower_update(self, state: ZeroState) -> list[Any]:
        return []

    def with_loss(self, loss: Loss) -> "JittedStep":
        return JittedStep(dataclasses.replace(self.program, loss=loss))
