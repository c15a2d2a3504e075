"""One training step: loss, gradient, update and gather in a single compiled program."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..config import Config
from ..stages.gradients import Loss, loss_and_grads, place_batch
from ..stages.storage import read, storage_forms
from ..stages.update import check_params, check_state, divide, undivide, update
from .state import ZeroState


def step_once(config: Config, loss: Loss, state: ZeroState, batch: Any, args: tuple) -> tuple[ZeroState, dict]:
    """Differentiate, update, and gather what the stage keeps whole; traced under jit."""
    plan = state.plan
    layout, parts = plan.layout, plan.parts
    check_params(config, plan, state.params)
    check_state(config, plan, state.opt_state)
    stored = read(state.params, layout.params)
    value, aux, grads = loss_and_grads(config, layout, parts, loss, stored, batch, args)
    divided = divide(config, plan, state.params)
    updates, opt_state = update(config, plan, grads, state.opt_state, divided, {"value": value})
    moved: Any = optax.apply_updates(divided, updates)  # lists of arrays, which optax's types do not name
    params = undivide(config, plan, moved, storage_forms(layout.params))
    floats = [g for g in grads if jnp.issubdtype(g.dtype, jnp.inexact)]
    metrics = {"loss": value, "grad_norm": optax.tree.norm(floats)}
    if loss.has_aux:
        metrics["aux"] = aux
    return ZeroState(state.step + 1, params, opt_state, plan), metrics


class Step:
    """A jitted training step: `step(state, batch, *args) -> (state, metrics)`.

    The state passed in is donated: use the one that comes back.
    """

    def __init__(self, config: Config, loss: Loss):
        """Wrap one loss function; nothing is traced yet."""
        self._config = config

        def step(state, batch, *args):
            return step_once(config, loss, state, batch, args)

        self._jitted = jax.jit(step, donate_argnums=0)

    def __call__(self, state: ZeroState, batch: Any, *args: Any) -> tuple[ZeroState, dict]:
        """Do one step.

        Args:
            state: From `create` or the step before; donated.
            batch: Arrays with the global batch on dim 0, which the axis must divide.
            *args: Whole on every device; typed PRNG keys are folded with the device's index.

        Returns:
            The next state, and metrics: `loss` and `grad_norm`, float scalars, and `aux`.

        Raises:
            TypeError: If `state` is no `ZeroState`, or a PRNG key is untyped.
            ValueError: If the batch cannot be cut, or the state is of other parameters.
        """
        return self._jitted(self._checked(state), place_batch(self._config, batch), *args)

    def lower(self, state: ZeroState, batch: Any, *args: Any):
        """Lower without running, as `jax.jit(...).lower` does; shapes are enough."""
        return self._jitted.lower(self._checked(state), place_batch(self._config, batch), *args)

    def _checked(self, state: ZeroState) -> ZeroState:
        if not isinstance(state, ZeroState):
            raise TypeError(
                f"The step takes a ZeroState, not {type(state).__name__}. Make one with tx.create(params). "
                f"In a loop of your own, use tx.value_and_grad and tx.update."
            )
        return state
