"""Wrap a transformation so that chosen leaves of its state are encoded between updates.

The wrapper keeps the tree of the state: each encoded array replaces one wide array. So all rules for state (layouts,
offload, checkpoints) also apply to encoded arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import compat
from zerojax.config import Config, path_of
from zerojax.config.data_mesh import entry_axes
from zerojax.layout.encoding import Encoding, is_encodable
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout, params_of_state
from zerojax.narrow_state.rounding import first_encoded, narrow, widen


def with_encoded_state(
    inner: optax.GradientTransformationExtraArgs, config: Config, trained: Layout
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that its `init` and `update` take and return encoded leaves, as `config.state` says."""
    params = jax.tree.unflatten(trained.treedef, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in trained.grads])
    encodings = encodings_of(config, trained, compat.eval_shape(inner.init, params))

    def init(params):
        leaves, tree = jax.tree.flatten(inner.init(params))
        return tree.unflatten(
            [first_encoded(x, encodings[k], k) if k in encodings else x for k, x in enumerate(leaves)]
        )

    def update(updates, state, params=None, **extra):
        old, tree = jax.tree.flatten(state)
        wide = tree.unflatten([widen(x, encodings[k]) if k in encodings else x for k, x in enumerate(old)])
        updates, new_state = inner.update(updates, wide, params, **extra)
        new, new_tree = jax.tree.flatten(new_state)
        if len(new) != len(old):  # the caller raises an error: the tree of the state changed
            return updates, new_state
        pairs = enumerate(zip(new, old, strict=True))
        return updates, new_tree.unflatten([narrow(x, y, encodings[k]) if k in encodings else x for k, (x, y) in pairs])

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def encodings_of(config: Config, trained: Layout, state: Any) -> dict[int, Encoding]:
    """Map the index in `state` of each leaf to encode to its encoding. `state` has the shapes of the wide state."""
    found, option = jax.tree_util.tree_leaves_with_path(state), config.state
    encodings = {}
    for k, ((path, x), i) in enumerate(zip(found, params_of_state(state, trained), strict=True)):
        if i is None or x.shape != trained.grads[i].shape or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        encoding = Encoding(x.shape, str(x.dtype), option.format, option.block, option.rounding)
        seen = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if may_encode(config, trained.grads[i], encoding) and (
            option.where is None or option.where(path_of(path), seen)
        ):
            encodings[k] = encoding
    return encodings


def may_encode(config: Config, leaf: Leaf, encoding: Encoding) -> bool:
    """Return whether state that mirrors the parameter `leaf` may be encoded. The data axes do not affect the result."""
    last = leaf.others[-1] if len(leaf.others) == len(leaf.shape) else None
    parts = config.data.size(entry_axes(last))
    whole = not last or leaf.shape[-1] % (parts * encoding.width) == 0  # other mesh axes must not divide a block
    return whole and is_encodable(leaf.shape, config.persist_below) and np.dtype(leaf.dtype).itemsize < 8


def encoded_leaf(leaf: Leaf, encoding: Encoding) -> Leaf:
    return dataclasses.replace(leaf, shape=encoding.encoded_shape, dtype=encoding.code_dtype, encoding=encoding)


def wide_leaf(leaf: Leaf) -> Leaf:
    """Undo `encoded_leaf`. Any other leaf is returned unchanged."""
    encoding = leaf.encoding
    return (
        leaf
        if encoding is None
        else dataclasses.replace(leaf, shape=encoding.shape, dtype=jnp.dtype(encoding.dtype), encoding=None)
    )
