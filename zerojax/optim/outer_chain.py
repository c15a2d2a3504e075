"""Warn of optax transformations around `tx`, in an `optax.chain`, that compute with the padding of parameters.

These transformations run outside of zerojax, on storage, where nothing says that a mean counts the padding. But the
chain calls `tx.update`, and the frame of the chain's update function holds its other transformations. Each of them is
traced on logical shapes and on storage shapes, and both programs are compared, as for small leaves
(`optim.elementwise`).
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.layout.opt_state import params_of_state
from zerojax.layout.padded import is_padded
from zerojax.layout.tree import Layout
from zerojax.optim.elementwise import refused_leaves
from zerojax.optim.transformation import TransformationError
from zerojax.placement.storage import Form, shapes


def warn_of_outer_transformations(layout: Layout, forms: Sequence[Form]) -> None:
    """Warn once for each transformation of a surrounding `optax.chain` whose results may depend on padding.

    `layout` describes the parameters that `update` was given, and `forms` how each of them is padded, or None.
    """
    if not any(forms):
        return
    for fn, state in transformations_around():
        logical = jax.tree.map(_logical_shape, state, is_leaf=is_padded)
        leaves, structure = jax.tree.flatten(logical)
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            _warn_of(fn, structure, tuple(leaves), layout, tuple(forms))


def transformations_around() -> Iterator[tuple[Any, Any]]:
    """Yield the update function and the state of the other transformations of every chain that calls this one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "update_fn" and frame.f_globals.get("__name__") == "optax.transforms._combining":
            yield from others_of(frame.f_locals)
        frame = frame.f_back


def others_of(chain: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the other transformations, given the variables of the update function of a chain or of a named chain."""
    states = chain.get("state", ())
    if "transforms" in chain:
        inside = getattr(chain.get("tx"), "update", None)
        pairs = [(tx.update, states[name]) for name, tx in chain["transforms"]]
    else:
        inside = chain.get("fn")
        pairs = list(zip(chain.get("update_fns", ()), states, strict=False))
    return [(fn, state) for fn, state in pairs if fn is not inside]


@functools.lru_cache(maxsize=64)
def _warn_of(fn: Any, structure: Any, leaves: tuple, layout: Layout, forms: tuple[Form, ...]) -> None:
    """Warn if the update of a transformation is not the same program on the storage shapes of padded parameters."""
    state = jax.tree.unflatten(structure, leaves)
    init = lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    params = jax.tree.unflatten(layout.treedef, shapes(layout.params))
    changed = {i: layout.params[i].storage_shape for i, form in enumerate(forms) if form}
    try:
        tx = optax.GradientTransformationExtraArgs(init, fn)
        refused = refused_leaves(tx, params, layout.params, params_of_state(state, layout), changed)
    except TransformationError:  # it needs more arguments, or is written for padded trees: nothing is known about it
        return
    if seen := sorted(refused.intersection(changed)):
        leaf = layout.params[seen[0]]
        warnings.warn(
            f"{_name(fn)} runs outside of zero_shard, in an optax.chain around it, and sees params{leaf.path} in "
            f"storage: padded from {list(leaf.shape)} to {list(leaf.storage_shape)}. It does not work element by "
            f"element, so its result may differ from that of plain optax. Chain it inside: "
            f"zero_shard(optax.chain(...), ...) gives every transformation logical arrays.",
            stacklevel=2,
        )


def _logical_shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x


def _name(fn: Any) -> str:
    """Return optax's name for the transformation of an update function."""
    inner = inspect.getclosurevars(fn).nonlocals.get("tx") if inspect.isfunction(fn) else None
    name = getattr(getattr(inner, "update", fn), "__qualname__", "A transformation")
    return name.partition(".<locals>")[0]
