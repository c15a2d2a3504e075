"""Gradients and updates as trees in the caller's own form: what a hand-written loop passes around.

The training step keeps small and padded leaves divided throughout. Here a gradient must
have the structure and shapes of its parameter, or `jax.tree.map` over both (which is
what optax and Flax do) would fail; so a leaf whose parts do not form an array of the
logical shape comes back whole.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ..config import Config
from ..layout.leaf import Leaf
from ..layout.padded import is_padded
from ..layout.tree import Layout
from .gradients import Loss, loss_and_grads
from .storage import constrain, read, write
from .update import check_state, divide, plan_update, tree_difference, undivide, update


def grad_parts(config: Config, layout: Layout, forms: Sequence[bool]) -> tuple[Leaf, ...]:
    """How `value_and_grad` leaves each gradient: cut at stages 2 and 3 where its form allows it."""
    return tuple(
        part
        if config.stage >= 2 and part.kind == "cut" and (part.padding == 0 or padded)
        else dataclasses.replace(part, kind="whole", dim=None)
        for part, padded in zip(layout.parts, forms, strict=True)
    )


def value_and_grad_tree(
    config: Config, loss: Loss, params: Any, batch: Any, *args: Any, layout: Layout, forms: tuple[bool, ...]
) -> tuple[Any, Any]:
    """Loss and gradient, the gradient in the form of `params`; traced under jit."""
    parts = grad_parts(config, layout, forms)
    reduced = tuple(leaf if leaf.dim is not None else part for leaf, part in zip(layout.params, parts, strict=True))
    value, aux, grads = loss_and_grads(config, layout, reduced, loss, read(params, layout.params), batch, args)
    tree = write([constrain(config, g, leaf) for g, leaf in zip(grads, reduced, strict=True)], layout, reduced, forms)
    return ((value, aux) if loss.has_aux else value), tree


def update_tree(
    config: Config, layout: Layout, forms: tuple[bool, ...], grads: Any, state: Any, params: Any, extra: dict
) -> tuple[Any, Any]:
    """Updates in the form of the parameters, and the new state; traced under jit.

    Raises:
        ValueError: If gradients, state and parameters are not of one tree.
    """
    check_grads(grads, layout)
    plan = plan_update(config, layout)
    check_state(config, plan, state)
    extra = jax.tree.map(lambda x: x.logical() if is_padded(x) else x, extra, is_leaf=is_padded)
    divided = None if params is None else divide(config, plan, params)
    updates, state = update(config, plan, divide(config, plan, grads), state, divided, extra)
    return undivide(config, plan, updates, forms), state


def check_grads(grads: Any, layout: Layout) -> None:
    """Refuse gradients of another tree or shape than the parameters.

    Raises:
        ValueError: Naming the first leaf that differs, what was found and what was required.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_padded)
    if structure != layout.treedef:
        raise ValueError(
            f"The gradients are not of the parameters' tree: it {tree_difference(found, layout.params)}. "
            f"Pass the gradients of the parameters given."
        )
    for (_, g), leaf in zip(found, layout.params, strict=True):
        if tuple(g.shape) != leaf.shape:
            raise ValueError(
                f"grads{leaf.path} has shape {list(g.shape)}, but its parameter has {list(leaf.shape)} (logical). "
                f"Pass gradients of the parameters given."
            )
