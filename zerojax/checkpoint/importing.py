"""Import: parameters from safetensors, each device reading its own shard, in any layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.safetensors import Files
from zerojax.checkpoint.state_leaves import dotted, key_paths
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import Padded, is_padded
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from jaxtyping import PyTree


def import_params(path: str | Path, like: ZeroState | PyTree) -> PyTree:
    """Read parameters from safetensors, each device its own shard.

    Args:
        path: A folder, or one file.
        like: A state, or a tree of parameters: live arrays, or shapes. Says names, shapes,
            types and shardings; floating leaves are cast to its types.

    Returns:
        Parameters in the layout of `like`. Of a state they have the types of its master
        weights, as `tx.create` takes them: `tx.create(import_params(path, tx.create(shapes)))`.
        Leaves that are tied in the file are one array.

    Raises:
        FileNotFoundError: If there is nothing to read.
        ValueError: If a file is damaged, a leaf is missing, or has another shape or kind of type.
    """
    files = Files(Path(path))
    tree = master_shapes(like) if isinstance(like, ZeroState) else like
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_padded)
    names = [dotted(keys) for keys in key_paths(jax.tree.unflatten(structure, range(len(leaves))))]
    if missing := [name for name in names if name not in files]:
        have = ", ".join(sorted(files.names())[:5])
        raise ValueError(f"{path} has no {missing[0]!r} ({len(missing)} of {len(names)} missing). It has {have}, ...")
    if surplus := sorted(files.names() - set(names)):
        warnings.warn(f"{len(surplus)} tensors of {path} are not wanted: {', '.join(surplus[:5])}.", stacklevel=2)
    loaded: dict[str, Any] = {}
    for name, x in zip(names, leaves, strict=True):
        stored = files.tied.get(name, name)
        if stored not in loaded:
            loaded[stored] = read_leaf(files, name, x)
        loaded[name] = loaded[stored]
    return jax.tree.unflatten(structure, [loaded[name] for name in names])


def read_leaf(files: Files, name: str, like: Any) -> Any:
    """One leaf, read into the layout of `like`."""
    shape, stored = tuple(like.shape), like.storage if is_padded(like) else like
    if files.shape(name) != shape:
        raise ValueError(f"{name} has the shape {list(files.shape(name))} in the file, and {list(shape)} is wanted.")
    dtype = jnp.dtype(like.dtype)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        spans = [range(*s.indices(n)) for s, n in zip(index or (), stored.shape, strict=True)]
        inside = tuple(slice(min(s.start, n), min(s.stop, n)) for s, n in zip(spans, shape, strict=True))
        x = files.read(name, inside)
        if x.dtype != dtype and not all(jnp.issubdtype(one, jnp.floating) for one in (x.dtype, dtype)):
            raise ValueError(f"{name} is {x.dtype} in the file, and {dtype} is wanted.")
        padding = [(0, len(s) - n) for s, n in zip(spans, x.shape, strict=True)]
        return np.pad(x.astype(dtype), padding) if padding else x.astype(dtype)

    sharding = getattr(stored, "sharding", None)
    if sharding is None:
        array = jnp.asarray(shard(tuple(slice(0, n) for n in shape)))
    else:
        array = jax.make_array_from_callback(tuple(stored.shape), sharding, shard)
    return Padded(array, like.shape, like.dim) if is_padded(like) else array


def master_shapes(state: ZeroState) -> PyTree:
    """The parameters of a state as shapes with shardings, in the types of their master weights."""

    def wide(x, grad: Leaf):
        stored = x.storage if is_padded(x) else x
        shape = jax.ShapeDtypeStruct(stored.shape, grad.dtype, sharding=stored.sharding)
        return Padded(shape, x.shape, x.dim) if is_padded(x) else shape  # pyright: ignore[reportArgumentType]

    leaves, structure = jax.tree.flatten(state.params, is_leaf=is_padded)
    return structure.unflatten([wide(x, grad) for x, grad in zip(leaves, state.plan.layout.grads, strict=True)])
