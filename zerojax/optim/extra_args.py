"""Further arguments of an update, such as the loss: for a transformation that takes them, and for one that does not."""

from __future__ import annotations

import optax

UNEXPECTED = "unexpected keyword argument 'value'"  # how Python says it


def with_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with an update that can be given the loss as `value=`.

    A training step gives every transformation the loss. optax drops it where a transformation takes no further
    arguments. One that takes some, but not this one, such as `optax.contrib.sam`, would fail, alone or in a chain.
    Signatures cannot tell, since a chain's takes anything. So the update is called again without the loss.
    """
    supported = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra):
        try:
            return supported.update(updates, state, params, **extra)
        except TypeError as error:
            if "value" not in extra or UNEXPECTED not in str(error):
                raise
        del extra["value"]
        return supported.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(supported.init, update)  # pyright: ignore[reportArgumentType]
