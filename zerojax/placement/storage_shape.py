"""Convert one array between its logical shape and its storage shape: padding and flattening, no placement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerojax.comm.buckets import flatten, unflatten
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import pad
from zerojax.placement.storage import unpadded

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


def in_logical_shape(x: Shaped[Array, "*storage"], leaf: Leaf) -> Shaped[Array, "*logical"]:
    """Remove the padding of a stored array, and undo its flattening."""
    return unflatten(x, leaf) if leaf.kind == "flat" else unpadded(x, leaf)


def in_storage_shape(x: Shaped[Array, "*logical"], leaf: Leaf) -> Shaped[Array, "*storage"]:
    """Pad or flatten a logical array as its layout says."""
    if leaf.kind == "flat":
        return flatten(x, leaf)
    return x if leaf.dim is None else pad(x, leaf.dim, leaf.storage_shape[leaf.dim])
