"""A leaf whose storage is longer than the array the user gave."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@functools.partial(jax.tree_util.register_dataclass, data_fields=["storage"], meta_fields=["shape", "dim"])
@dataclasses.dataclass(frozen=True)
class Padded:
    """An array padded at the end of one dim, so that the devices can share it evenly.

    A pytree node: optax and `jax.tree.map` act on the storage array inside. The padding
    never reaches a loss function or an optimizer.

    Attributes:
        storage: The array as stored; storage shape.
        shape: Logical shape, before padding.
        dim: The padded dim.
    """

    storage: Shaped[Array, "*storage"]
    shape: tuple[int, ...]
    dim: int

    @property
    def dtype(self):
        """Element type."""
        return self.storage.dtype

    def logical(self) -> Shaped[Array, "*logical"]:
        """The array without its padding; logical shape."""
        return trim(self.storage, self.dim, self.shape[self.dim])


def is_padded(x) -> bool:
    """Whether a node is a `Padded`; for `is_leaf=`."""
    return isinstance(x, Padded)


def trim(x: Shaped[Array, "*storage"], dim: int, size: int) -> Shaped[Array, "*logical"]:
    """Cut the padding off the end of `dim`, down to `size` elements."""
    return x if x.shape[dim] == size else jax.lax.slice_in_dim(x, 0, size, axis=dim)


def pad(x: Shaped[Array, "*logical"], dim: int, size: int) -> Shaped[Array, "*storage"]:
    """Append zeros to `dim`, up to `size` elements."""
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[dim] if i == dim else 0) for i in range(x.ndim)])
