"""The mutable state of a loss with `mutable=True`: check it, and average it over the devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.compat import common_dtype

if TYPE_CHECKING:
    from jaxtyping import PyTree


def check_mutable(new: PyTree, old: PyTree) -> None:
    """Raise a TypeError if the `new` mutable state differs from the `old` state in structure, shape or type."""
    found, structure = jax.tree_util.tree_flatten_with_path(new)
    if structure != jax.tree.structure(old):
        raise TypeError(
            f"The loss function returns a mutable state of the structure {structure}, but it was given a state of the "
            f"structure {jax.tree.structure(old)}. Return a state of the same structure."
        )
    for (path, x), before in zip(found, jax.tree.leaves(old), strict=True):
        if jnp.shape(x) != jnp.shape(before) or jnp.result_type(x) != jnp.result_type(before):
            raise TypeError(
                f"mutable{jax.tree_util.keystr(path)} comes back as {jnp.result_type(x)}{list(jnp.shape(x))}, and was "
                f"given as {jnp.result_type(before)}{list(jnp.shape(before))}. Return the same shape and type."
            )


@jax.named_scope(names.MEAN)
def mean_mutable(mutable: PyTree, comm: Collectives) -> Any:
    """Average the float leaves of the mutable state over the devices. Return other leaves unchanged."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return comm.over_workers(lax.pmean, x.astype(common_dtype(x.dtype, jnp.float32))).astype(x.dtype)

    return jax.tree.map(mean, mutable)
