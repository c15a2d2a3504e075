"""The guard of a training step: the loss scale, and what happens when a gradient is not finite.

Such a step is skipped on every device, because the test is made on sums over all of them:
parameters, optimizer state and counts stay as they were, bit for bit.

References:
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config import DynamicScale, Precision
from ..layout.tree import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, PyTree

MOST_NAMED = 5


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "clean", "spared", "skips", "culprits", "unweighable"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Guard:
    """The part of a state that decides whether a step counts.

    Attributes:
        scale: What the next step multiplies its loss by; 1 without loss scaling.
        clean: Clean steps since the scale last changed.
        spared: Overflows since the scale was last raised that did not lower it.
        skips: Steps skipped in a row, the last one included.
        culprits: For each trained parameter, whether its gradient was not finite in the
            first of those steps.
        unweighable: Whether a step was skipped for weights that were negative or summed to zero.
    """

    scale: Float[Array, ""]
    clean: Int[Array, ""]
    spared: Int[Array, ""]
    skips: Int[Array, ""]
    culprits: Bool[Array, " trained"]
    unweighable: Bool[Array, ""]

    def pardoned(self) -> Guard:
        """The guard with its skipped steps forgotten; the scale stays."""
        forgotten = (self.skips, self.culprits, self.unweighable)
        skips, culprits, unweighable = jax.tree.map(jnp.zeros_like, forgotten)
        return dataclasses.replace(self, skips=skips, culprits=culprits, unweighable=unweighable)


def new_guard(precision: Precision | None, trained: int) -> Guard:
    """The guard of step 0, for a number of trained parameters."""
    scale = None if precision is None else precision.loss_scale
    first = scale.initial if isinstance(scale, DynamicScale) else scale or 1.0
    zero = jnp.zeros((), jnp.int32)
    return Guard(jnp.float32(first), zero, zero, zero, jnp.zeros(trained, bool), jnp.zeros((), bool))


def next_guard(guard: Guard, precision: Precision | None, finite: Bool[Array, " trained"], weighable: Array) -> Guard:
    """The guard after one step.

    Args:
        guard: Before it.
        precision: How the scale moves.
        finite: For each trained parameter, whether its gradient was finite.
        weighable: Whether the weights could be divided by; if not, the scale stays.
    """
    ok = finite.all() & weighable
    skips = jnp.where(ok, 0, guard.skips + 1)
    culprits = jnp.where(guard.skips == 0, ~finite, guard.culprits) & ~ok
    judged = dataclasses.replace(guard, skips=skips, culprits=culprits, unweighable=guard.unweighable | ~weighable)
    rule = None if precision is None else precision.loss_scale
    if not isinstance(rule, DynamicScale):
        return judged
    clean = jnp.where(ok, guard.clean + 1, 0)
    grows = clean >= rule.growth_interval
    raised = guard.scale * rule.factor
    raised = jnp.where(jnp.isfinite(raised), raised, guard.scale)
    falls = ~ok & (guard.spared + 1 >= rule.hysteresis)
    lowered = jnp.maximum(guard.scale / rule.factor, rule.floor)
    moved = dataclasses.replace(
        judged,
        scale=jnp.where(grows, raised, jnp.where(falls, lowered, guard.scale)),
        clean=jnp.where(grows, 0, clean),
        spared=jnp.where(grows, 0, jnp.where(ok | falls, guard.spared, guard.spared + 1)),
    )
    return jax.tree.map(functools.partial(jnp.where, weighable), moved, judged)


def keep_old(ok: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """The new arrays if the step counts, else the old ones, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def refuse(guard: Guard, trained: Layout, max_skips: int | None) -> None:
    """Stop a run that goes nowhere; with `max_skips`, waits for the step that made the guard.

    Raises:
        ValueError: If a step that is done had weights that were negative or summed to zero.
        FloatingPointError: If more than `max_skips` steps in a row were skipped, naming the
            first parameters whose gradients were not finite.
    """
    found: Any = guard.unweighable
    if (max_skips is not None or found.is_ready()) and found:
        raise ValueError(
            "The weights of a batch were negative or NaN, or summed to zero over all devices, so its mean does not "
            "exist. The step was skipped and left the state as it was. Return weights of at least 0 that are not all "
            "0: drop batches in which every token is masked. To go on without that batch: state.pardoned()."
        )
    if max_skips is None or (skips := int(guard.skips)) <= max_skips:
        return
    named = [leaf.path for leaf, bad in zip(trained.params, np.asarray(guard.culprits), strict=True) if bad]
    others = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    raise FloatingPointError(
        f"{skips} steps in a row were skipped because gradients were not finite, and max_skips={max_skips}. In the "
        f"first of them: params{', params'.join(named[:MOST_NAMED])}{others}. The loss scale is "
        f"{float(guard.scale):g}. The state is as it was before them: look for the cause in the data or the learning "
        f"rate, or go on from here with other batches and state.pardoned()."
    )
