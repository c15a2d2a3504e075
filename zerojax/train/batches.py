"""Check a batch, and divide further dims, such as the sequence, as `batch_spec=` says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import Config, DataMesh
from zerojax.config.data_mesh import entry_axes, in_words

if TYPE_CHECKING:
    from jaxtyping import PyTree

NO_NUMBERS = "OSTUMm"  # `dtype.kind` of objects, strings, dates and time differences in NumPy
NUMBERS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex)


def check_batch(batch: PyTree, data: DataMesh, accumulate: int = 1) -> None:
    """Raise an error unless all leaves have equally many rows, a multiple of devices times microbatches."""
    check_leaf_types(batch)
    first: tuple[str, int] | None = None
    parts = data.workers * accumulate
    where = f"mesh {in_words(data.batch)}"
    among = f"the {'axis has' if len(data.batch) == 1 else 'axes have'} {data.workers} devices"
    if accumulate > 1:
        among += f" of {accumulate} microbatches each, which are {parts} parts"
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name = f"batch{jax.tree_util.keystr(path)}"
        shape = jnp.shape(x)
        if not shape:
            raise ValueError(
                f"Cannot divide {name} over {where}: it is a scalar and has no dim 0. Pass values that belong to no "
                f"row as further arguments, after the batch, and lists of numbers as arrays."
            )
        first = first or (name, shape[0])
        if not shape[0]:
            raise ValueError(
                f"{name} has the shape {list(shape)}, of no rows, so the mean loss would be NaN. Drop this batch."
            )
        if shape[0] != first[1]:
            raise ValueError(
                f"{name} has {shape[0]} rows, and {first[0]} has {first[1]}: rows would be paired wrongly. Give all "
                f"leaves of a batch as many rows. Pass values that belong to no row as further arguments, after the "
                f"batch."
            )
        if shape[0] % parts:
            below, above = shape[0] // parts * parts, -(-shape[0] // parts) * parts
            fits = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"Cannot divide {name} over {where}: its dim 0 has {shape[0]} rows, and {among}. "
                f"Give a batch of {fits} rows, or drop the remainder in the data loader."
            )


def check_leaf_types(batch: PyTree) -> None:
    """Raise a TypeError for a leaf that JAX cannot use, such as a string, or a tensor of another library."""
    for path, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        name, dtype = f"batch{jax.tree_util.keystr(path)}", getattr(x, "dtype", None)
        if isinstance(x, str | bytes) or (isinstance(x, np.ndarray) and x.dtype.kind in NO_NUMBERS):
            raise TypeError(
                f"{name} has the type {dtype or type(x).__name__}, which JAX has no arrays of. Leave it out of the "
                f"batch, or pass numbers, such as tokens."
            )
        if not isinstance(x, NUMBERS) and not hasattr(x, "__jax_array__") and not isinstance(dtype, np.dtype):
            kind = f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
            raise TypeError(
                f"{name} is a {kind}, which JAX takes for no array. Convert it with np.asarray(x), let "
                f"zerojax.data.shard_batches(loader, tx) convert it, or leave it out if the loss does not use it."
            )


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
