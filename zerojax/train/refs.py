"""A `jax.Ref` that a loss closes over, where it cannot be used: JAX's error in words that say what can."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

_AS_VALUE = (
    "Pass the value of the ref as an argument, and return the new one: as aux, or with mutable=True of train_step as "
    "the mutable state."
)
# (view of the loss, words of JAX's, cause and remedy); without a view, in both.
_REFUSALS = (
    (
        "device",
        r"AbstractRef|Ref shape|mutable array reference|JaxprInputEffect",
        "The loss closes over a jax.Ref. In device view every device would write a value of its own to it. Pass "
        f'view="global" to zero_shard, where there is one loss. Or do without the ref. {_AS_VALUE}',
    ),
    (
        "",
        r"mutable array reference|JaxprInputEffect",
        "The loss gives a jax.Ref to jax.checkpoint or to a jax.custom_vjp, which keep it for the backward pass. "
        "zerojax runs the two passes as programs apart, and a ref cannot be passed from one to the other. For a "
        "custom_vjp, let its backward rule alone close over the ref. Under jax.checkpoint, do without the ref. "
        f"{_AS_VALUE}",
    ),
    (
        "",
        r"incompatible devices.*ARG_SHARDING with device ids",
        "The loss closes over an array or a jax.Ref on other devices than those of the mesh. If it is a ref, make it "
        f"on the mesh: jax.new_ref(jax.device_put(x, NamedSharding(mesh, PartitionSpec()))). {_AS_VALUE}",
    ),
)


@contextlib.contextmanager
def refs_named(view: str) -> Iterator[None]:
    """Say which use of a `jax.Ref` a loss makes that zerojax does not have, in place of what JAX raises of it.

    Args:
        view: The view of the loss.

    Raises:
        TypeError: In place of JAX's error.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as error:
        for only, words, refusal in _REFUSALS:
            if only in ("", view) and re.search(words, str(error), re.DOTALL):
                raise TypeError(refusal) from error
        raise
