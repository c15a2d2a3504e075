"""Compute the norms of `train_step(leaf_norms=True)`: of each trained parameter, and of its change by an update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from zerojax import names
from zerojax.optim.sharding_plan import ShardingPlan
from zerojax.placement.storage import to_device
from zerojax.train.loss import at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Shaped


@jax.named_scope(names.GRAD_NORM)
def norms_of_update(plan: ShardingPlan, old: Sequence[Array], updated: Mapping[int, Array]) -> dict[str, Any]:
    """Return the norms of the trained parameters before their update, and of the change of each."""
    before = [at_least_float32(to_device(x)) for x in old]
    changes = [at_least_float32(updated[i]) - x for i, x in enumerate(before)]
    tree = lambda arrays: [norm(x, leaf.shape) for x, leaf in zip(arrays, plan.grads, strict=True)]
    unflatten = plan.trained.treedef.unflatten
    return {"param_norms": unflatten(tree(before)), "update_norms": unflatten(tree(changes))}


def norm(x: Shaped[Array, "*storage"], shape: tuple[int, ...]) -> Array:
    """Return the norm of a stored array without its padding.

    A mask hides the padding, because a slice may move elements between devices.
    """
    shape = shape if x.ndim == len(shape) else (math.prod(shape),)  # a flat array has another rank
    squares = jnp.square(at_least_float32(jnp.abs(x)))
    for d, n in enumerate(shape):
        if n < x.shape[d]:
            squares = jnp.where(lax.broadcasted_iota(np.uint32, x.shape, d) < n, squares, 0)
    return jnp.sqrt(jnp.sum(squares))
