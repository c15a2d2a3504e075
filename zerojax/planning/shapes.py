"""Turn trees of arrays into trees of shapes, to lower and compile without the arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.layout.leaf import is_padded
from zerojax.layout.tree import canonical


def is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, type)


def shape_of(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding)


def abstract(tree: Any) -> Any:
    """Replace the arrays in `tree` by shapes without shardings. Static arguments and Python numbers are unchanged."""
    return jax.tree.map(lambda x: shape_of(x) if is_array(x) else x, tree)


def named_sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def on_mesh(mesh: Mesh, tree: Any) -> Any:
    """Replace arrays by shapes on `mesh` with the same `PartitionSpec`s. An array without a spec is replicated."""

    def move(x: Any) -> Any:
        sharding = named_sharding(x)
        spec = PartitionSpec() if sharding is None else sharding.spec
        return shape_of(x, NamedSharding(mesh, spec)) if is_array(x) else x

    return jax.tree.map(move, tree)


def logical_shapes(params: Any) -> Any:
    """Return the logical shapes of parameters, without their shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, canonical(x.dtype)), params, is_leaf=is_padded)


def rows_of(batch: Any) -> int | None:
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch)}
    (only,) = lengths if len(lengths) == 1 else ((),)
    return only[0] if only else None


def with_rows(batch: Any, rows: int) -> Any:
    resized = lambda x: shape_of(x, named_sharding(x)).update(shape=(rows, *jnp.shape(x)[1:]))
    return jax.tree.map(resized, batch)
