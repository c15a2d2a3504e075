"""The arguments of a loss: which of them is the batch, and which values (flags, names, functions) are not traced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

# Stands for a batch that is given by keyword, or not at all.
NO_BATCH = inspect.Parameter.empty
_TRACED = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, int, float, complex)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A hashable value for which the program is compiled. For jit, it is a node without leaves."""

    value: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["batch_too"])
@dataclasses.dataclass(frozen=True)
class Keywords:
    """The keyword arguments of a loss, by name, which zerojax passes as the last positional argument.

    With `batch_too`, the batch is a dict of keyword arguments, too.
    """

    values: dict[str, Any]
    batch_too: bool = False


def separated(args: tuple, keywords: Mapping[str, Any], *, mutable: bool = False) -> tuple[Any, Any, tuple]:
    """Find the batch among the arguments of a loss after its parameters.

    Without a positional batch, the batch is a dict of the keyword arguments that have rows. Other keyword arguments,
    such as flags, numbers and keys, are further arguments. `NO_BATCH` among `args` is ignored. With `mutable`, the
    first of `args` is a mutable state.

    Returns:
        `(mutable state or None, batch, rest)`, with `rest` as `packed` returns it.

    Raises:
        TypeError: If there is no batch.
    """
    args, leading = tuple(x for x in args if x is not NO_BATCH), 1 if mutable else 0
    if len(args) > leading:
        state, batch, *rest = args if mutable else (None, *args)
        return state, batch, packed(tuple(rest), keywords)
    rows = {name: x for name, x in keywords.items() if has_rows(x)}
    if not rows or len(args) < leading:
        raise TypeError(
            "The loss was called without a batch. Rows that it closes over are not divided over the devices: each "
            "device would compute all of them. Make the rows an argument of the loss, and pass them here: "
            "loss_fn(params, batch), or loss_fn(params, x=x, y=y)."
        )
    others = {name: x for name, x in keywords.items() if name not in rows}
    return (args[0] if mutable else None), rows, packed((), others, batch_too=True)


def has_rows(tree: Any) -> bool:
    """Return whether an argument may be a batch: whether it contains an array that is no scalar."""
    return any(len(getattr(x, "shape", ())) > 0 for x in jax.tree.leaves(tree))


def packed(args: tuple, keywords: Mapping[str, Any] | None = None, *, batch_too: bool = False) -> tuple:
    """Pack arguments into one tuple of trees of arrays. Every other value in them becomes a `Constant`.

    Python's numbers are arrays, as under `jax.jit`. Its bools are constants, because a model branches on them. Raise a
    TypeError for a ref, and for a value that is neither an array nor hashable.
    """

    def one(path, x):
        if isinstance(x, jax.Ref):
            raise TypeError(
                f"{_name(path)} is a jax.Ref, which has no sharding over several devices. Pass its value, and return "
                "the new one: as aux, or with mutable=True of train_step as the mutable state."
            )
        if is_constant(x) or (isinstance(x, _TRACED) and not isinstance(x, bool)) or hasattr(x, "__jax_array__"):
            return x
        try:
            hash(x)
        except TypeError as error:
            raise TypeError(
                f"{_name(path)} is a {type(x).__name__}, which is no array, and cannot be hashed as a constant for "
                "which the program is compiled. Pass arrays or hashable values, or let the loss close over it."
            ) from error
        return Constant(x)

    given = (*args, Keywords(dict(keywords or {}), batch_too)) if keywords or batch_too else args
    return jax.tree_util.tree_map_with_path(one, given, is_leaf=is_constant)


def call(fn: Callable, leading: tuple, batch: Any, args: tuple) -> Any:
    """Call a function as the caller wrote the call, given its batch and further arguments, `packed` or not."""
    args = jax.tree.map(lambda x: x.value if is_constant(x) else x, args, is_leaf=is_constant)
    if not (args and isinstance(args[-1], Keywords)):
        return fn(*leading, batch, *args)
    *rest, keywords = args
    if keywords.batch_too:
        return fn(*leading, *rest, **batch, **keywords.values)
    return fn(*leading, batch, *rest, **keywords.values)


def is_constant(x: Any) -> bool:
    """Return whether a node is a `Constant`."""
    return isinstance(x, Constant)


def _name(path: tuple) -> str:
    return f"args{jax.tree_util.keystr(path)}"
