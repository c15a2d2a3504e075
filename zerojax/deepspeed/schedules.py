"""DeepSpeed's learning rate schedules as functions of optax's count of updates.

DeepSpeed sets the rate of an update after the update before it. So the first two updates have the rate of step 0, and
the third has the rate of step 1.

References:
    DeepSpeed's documentation, "Learning Rate Schedulers".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def warmup_lr(
    max_lr: float = 1e-3, *, min_lr: float = 0.0, warmup_steps: int = 1000, log: bool = True
) -> Callable[..., Float[Array, ""]]:
    """Return `WarmupLR`: the rate rises from `min_lr` to `max_lr`, and then stays.

    Args:
        max_lr: `warmup_max_lr`.
        min_lr: `warmup_min_lr`.
        warmup_steps: `warmup_num_steps`, in updates.
        log: Whether `warmup_type` is `"log"`, DeepSpeed's default: the rate follows the logarithm of the step.
            Otherwise `"linear"`.

    Returns:
        An optax schedule.
    """
    warmup = _warmup(warmup_steps, log=log)
    return lambda count: min_lr + (max_lr - min_lr) * warmup(_step(count))


def warmup_decay_lr(
    max_lr: float = 1e-3, *, total_steps: int, min_lr: float = 0.0, warmup_steps: int = 1000, log: bool = True
) -> Callable[..., Float[Array, ""]]:
    """Return `WarmupDecayLR`: `warmup_lr`, then linearly down to `min_lr` after `total_steps` (`total_num_steps`).

    The other arguments are those of `warmup_lr`.
    """
    warmup = _warmup(warmup_steps, log=log)
    warmup_steps = max(2, warmup_steps)

    def schedule(count):
        step = _step(count)
        decay = jnp.maximum(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))
        return min_lr + (max_lr - min_lr) * jnp.where(step < warmup_steps, warmup(step), decay)

    return schedule


def warmup_cosine_lr(
    lr: float,
    *,
    total_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    log: bool = True,
) -> Callable[..., Float[Array, ""]]:
    """Return `WarmupCosineLR`: from `warmup_min_ratio * lr` up to `lr`, then by a cosine to `cos_min_ratio * lr`.

    `lr` is the optimizer's rate. The other arguments are those of `warmup_decay_lr`.
    """
    warmup = _warmup(warmup_steps, log=log)
    warmup_steps = max(2, warmup_steps)

    def schedule(count):
        step = _step(count)
        done = (step - warmup_steps + 1) / max(1, total_steps - warmup_steps)
        cosine = cos_min_ratio + (1 - cos_min_ratio) * (1 + jnp.cos(math.pi * done)) / 2
        rising = warmup_min_ratio + (1 - warmup_min_ratio) * warmup(step)
        return lr * jnp.where(step < warmup_steps, rising, jnp.maximum(0.0, cosine))

    return schedule


def _step(count):
    """Return the step whose rate an update has."""
    return jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 0)


def _warmup(steps: int, *, log: bool) -> Callable:
    """Return how far a step is on the way from the lower to the higher rate, from 0 to 1."""
    steps = max(2, steps)
    rise = (lambda step: jnp.log(step + 1) / math.log(steps)) if log else (lambda step: step / steps)
    return lambda step: jnp.where(step < steps, rise(step), 1.0)
