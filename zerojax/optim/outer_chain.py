"""Warn if `tx` is in an `optax.chain` with other transformations that compute with the padding of parameters.

The other transformations run outside of zerojax, on arrays in storage shape. There, a mean silently includes the
padding. zerojax finds the other transformations in the Python frame of the chain's update function, which calls
`tx.update`. Each transformation is traced on logical shapes and on storage shapes, and the two programs are compared,
as for small leaves (`optim.elementwise`).
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

    `layout` describes the parameters that `update` was given. `forms` has the padded form of each parameter, or None.
    """
    if not any(forms):
        return
    for fn, state in transformations_around():
        logical = jax.tree.map(_logical_shape, state, is_leaf=is_padded)
        leaves, structure = jax.tree.flatten(logical)
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            _warn_of(fn, structure, tuple(leaves), layout, tuple(forms))


def transformations_around() -> Iterator[tuple[Any, Any]]:
    """Yield `(update, state)` of every other transformation in each `optax.chain` that is calling `tx.update`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "update_fn" and frame.f_globals.get("__name__") == "optax.transforms._combining":
            yield from others_of(frame.f_locals)
        frame = frame.f_back


def others_of(chain: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return `(update, state)` of every other transformation. `chain` has the local variables of the chain's update."""
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
    """Warn if the update function `fn` traces to different programs for logical and for padded parameters."""
    state = jax.tree.unflatten(structure, leaves)
    init = lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    params = jax.tree.unflatten(layout.treedef, shapes(layout.params))
    changed = {i: layout.params[i].storage_shape for i, form in enumerate(forms) if form}
    try:
        tx = optax.GradientTransformationExtraArgs(init, fn)
        refused = refused_leaves(tx, params, layout.params, params_of_state(state, layout), changed)
    except TransformationError:  # fn needs more arguments, or is written for padded trees: do not warn
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
    """Return the name of the optax function that made the update function `fn`."""
    inner = inspect.getclosurevars(fn).nonlocals.get("tx") if inspect.isfunction(fn) else None
    name = getattr(getattr(inner, "update", fn), "__qualname__", "A transformation")
    return name.partition(".<locals>")[0]
