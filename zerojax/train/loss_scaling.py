"""Update the loss scale, and record which steps are skipped because a gradient was not finite.

`StepProgram.next_scaling` decides whether a step is skipped, from sums over all devices, so that all devices skip the
same steps. `StepProgram.finished` then restores the old state, bit for bit (`roll_back` in `optim/update.py`).

References:
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from zerojax.config.precision import DynamicScale, Precision
from zerojax.layout.tree import Layout
from zerojax.train.loss import ScalingState

MAX_NAMED = 5


def update_scaling(
    scaling: ScalingState, precision: Precision | None, *, finite: Bool[Array, " trained"], weights_valid: Array
) -> ScalingState:
    """Return the `ScalingState` after a step with these `finite` gradients. Invalid weights do not change the scale."""
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


def raise_if_stuck(scaling: ScalingState, trained: Layout, max_skips: int | None) -> None:
    """Raise an error if more than `max_skips` steps in a row were skipped, or a step had invalid weights.

    With `max_skips`, wait for the step that computes `scaling`. With several processes, wait too, because all of them
    must raise the error. With one process and no `max_skips`, check the weights only if this step has finished.
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
        f"{float(scaling.scale):g}. The state is as it was before these steps. zerojax.compare(step, state, batch), or "
        f"the command zerojax compare, names the first operation that is not finite (docs/troubleshooting.md, 'My loss "
        f"is NaN'). To continue with other batches: state.reset_skips()."
    )
