"""Keep master weights, which are wide copies of narrow parameters, in the optimizer's state, and update them.

A transformation that wraps the user's transformation does this. So the same rules match master weights and all other
state to parameters, and shard them.

References:
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import optax

from zerojax.config import Config
from zerojax.layout.tree import Layout
from zerojax.optim.transformation import with_extra_args

if TYPE_CHECKING:
    from jaxtyping import PyTree


class MasterState(NamedTuple):
    """The state of an optimizer that keeps master weights.

    Attributes:
        inner: The state of the wrapped transformation.
        master: The master weights; `optax.MaskedNode()` for a parameter that is itself stored in the wide type.
    """

    inner: PyTree
    master: PyTree


def with_master(tx: optax.GradientTransformation, narrow: Sequence[bool]) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that it updates master weights. Its `update` returns new parameters, not increments.

    `narrow` says, for each parameter, whether it is stored in a narrower type than its master weight.
    """
    inner = with_extra_args(tx)

    def kept(params):
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten([x if on else optax.MaskedNode() for x, on in zip(leaves, narrow, strict=True)])

    def init(params):
        return MasterState(inner.init(params), kept(params))

    def update(updates, state, params=None, **extra):
        leaves, tree = jax.tree.flatten(params)
        masters = iter(jax.tree.leaves(state.master))
        wide = tree.unflatten([next(masters) if on else x for x, on in zip(leaves, narrow, strict=True)])
        updates, inner_state = inner.update(updates, state.inner, wide, **extra)
        moved = optax.apply_updates(wide, updates)
        return moved, MasterState(inner_state, kept(moved))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def wrapped_tx(config: Config, trained: Layout) -> optax.GradientTransformationExtraArgs:
    """Return the user's transformation, wrapped to update master weights if the configuration has them."""
    if not config.has_master_weights:
        return with_extra_args(config.tx)
    return with_master(config.tx, narrow_leaves(trained))


def narrow_leaves(trained: Layout) -> list[bool]:
    """Return, for each trained parameter, whether it is stored in a narrower type than its master weight."""
    return [leaf.dtype != part.dtype for leaf, part in zip(trained.params, trained.grads, strict=True)]
