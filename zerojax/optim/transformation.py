"""Call a wrapped transformation with the loss, guard its calls in an analysis, and check the state that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from zerojax.layout.leaf import Leaf

if TYPE_CHECKING:
    from jaxtyping import PyTree

NOTE = (
    "The transformation that zero_shard wraps was called with gradients in the tree of its trained parameters. If it "
    "needs the gradients of a part of them, as optax.lookahead does, let it wrap zero_shard, in a loop of your own: "
    "optax.lookahead(zero_shard(tx, ...), ...)."
)
UNEXPECTED = "unexpected keyword argument 'value'"  # Python's message


class TransformationError(Exception):
    """An analysis could not trace the wrapped transformation. `__cause__` is the transformation's error."""


def guarded(update: Callable) -> Callable:
    """Return a function that calls `update`, and raises a `TransformationError` if `update` raises any error.

    An analysis traces the transformation with fewer arguments, or in other shapes, than training does. If the
    transformation then raises an error, the analysis has no result, and the plan reports this. An error of the analysis
    itself is a bug, and must not silently replicate a leaf. So an analysis catches only a `TransformationError`.
    """

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return update(*args, **keywords)
        except Exception as error:
            raise TransformationError(f"{type(error).__name__}: {error}") from error

    return call


def with_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with an `update` that accepts the loss as `value=`.

    A training step gives every transformation the loss. optax drops the loss if a transformation takes no extra
    arguments. But a transformation that takes other extra arguments, such as `optax.contrib.sam`, raises a `TypeError`,
    alone or in a chain. The signature of `update` does not help, because a chain takes any argument. So after this
    error, the update is called again without the loss.
    """
    supported = optax.with_extra_args_support(tx)

    def noted(*args, **extra):
        try:
            return supported.update(*args, **extra)
        except (AttributeError, TypeError, ValueError) as error:
            error.add_note(NOTE)
            raise

    def update(updates, state, params=None, **extra):
        try:
            return noted(updates, state, params, **extra)
        except TypeError as error:
            if "value" not in extra or UNEXPECTED not in str(error):
                raise
        del extra["value"]
        return noted(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(supported.init, update)  # pyright: ignore[reportArgumentType]


def check_new_state(leaves: Sequence[Leaf], state: PyTree) -> None:
    """Raise a `ValueError` if `update` returned a state with other paths than the state that `init` made."""
    found = jax.tree_util.tree_leaves_with_path(state)
    if [jax.tree_util.keystr(path) for path, _ in found] != [leaf.path for leaf in leaves]:
        raise ValueError(
            f"The transformation changes the tree of its state: what update returns {tree_difference(found, leaves)}, "
            f"and init did not. How the state is sharded is planned from init: let it return a state of the same tree."
        )


def tree_difference(found: Sequence, required: Sequence[Leaf]) -> str:
    """Describe how the paths of a flattened tree differ from the required paths."""
    paths, wanted = [jax.tree_util.keystr(path) for path, _ in found], [leaf.path for leaf in required]
    if lacking := [path for path in wanted if path not in paths]:
        return f"lacks {lacking[0]}"
    surplus = [path for path in paths if path not in wanted]
    return f"has {surplus[0]} beyond that" if surplus else "has other nodes"
