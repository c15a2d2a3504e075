"""One training step: loss, gradient, update and gather in a single compiled program."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from ..config import Config, check_count
from ..stages.batch import place_batch
from ..stages.gradients import loss_and_grads
from ..stages.loss import Loss
from ..stages.storage import in_storage, read
from ..stages.update import advance, check_params, check_state, divide, undivide
from .guard import keep_old, next_guard, refuse
from .state import ZeroState


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


def step_once(
    config: Config, options: StepOptions, loss: Loss, state: ZeroState, batch: Any, args: tuple
) -> tuple[ZeroState, dict]:
    """Differentiate, update, and gather what the stage keeps whole; traced under jit."""
    plan, guard = state.plan, state.guard
    check_params(config, plan, state.params)
    check_state(config, plan, state.opt_state)
    stored = read(state.params, plan.layout.params)
    found = loss_and_grads(
        config,
        plan.layout,
        plan.parts,
        loss,
        stored,
        batch,
        args,
        mutable=state.mutable,
        scale=guard.scale if scales(config) else 1.0,
        accumulate=options.accumulate,
    )
    old = divide(config, plan, state.params)
    moved, opt_state = advance(config, plan, found.grads, state.opt_state, old, {"value": found.loss})
    mutable, skipped = found.mutable, jnp.zeros((), bool)
    if guarded(config, options, loss):
        # A norm that is not finite makes any update worthless, be it an element that overflowed or their sum.
        judges = skips_nonfinite(config, options)
        finite = jnp.isfinite(found.squares) if judges else jnp.ones(found.squares.shape, bool)
        guard = next_guard(guard, config.precision, finite, found.weighable)
        skipped = guard.skips > 0
        before = (old, state.opt_state, state.mutable)
        moved, opt_state, mutable = keep_old(~skipped, (moved, opt_state, mutable), before)
    params = in_storage(undivide(config, plan, moved, stored), plan.layout)
    metrics = {"loss": found.loss, "grad_norm": jnp.sqrt(found.squares.sum()), "skipped": skipped}
    if loss.has_aux:
        metrics["aux"] = found.aux
    if scales(config):
        metrics["loss_scale"] = state.guard.scale
    if options.leaf_norms:
        metrics["grad_norms"] = jax.tree.unflatten(plan.trained.treedef, list(jnp.sqrt(found.squares)))
    step = state.step + jnp.where(skipped, 0, 1)
    return ZeroState(step, params, opt_state, guard, mutable, plan), metrics


def scales(config: Config) -> bool:
    """Whether the loss is scaled."""
    return config.precision is not None and config.precision.loss_scale is not None


def skips_nonfinite(config: Config, options: StepOptions) -> bool:
    """Whether a step whose gradients are not finite is skipped."""
    return scales(config) or options.skip_nonfinite or options.max_skips is not None


def guarded(config: Config, options: StepOptions, loss: Loss) -> bool:
    """Whether a step may be skipped: if not, the compiler sees nothing of the guard."""
    return skips_nonfinite(config, options) or loss.weighted


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

        self._jitted = jax.jit(step, donate_argnums=0)

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
            ValueError: If the batch cannot be cut, the state is of other parameters, or
                the weights of a step before were negative or summed to zero.
            FloatingPointError: If more than `max_skips` steps in a row were skipped.
        """
        self._check(state)
        watched = self._options.max_skips is not None or self._loss.weighted
        if watched and not isinstance(state.guard.skips, jax.core.Tracer):
            refuse(state.guard, state.plan.trained, self._options.max_skips)
        return self._jitted(state, place_batch(self._config, batch, self._options.accumulate), *args)

    def lower(self, state: ZeroState, batch: Any, *args: Any):
        """Lower without running, as `jax.jit(...).lower` does; shapes are enough."""
        self._check(state)
        return self._jitted.lower(state, place_batch(self._config, batch, self._options.accumulate), *args)

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
