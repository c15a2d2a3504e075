"""Wrap a transformation so that chosen leaves of its state are packed between updates.

This is a transformation around the user's. The tree of the state stays as it is: a packed array is where the wide
array was. So all rules for state (layouts, offload, checkpoints) apply to packed arrays.
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
from zerojax.layout.leaf import Leaf
from zerojax.layout.packing import Packing, is_packable
from zerojax.layout.tree import Layout, params_of_state
from zerojax.narrow_state.rounding import first_packed, narrow, widen


def with_packed_state(
    inner: optax.GradientTransformationExtraArgs, config: Config, trained: Layout
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that its `init` and `update` take and return packed leaves, as `config.state` says."""
    params = jax.tree.unflatten(trained.treedef, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in trained.grads])
    packings = packings_of(config, trained, compat.eval_shape(inner.init, params))

    def init(params):
        leaves, tree = jax.tree.flatten(inner.init(params))
        return tree.unflatten([first_packed(x, packings[k], k) if k in packings else x for k, x in enumerate(leaves)])

    def update(updates, state, params=None, **extra):
        old, tree = jax.tree.flatten(state)
        wide = tree.unflatten([widen(x, packings[k]) if k in packings else x for k, x in enumerate(old)])
        updates, new_state = inner.update(updates, wide, params, **extra)
        new, new_tree = jax.tree.flatten(new_state)
        if len(new) != len(old):  # the caller refuses this state
            return updates, new_state
        pairs = enumerate(zip(new, old, strict=True))
        return updates, new_tree.unflatten([narrow(x, y, packings[k]) if k in packings else x for k, (x, y) in pairs])

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def packings_of(config: Config, trained: Layout, state: Any) -> dict[int, Packing]:
    """Return the packing of each leaf to pack, by its index in `state`, which has the shapes of the wide state."""
    found, option = jax.tree_util.tree_leaves_with_path(state), config.state
    packings = {}
    for k, ((path, x), i) in enumerate(zip(found, params_of_state(state, trained), strict=True)):
        if i is None or x.shape != trained.grads[i].shape or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        packing = Packing(x.shape, np.dtype(x.dtype), option.format, option.block, option.rounding)
        seen = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if may_pack(config, trained.grads[i], packing) and (option.where is None or option.where(path_of(path), seen)):
            packings[k] = packing
    return packings


def may_pack(config: Config, leaf: Leaf, packing: Packing) -> bool:
    """Return whether state that mirrors the parameter `leaf` may be packed. Does not depend on the data axes."""
    last = leaf.others[-1] if len(leaf.others) == len(leaf.shape) else None
    parts = config.data.size(entry_axes(last))
    whole = not last or leaf.shape[-1] % (parts * packing.width) == 0  # other mesh axes must not divide a block
    return whole and is_packable(leaf.shape, config.persist_below) and packing.dtype.itemsize < 8


def packed_leaf(leaf: Leaf, packing: Packing) -> Leaf:
    return dataclasses.replace(leaf, shape=packing.packed_shape, dtype=packing.code_dtype, packing=packing)


def wide_leaf(leaf: Leaf) -> Leaf:
    """Undo `packed_leaf`. Any other leaf is returned unchanged."""
    packing = leaf.packing
    return (
        leaf if packing is None else dataclasses.replace(leaf, shape=packing.shape, dtype=packing.dtype, packing=None)
    )
