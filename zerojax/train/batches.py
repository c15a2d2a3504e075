"""Check a batch, and say why a step cannot take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.config import DataMesh
from zerojax.config.data_mesh import in_words

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
