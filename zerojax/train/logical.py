"""`zerojax.logical`: convert a tree in storage to logical arrays, for statistics and logging."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax

from zerojax import compat
from zerojax.comm.explicit import mesh_of, on_auto_mesh
from zerojax.layout.chunked import Chunked, is_chunked
from zerojax.layout.leaf import Leaf
from zerojax.layout.padded import Padded, is_number_array, is_padded
from zerojax.placement.chunking import joined
from zerojax.placement.storage import in_logical_shape, is_stored_node
from zerojax.placement.storage import logical as unpadded_array
from zerojax.train.state import ZeroState

if TYPE_CHECKING:
    from jaxtyping import PyTree


def logical(tree: PyTree) -> PyTree:
    """Replace each `Padded` of a tree by its logical array, for statistics, assertions and logging.

    Under `jax.jit`, each logical array is a slice of the stored array. The compiler keeps it sharded, without a gather.

    Args:
        tree: Parameters, gradients, updates, a `ZeroState`, or a tree that contains them. For an optimizer state,
            pass its `ZeroState`, which records which arrays are padded or flat, or call `tx.unshard(opt_state)`.

    Returns:
        The tree with logical arrays. In a `ZeroState`, the leaves of `opt_state` also get their logical shapes, and
        offloaded leaves are copied to the devices. Such a state cannot be passed to a training step.

    Examples:
        >>> means = jax.jit(lambda params: jax.tree.map(jnp.mean, zerojax.logical(params)))(state.params)
    """
    is_node = lambda x: is_stored_node(x) or isinstance(x, ZeroState)
    return jax.tree.map(lambda x: of_state(x) if isinstance(x, ZeroState) else of_leaf(x), tree, is_leaf=is_node)


def of_leaf(x: Any) -> Any:
    """Return the logical array of a `Padded` or of a leaf on disk. Return any other leaf unchanged."""
    if is_chunked(x):
        return of_stored(x, x.leaf)
    if not is_padded(x):
        return x
    if isinstance(x.storage, jax.ShapeDtypeStruct):
        return compat.eval_shape(Padded.logical, x)
    return on_auto_mesh(mesh_of(x.storage), unpadded_array, x) if is_number_array(x.storage) else x.storage


def of_state(state: ZeroState) -> ZeroState:
    """Return a state in which every array has its logical shape."""
    leaves, structure = jax.tree.flatten(state.opt_state, is_leaf=is_chunked)
    arrays = [of_stored(x, leaf) for x, leaf in zip(leaves, state.plan.state, strict=True)]
    params = jax.tree.map(of_leaf, state.params, is_leaf=is_stored_node)
    return dataclasses.replace(state, params=params, opt_state=jax.tree.unflatten(structure, arrays))


def of_stored(x: Any, leaf: Leaf) -> Any:
    """Return the logical array of a stored leaf, given its layout."""
    if isinstance(x, Chunked) and any(isinstance(chunk, jax.ShapeDtypeStruct) for chunk in x.chunks):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    array = joined(x) if isinstance(x, Chunked) else x
    trim = functools.partial(in_logical_shape, leaf=leaf)
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.eval_shape(trim, array)
    return on_auto_mesh(mesh_of(array), trim, array) if array.shape != leaf.shape else array
