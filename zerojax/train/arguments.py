"""Further arguments of a loss: what is no array (a flag, a name, a function) is not traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

_TRACED = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, int, float, complex)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant:
    """A leaf that programs are compiled for: to jit a node without leaves.

    Attributes:
        value: Hashable.
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keywords:
    """Keyword arguments, as the last positional one.

    Attributes:
        values: By name.
    """

    values: dict[str, Any]


def separated(args: tuple, mutable: bool) -> tuple[Any, Any, tuple]:
    """What a loss is called with after its parameters: mutable state, None if there is none, the batch, the rest.

    Raises:
        TypeError: If there is no batch.
    """
    if len(args) < 1 + mutable:
        raise TypeError(
            "The loss was called without a batch. Rows that it closes over are not divided over the devices: each "
            "would compute all of them. Give them as an argument, to the loss and here: loss_fn(params, batch)."
        )
    state, batch, *rest = args if mutable else (None, *args)
    return state, batch, tuple(rest)


def packed(args: tuple, keywords: Mapping[str, Any] | None = None) -> tuple:
    """Arguments as one tuple of trees of arrays; everything else in them is a `Constant`.

    Python's numbers are arrays, as under `jax.jit`; its bools are not, since a model branches on them.

    Raises:
        TypeError: If something that is no array cannot be hashed, or is a ref.
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
                f"{_name(path)} is a {type(x).__name__}, which is no array, and cannot be hashed as a constant that "
                "the program is compiled for. Pass arrays or hashable values, or let the loss close over it."
            ) from error
        return Constant(x)

    given = args if not keywords else (*args, Keywords(dict(keywords)))
    return jax.tree_util.tree_map_with_path(one, given, is_leaf=is_constant)


def unpacked(args: tuple) -> tuple[tuple, dict[str, Any]]:
    """`(args, keywords)` as they were given."""
    args = jax.tree.map(lambda x: x.value if is_constant(x) else x, args, is_leaf=is_constant)
    if args and isinstance(args[-1], Keywords):
        return args[:-1], args[-1].values
    return args, {}


def is_constant(x: Any) -> bool:
    """Whether a node is a `Constant`."""
    return isinstance(x, Constant)


def _name(path: tuple) -> str:
    return f"args{jax.tree_util.keystr(path)}"
