"""Bring parameters, whatever they are and wherever they lie, to where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ..config import Config
from ..layout.leaf import Leaf
from ..layout.tree import Layout
from .storage import cast, named, read

if TYPE_CHECKING:
    from jaxtyping import PyTree


def as_stored(params: PyTree, layout: Layout) -> list:
    """`read` for arrays and shapes alike; storage shape."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
        return [jax.ShapeDtypeStruct(leaf.storage_shape, leaf.dtype) for leaf in layout.params]
    return read(params, layout.params)


def placed(config: Config, layout: Layout, params: PyTree) -> list:
    """A copy of the parameters where they are stored, in the types they have; storage shape."""
    return [place(x, named(config, leaf)) for x, leaf in zip(as_stored(params, layout), layout.params, strict=True)]


def place(x: Any, sharding: NamedSharding) -> Any:
    """Lay a copy of one array out, so that donating it spares the caller's."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    # device_put may share a shard with the array it is given, even when told not to (seen on jax 0.10.2)
    return jax.device_put(jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, sharding)


def cast_placed(config: Config, layout: Layout, arrays: list, like: Sequence[Leaf]) -> list:
    """Placed parameters in the types of `like`."""
    types = tuple(leaf.dtype for leaf in like)
    if all(x.dtype == dtype for x, dtype in zip(arrays, types, strict=True)):
        return arrays
    where = [named(config, leaf) for leaf in layout.params]
    return jax.jit(cast, static_argnums=1, out_shardings=where)(arrays, types)
