"""One training step: loss, gradient, update and gather in a single compiled program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from zerojax.config import Config, check_count
from zerojax.layout.chunked import is_chunked
from zerojax.offload.host import to_device
from zerojax.optim.checks import check_params, check_state
from zerojax.optim.rollback import roll_back
from zerojax.optim.state_memory import state_to_device, state_to_host
from zerojax.optim.update import apply_update, shard_for_update, unshard_after_update
from zerojax.placement.storage import cast, in_storage, read, return_to_host
from zerojax.streaming.resident_update import resident_update
from zerojax.streaming.stores import store_for
from zerojax.streaming.stream import StreamedUpdate, UpdateInputs
from zerojax.train.batch import place_batch
from zerojax.train.gradients import Gradients, loss_and_grads
from zerojax.train.loss import Loss
from zerojax.train.loss_scaling import ScalingState, raise_if_stuck, update_scaling
from zerojax.train.state import ZeroState


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How a training step goes about it.

    Attributes:
        accumulate: Microbatches a device and step; at least 1.
        skip_nonfinite: Whether a step whose gradients are not finite leaves the state as it is;
            implied by `max_skips`.
        max_skips: How many such steps in a row are borne; None is any number.
        leaf_norms: Whether metrics have the norm of each parameter's gradient.

    Raises:
        TypeError: If a count is no integer.
        ValueError: If a count is out of range.
    """

    accumulate: int = 1
    skip_nonfinite: bool = False
    max_skips: int | None = None
    leaf_norms: bool = False

    def __post_init__(self):
        """Check the counts."""
        check_count("accumulate", self.accumulate, "microbatches", least=1)
        if self.max_skips is not None:
            check_count("max_skips", self.max_skips, "steps", least=0)


class Passes(NamedTuple):
    """What is known of a step once its gradients are there.

    Attributes:
        found: Loss and gradients.
        stored: The parameters before it; storage shape.
        old: Those that are trained, divided as their gradients are.
        guard: After it.
        skipped: Whether it leaves the state as it is.
    """

    found: Gradients
    stored: list
    old: list
    scaling: ScalingState
    skipped: Any


def passes(config: Config, options: StepOptions, loss: Loss, state: ZeroState, batch: Any, args: tuple) -> Passes:
    """Differentiate, and judge what was found; traced under jit."""
    plan, scaling = state.plan, state.scaling
    check_params(config, plan, state.params)
    stored = read(state.params, plan.layout.params)
    found = loss_and_grads(
        config,
        plan.layout,
        plan.grads,
        loss,
        stored,
        batch,
        args,
        mutable=state.mutable,
        scale=scaling.scale if scales(config) else 1.0,
        accumulate=options.accumulate,
    )
    skipped = jnp.zeros((), bool)
    if may_skip(config, options, loss):
        # A norm that is not finite makes any update worthless, be it an element that overflowed or their sum.
        judges = skips_nonfinite(config, options)
        finite = jnp.isfinite(found.squares) if judges else jnp.ones(found.squares.shape, bool)
        scaling = update_scaling(scaling, config.precision, finite, found.weights_valid)
        skipped = scaling.skips > 0
    return Passes(found, stored, shard_for_update(config, plan, state.params), scaling, skipped)


def step_once(
    config: Config, options: StepOptions, loss: Loss, state: ZeroState, batch: Any, args: tuple
) -> tuple[ZeroState, dict]:
    """Differentiate, update, and gather what the stage keeps whole; traced under jit."""
    plan = state.plan
    check_state(config, plan, state.opt_state)
    done = passes(config, options, loss, state, batch, args)
    held = state_to_device(config, plan, state.opt_state)
    moved, opt_state = apply_update(config, plan, done.found.grads, held, done.old, {"value": done.found.loss})
    mutable = done.found.mutable
    if may_skip(config, options, loss):
        before = ([to_device(x) for x in done.old], held, state.mutable)
        moved, opt_state, mutable = roll_back(~done.skipped, (moved, opt_state, mutable), before)
    home = return_to_host(config, dict(enumerate(moved)), plan.trained.params)
    params = in_storage(unshard_after_update(config, plan, list(home.values()), done.stored), plan.layout)
    new = ended(state, done, params, state_to_host(config, plan, opt_state), mutable)
    return new, metrics_of(config, options, loss, state, done)


def step_begun(
    config: Config, options: StepOptions, loss: Loss, state: ZeroState, batch: Any, args: tuple
) -> tuple[ZeroState, dict, UpdateInputs]:
    """The part of a step that no offloaded state is needed for; traced under jit.

    Args:
        config: As for `step_once`, like the rest.
        options: How the step goes about it.
        loss: The loss function.
        state: Its `opt_state` is a list of the leaves on the device, with holes for the others.
        batch: Its rows.
        args: Further arguments of the loss.

    Returns:
        `(state, metrics, begun)`: of the state all but parameters and optimizer state,
        which `begun` has as far as they are known.
    """
    plan = state.plan
    done = passes(config, options, loss, state, batch, args)
    grads = cast(done.found.grads, [part.dtype for part in plan.grads])
    first = resident_update(config, plan, grads, state.opt_state, done.old, done.found.loss.astype(jnp.float32))
    moved, leaves, mutable = first.params, first.state, done.found.mutable
    if may_skip(config, options, loss):
        before = ({i: to_device(done.old[i]) for i in moved}, state.opt_state, state.mutable)
        moved, leaves, mutable = roll_back(~done.skipped, (moved, leaves, mutable), before)
    home = return_to_host(config, moved, plan.trained.params)
    params = unshard_after_update(config, plan, [home.get(i) for i in range(len(plan.grads))], done.stored)
    divided = {i: x for i, x in enumerate(done.old) if i not in moved}
    begun = UpdateInputs(
        params, divided, leaves, {i: done.found.grads[i] for i in first.grads}, first.shared, done.skipped
    )
    return ended(state, done, None, None, mutable), metrics_of(config, options, loss, state, done), begun


def ended(state: ZeroState, done: Passes, params: Any, opt_state: Any, mutable: Any) -> ZeroState:
    """The state after a step."""
    step = state.step + jnp.where(done.skipped, 0, 1)
    return ZeroState(step, params, opt_state, done.scaling, mutable, state.plan)


def metrics_of(config: Config, options: StepOptions, loss: Loss, state: ZeroState, done: Passes) -> dict:
    """What a step tells of itself."""
    found = done.found
    metrics = {"loss": found.loss, "grad_norm": jnp.sqrt(found.squares.sum()), "skipped": done.skipped}
    if loss.has_aux:
        metrics["aux"] = found.aux
    if scales(config):
        metrics["loss_scale"] = state.scaling.scale
    if options.leaf_norms:
        metrics["grad_norms"] = jax.tree.unflatten(state.plan.trained.treedef, list(jnp.sqrt(found.squares)))
    return metrics


def scales(config: Config) -> bool:
    """Whether the loss is scaled."""
    return config.precision is not None and config.precision.loss_scale is not None


def skips_nonfinite(config: Config, options: StepOptions) -> bool:
    """Whether a step whose gradients are not finite is skipped."""
    return scales(config) or options.skip_nonfinite or options.max_skips is not None


def may_skip(config: Config, options: StepOptions, loss: Loss) -> bool:
    """Whether a step may be skipped: if not, the compiler sees nothing of the guard."""
    return skips_nonfinite(config, options) or loss.weighted


def here_of(state: ZeroState) -> list:
    """The leaves of the optimizer's state that are on the device, with holes for the others."""
    return [None if is_chunked(x) else x for x in jax.tree.leaves(state.opt_state, is_leaf=is_chunked)]


class Step:
    """A jitted training step: `step(state, batch, *args) -> (state, metrics)`.

    The state passed in is donated: use the one that comes back.
    """

    def __init__(self, config: Config, loss: Loss, options: StepOptions):
        """Wrap one loss function; nothing is traced yet."""
        self._config = config
        self._loss = loss
        self._options = options

        def step(state, batch, *args):
            return step_once(config, options, loss, state, batch, args)

        def begun(state, batch, *args):
            return step_begun(config, options, loss, state, batch, args)

        self._jitted = jax.jit(step, donate_argnums=0)
        self._begun = jax.jit(begun, donate_argnums=0)
        self._streamed = functools.lru_cache(maxsize=4)(functools.partial(StreamedUpdate, config))

    @property
    def config(self) -> Config:
        """The transformation, and where its parts live."""
        return self._config

    @property
    def options(self) -> StepOptions:
        """How the step goes about it."""
        return self._options

    def under(self, config: Config) -> Step:
        """The same step under another configuration: another mesh, stage or precision."""
        return Step(config, self._loss, self._options)

    def __call__(self, state: ZeroState, batch: Any, *args: Any) -> tuple[ZeroState, dict]:
        """Do one step.

        Args:
            state: From `create` or the step before; donated.
            batch: Arrays with the global batch on dim 0, which the axis and the
                microbatches must divide.
            *args: Whole on every device; typed PRNG keys are folded with the device's index.

        Returns:
            The next state, and metrics: `loss` and `grad_norm`, float scalars; `skipped`,
            whether the step left the state as it was; `aux`, `loss_scale` and
            `grad_norms` (a tree) where they were asked for.

        Raises:
            TypeError: If `state` is no `ZeroState`, or a PRNG key is untyped.
            ValueError: If the batch cannot be cut, the state is of other parameters or used
                up, or the weights of a step before were negative or summed to zero.
            FloatingPointError: If more than `max_skips` steps in a row were skipped.
        """
        self._check(state)
        if not isinstance(state.step, jax.core.Tracer) and state.step.is_deleted():
            raise ValueError(
                "The state was used up by a step before. Go on with the one that step returned; if it failed instead, "
                "restore the last checkpoint."
            )
        watched = self._options.max_skips is not None or self._loss.weighted
        if watched and not isinstance(state.scaling.skips, jax.core.Tracer):
            raise_if_stuck(state.scaling, state.plan.trained, self._options.max_skips)
        rows = place_batch(self._config, batch, self._options.accumulate)
        if not state.plan.offloaded or isinstance(state.step, jax.core.Tracer):
            return self._jitted(state, rows, *args)
        return self._stream(state, rows, args)

    def _stream(self, state: ZeroState, rows: Any, args: tuple) -> tuple[ZeroState, dict]:
        """The step with its update streamed: one program up to the gradients, then one after the other."""
        plan = state.plan
        check_state(self._config, plan, state.opt_state)
        leaves = jax.tree.leaves(state.opt_state, is_leaf=is_chunked)
        store = store_for(self._config, plan, leaves)
        new, metrics, begun = self._begun(state.replace(opt_state=here_of(state)), rows, *args)
        params, held = self._streamed(plan).run(begun, store)
        opt_state = jax.tree.unflatten(plan.state_def, held)
        return new.replace(params=in_storage(params, plan.layout), opt_state=opt_state), metrics

    def lower(self, state: ZeroState, batch: Any, *args: Any):
        """Lower without running, as `jax.jit(...).lower` does; shapes are enough.

        With offloaded state this is the program up to the gradients; `lower_update` has the rest.
        """
        self._check(state)
        rows = place_batch(self._config, batch, self._options.accumulate)
        if not state.plan.offloaded:
            return self._jitted.lower(state, rows, *args)
        return self._begun.lower(state.replace(opt_state=here_of(state)), rows, *args)

    def lower_update(self, state: ZeroState) -> list[Any]:
        """The programs that update offloaded pieces on the device, lowered; one for each kind of piece.

        Args:
            state: From `create`; shapes are enough.

        Returns:
            What `jax.jit(...).lower` gives; empty if nothing is offloaded.
        """
        self._check(state)
        return self._streamed(state.plan).lower() if state.plan.offloaded else []

    def _check(self, state: ZeroState) -> None:
        if not isinstance(state, ZeroState):
            raise TypeError(
                f"The step takes a ZeroState, not {type(state).__name__}. Make one with tx.create(params). "
                f"In a loop of your own, use tx.value_and_grad and tx.update."
            )
        if self._loss.mutable and state.mutable is None:
            raise ValueError(
                "The loss function updates a mutable state. Give its start: tx.create(params, mutable=...)."
            )
        if not self._loss.mutable and state.mutable is not None:
            raise ValueError(
                "The state has mutable parts, which this step would not update. Pass mutable=True to train_step, "
                "or make the state without them."
            )
