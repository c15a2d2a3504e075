"""DeepSpeed's learning rate schedules as functions of optax's count of updates.

DeepSpeed sets the rate of an update after the one before: the first two have that of step 0, the third that of step 1.

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
    """Return `WarmupLR`: rise from one rate to another, which then stays.

    Args:
        max_lr: `warmup_max_lr`.
        min_lr: `warmup_min_lr`.
        warmup_steps: `warmup_num_steps`, in updates.
        log: Whether `warmup_type` is `"log"`, DeepSpeed's default: by the logarithm of the step. Else `"linear"`.

    Returns:
        An optax schedule.
    """
    warmup = _warmup(warmup_steps, log=log)
    return lambda count: min_lr + (max_lr - min_lr) * warmup(_step(count))


def warmup_decay_lr(
    max_lr: float = 1e-3, *, total_steps: int, min_lr: float = 0.0, warmup_steps: int = 1000, log: bool = True
) -> Callable[..., Float[Array, ""]]:
    """Return `WarmupDecayLR`: `warmup_lr`, then linearly down to `min_lr` at `total_num_steps`.

    Args:
        max_lr: `warmup_max_lr`.
        total_steps: `total_num_steps`, in updates.
        min_lr: `warmup_min_lr`.
        warmup_steps: `warmup_num_steps`, in updates.
        log: As for `warmup_lr`.

    Returns:
        An optax schedule.
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
    """Return `WarmupCosineLR`: up, then down along half a cosine. All rates are shares of the optimizer's.

    Args:
        lr: The optimizer's rate.
        total_steps: `total_num_steps`, in updates.
        warmup_min_ratio: Share at the first step.
        warmup_steps: `warmup_num_steps`, in updates.
        cos_min_ratio: Share at the last step.
        log: As for `warmup_lr`.

    Returns:
        An optax schedule.
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
    """Return the share of the way from the lower to the higher rate."""
    steps = max(2, steps)
    rise = (lambda step: jnp.log(step + 1) / math.log(steps)) if log else (lambda step: step / steps)
    return lambda step: jnp.where(step < steps, rise(step), 1.0)
