"""Compute DeepSpeed's learning rate schedules as functions of optax's count of updates.

DeepSpeed sets the rate of an update at the end of the previous update. So the first two updates have the rate of step
0, and the third update has the rate of step 1.

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
    """Return DeepSpeed's `WarmupLR`: the rate rises from `min_lr` to `max_lr`, and then stays constant.

    Args:
        max_lr: DeepSpeed's `warmup_max_lr`.
        min_lr: DeepSpeed's `warmup_min_lr`.
        warmup_steps: DeepSpeed's `warmup_num_steps`, in updates.
        log: If True, the rate rises with the logarithm of the step, as with `warmup_type="log"`, DeepSpeed's default.
            If False, the rate rises linearly, as with `warmup_type="linear"`.

    Returns:
        An optax schedule.
    """
    warmup = _warmup(warmup_steps, log=log)
    return lambda count: min_lr + (max_lr - min_lr) * warmup(_step(count))


def warmup_decay_lr(
    max_lr: float = 1e-3, *, total_steps: int, min_lr: float = 0.0, warmup_steps: int = 1000, log: bool = True
) -> Callable[..., Float[Array, ""]]:
    """Return DeepSpeed's `WarmupDecayLR`: the rise of `warmup_lr`, then a linear decay to `min_lr` at `total_steps`.

    `total_steps` is DeepSpeed's `total_num_steps`. All other arguments are those of `warmup_lr`.
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
    """Return DeepSpeed's `WarmupCosineLR`: a rise to `lr`, and then a cosine decay to `cos_min_ratio * lr`.

    `lr` is the optimizer's rate. The rise begins at `warmup_min_ratio * lr`. `warmup_decay_lr` has the other arguments.
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
    """Return the step of DeepSpeed whose rate applies to the update with this count."""
    return jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 0)


def _warmup(steps: int, *, log: bool) -> Callable:
    """Return a function of the step that rises from 0 (the lower rate) to 1 (the higher rate) over `steps` steps."""
    steps = max(2, steps)
    rise = (lambda step: jnp.log(step + 1) / math.log(steps)) if log else (lambda step: step / steps)
    return lambda step: jnp.where(step < steps, rise(step), 1.0)
