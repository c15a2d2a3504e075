"""The shardings of a batch with `batch_spec=`, which may divide further dims, such as the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import Config
from zerojax.config.data_mesh import entry_axes, in_words

if TYPE_CHECKING:
    from jaxtyping import PyTree


def shardings_of_spec(config: Config, mesh: Mesh, batch: PyTree) -> Any:
    """Return the sharding of each leaf of a batch. Raise a ValueError if `batch_spec` does not fit the batch."""
    assert config.batch_spec is not None
    if undivided := first_undivided(config, batch):
        name, dim, size, axes = undivided
        parts = config.data.size(axes)
        below, above = size // parts * parts, -(-size // parts) * parts
        raise ValueError(
            f"Cannot divide {name} over mesh {in_words(axes)}: its dim {dim} has a size of {size}, and the "
            f"{'axis has' if len(axes) == 1 else 'axes have'} {parts} devices. Give a size of "
            f"{f'{below} or {above}' if below else above} (for inputs and for targets, not for a window that is one "
            f"longer), or a batch_spec= that does not divide this dim."
        )
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), config.batch_spec.over(batch), is_leaf=_is_spec)


def first_undivided(config: Config, batch: PyTree) -> tuple[str, int, int, tuple[str, ...]] | None:
    """Return `(name, dim, size, axes)` of the first dim of the batch that `batch_spec` does not divide, or None."""
    assert config.batch_spec is not None
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    for (path, x), spec in zip(leaves, jax.tree.leaves(config.batch_spec.over(batch), is_leaf=_is_spec), strict=True):
        for dim, (size, entry) in enumerate(zip(jnp.shape(x), spec, strict=False)):
            if size % config.data.size(entry_axes(entry)):
                return f"batch{jax.tree_util.keystr(path)}", dim, size, entry_axes(entry)
    return None


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
