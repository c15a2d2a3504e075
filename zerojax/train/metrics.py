"""What a step tells of itself."""

from __future__ import annotations

from typing import Any, TypedDict

import jax


class Metrics(TypedDict):
    """The metrics of a step: a dict, typed for editors and type checkers.

    Attributes:
        loss: Float scalar.
        grad_norm: Float scalar: the norm of the unscaled, averaged gradient.
        skipped: Bool scalar: whether the step left the state as it was.
        aux: What the loss returned beside; there with `has_aux`.
        loss_scale: Float scalar: the one that the step used; there with a loss scale.
        grad_norms: The norm of each parameter's gradient; there with `leaf_norms`.
        learning_rate: Float scalar: that of this update; there under `optax.inject_hyperparams`.
    """

    loss: jax.Array
    grad_norm: jax.Array
    skipped: jax.Array
    aux: Any
    loss_scale: jax.Array
    grad_norms: Any
    learning_rate: jax.Array
