"""Update the loss scale, and record which steps are skipped because a gradient was not finite.

A step tests sums over all devices, so all devices skip the same steps. In a skipped step,
`zerojax.optim.update.roll_back` restores the old state, bit for bit.

References:
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import names
from zerojax.config.precision import DynamicScale, Precision
from zerojax.layout.tree import Layout
from zerojax.train.loss import at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

MAX_NAMED = 5


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "clean", "hysteresis_count", "skips", "nonfinite", "weights_invalid"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class ScalingState:
    """The loss scale, and the record of skipped steps."""

    scale: Float[Array, ""]  # the factor by which the next step multiplies its loss; 1 without loss scaling
    clean: Int[Array, ""]  # number of steps without overflow since the last overflow or growth of the scale
    hysteresis_count: Int[Array, ""]  # number of overflows, since the scale last grew, that did not lower the scale
    # number of consecutive steps, up to the last step, that were skipped; 0 if the last step was not
    skips: Int[Array, ""]
    # for each trained parameter, whether its gradient was not finite in the first of the skipped steps
    nonfinite: Bool[Array, " trained"]
    weights_invalid: Bool[Array, ""]  # whether a step was skipped because weights were negative or summed to zero


def init_scaling(precision: Precision | None, trained: int) -> ScalingState:
    """Return the `ScalingState` for step 0. `trained` is the number of trained parameters."""
    scale = None if precision is None else precision.loss_scale
    first = scale.initial if isinstance(scale, DynamicScale) else scale or 1.0
    zero = jnp.zeros((), jnp.int32)
    return ScalingState(jnp.float32(first), zero, zero, zero, jnp.zeros(trained, bool), jnp.zeros((), bool))


def update_scaling(
    scaling: ScalingState, precision: Precision | None, *, finite: Bool[Array, " trained"], weights_valid: Array
) -> ScalingState:
    """Return the `ScalingState` after one step. If the weights of the loss were invalid, the scale is unchanged."""
    ok = finite.all() & weights_valid
    judged = dataclasses.replace(
        scaling,
        skips=jnp.where(ok, 0, scaling.skips + 1),
        nonfinite=jnp.where(scaling.skips == 0, ~finite, scaling.nonfinite) & ~ok,
        weights_invalid=scaling.weights_invalid | ~weights_valid,
    )
    rule = None if precision is None else precision.loss_scale
    if not isinstance(rule, DynamicScale):
        return judged
    clean = jnp.where(ok, scaling.clean + 1, 0)
    grows = clean >= rule.growth_interval
    raised = scaling.scale * rule.factor
    raised = jnp.where(jnp.isfinite(raised), raised, scaling.scale)
    count = scaling.hysteresis_count
    falls = ~ok & (count + 1 >= rule.hysteresis)
    lowered = jnp.maximum(scaling.scale / rule.factor, rule.floor)
    moved = dataclasses.replace(
        judged,
        scale=jnp.where(grows, raised, jnp.where(falls, lowered, scaling.scale)),
        clean=jnp.where(grows, 0, clean),
        hysteresis_count=jnp.where(grows, 0, jnp.where(ok | falls, count, count + 1)),
    )
    return jax.tree.map(functools.partial(jnp.where, weights_valid), moved, judged)


@jax.named_scope(names.MEAN)
def unscale(grads: Sequence[Array], factor: Array) -> list[Array]:
    """Multiply gradients by `factor`, in float32 or wider, to remove the loss scale."""
    wide = [at_least_float32(g) for g in grads]
    return [g * factor.astype(g.dtype) for g in wide]


def raise_if_stuck(scaling: ScalingState, trained: Layout, max_skips: int | None) -> None:
    """Raise an error if more than `max_skips` steps in a row were skipped, or a step had invalid weights.

    With `max_skips`, wait for the step that computes this state. With several processes, wait as well, because all of
    them must raise the error. Otherwise, check the weights only if that step has finished.

    Raises:
        ValueError: If a step had weights that were negative or summed to zero.
        FloatingPointError: If more than `max_skips` steps in a row were skipped.
    """
    invalid: Any = scaling.weights_invalid
    if (max_skips is not None or jax.process_count() > 1 or invalid.is_ready()) and invalid:
        raise ValueError(
            "The weights of a batch were negative or NaN, or summed to zero over all devices, so its mean does not "
            "exist. The step was skipped and left the state unchanged. Return weights of at least 0 that are not all "
            "0: drop batches in which every token is masked. To continue without that batch: state.reset_skips()."
        )
    if max_skips is None or (skips := int(scaling.skips)) <= max_skips:
        return
    named = [leaf.path for leaf, bad in zip(trained.params, np.asarray(scaling.nonfinite), strict=True) if bad]
    others = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    raise FloatingPointError(
        f"{skips} steps in a row were skipped because gradients were not finite, and max_skips={max_skips}. In the "
        f"first of them: params{', params'.join(named[:MAX_NAMED])}{others}. The loss scale is "
        f"{float(scaling.scale):g}. The state is as it was before these steps. Look for the cause in the data or the "
        f"learning rate, or continue with other batches and state.reset_skips()."
    )
