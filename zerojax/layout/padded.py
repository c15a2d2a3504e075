"""`Padded`: a leaf whose stored array is longer than its logical array.

Indexing, arithmetic and conversion to an array use the logical array. A `Padded` does not have an array's methods.
"""

import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from zerojax.config.chosen import LeafMask
from zerojax.layout.leaf import PaddedNode, is_padded, trim


@functools.partial(jax.tree_util.register_dataclass, data_fields=["storage"], meta_fields=["shape", "dim", "extent"])
@dataclasses.dataclass(frozen=True)
class Padded(PaddedNode):
    """An array that is padded at the end of one dim, so that it can be sharded evenly.

    `Padded` is a pytree node, so `jax.tree.map` applies a function to the stored array. zerojax passes logical arrays
    to losses and optimizers. `jax.numpy`, NumPy, operators and Flax's modules treat a `Padded` as its logical array.

    Attributes:
        storage: The stored array, in storage shape. It may have additional dims, as in a stack or a batch. A function
            that is mapped over a tree may also replace the array by another value: a sharding, a flag, a key, None.
        shape: Logical shape.
        dim: The padded dim.
        extent: Length of `dim` in storage, in elements. None: the length of `dim` in `storage`.

    Raises:
        ValueError: If `storage` is an array of numbers that lacks a dim of the storage shape. For example,
            `jax.tree.map(jnp.mean, params)` would average over elements and padding.

    Examples:
        >>> x = Padded(jnp.zeros(264), shape=(257,), dim=0)
        >>> x.shape, x.logical().shape, x.storage.shape
        ((257,), (257,), (264,))
    """

    storage: Shaped[Array, "*storage"]
    shape: tuple[int, ...]
    dim: int
    extent: int | None = None

    def __post_init__(self):
        is_number = is_number_array(self.storage)
        if not is_number and not isinstance(self.storage, jax.Array | jax.ShapeDtypeStruct):
            return
        found = tuple(self.storage.shape)
        if self.extent is None and len(found) == len(self.shape):  # bools and keys are padded, too
            object.__setattr__(self, "extent", found[self.dim])
        if is_number and not has_dims(found, self._storage_shape):
            from zerojax import internals

            if internals.is_sum_over_tree():
                return
            raise ValueError(
                f"A parameter of shape {list(self.shape)} is padded to {list(self._storage_shape)} in storage, and a "
                f"function that was mapped over the tree gave an array of shape {list(found)} for it. Such a function "
                f"sees the padding too, so its result is not that of the parameter. Map it over zerojax.logical(tree), "
                f"whose leaves are arrays without padding."
            )

    @property
    def _storage_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.extent or self.shape[self.dim], *self.shape[self.dim + 1 :])

    @property
    def dtype(self):
        return self.storage.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def logical(self) -> Shaped[Array, "*logical"]:
        """Return the array without padding, in logical shape. For a stack, return the stack of logical arrays."""
        stacked = len(self.storage.shape) - len(self.shape)
        if tuple(self.storage.shape)[stacked:] != self._storage_shape:
            raise ValueError(
                f"An array of shape {list(self.storage.shape)} is in the place of a padded parameter, which has shape "
                f"{list(self._storage_shape)} in storage. Its padding can be removed only if that shape comes last: "
                f"stack and batch parameters along dim 0."
            )
        return trim(self.storage, stacked + self.dim, self.shape[self.dim])

    __jax_array__ = logical  # for `jax.numpy`
    unbox = logical  # for Flax, whose modules unbox their parameters

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.logical(), dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        """Index the logical array. For example, NNX's modules read a parameter as `kernel[...]`."""
        return self.logical()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.logical())

    def __getattr__(self, name: str) -> Any:
        """Raise an AttributeError that explains what a `Padded` is, because the caller probably expects an array."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"A Padded has no {name!r}. It is a parameter of shape {list(self.shape)}, padded to "
            f"{list(jnp.shape(self.storage))} in storage so that the devices can share it. Code of a model takes "
            f"logical parameters: call it in tx.eval_step(fn), which gathers them as training does, or on "
            f"tx.unshard(params); for this one, x.logical()."
        )


def is_number_array(x: Any) -> bool:
    """Return whether a value is an array of numbers. False for bools, PRNG keys, and uint32, which may be raw keys."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not hasattr(x, "shape") or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return False
    return jnp.issubdtype(dtype, jnp.number) and dtype != jnp.uint32


def has_dims(found: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    """Return whether the shape `found` contains `dims` in this order, with or without other dims between them."""
    rest = iter(found)
    return all(size in rest for size in dims)


def of_logical(name: str) -> Callable:
    """Return the method of `Padded` for the operator `name`, which computes on the logical array."""
    return lambda self, *other: getattr(self.logical(), name)(*other)


for _name in "add sub mul truediv floordiv mod pow matmul".split():
    for _operator in (f"__{_name}__", f"__r{_name}__"):
        setattr(Padded, _operator, of_logical(_operator))
for _operator in "neg abs lt le gt ge".split():
    setattr(Padded, f"__{_operator}__", of_logical(f"__{_operator}__"))


def stored_mask(mask: PyTree, option: str) -> LeafMask:
    """Convert a mask that chooses parameters to a predicate. A bool of the mask may be inside of a `Padded`."""
    return LeafMask.of(jax.tree.map(lambda x: x.storage if is_padded(x) else x, mask, is_leaf=is_padded), option)


def register_with_flax() -> None:
    """Register `Padded` as a box of Flax, because Flax's modules unbox their parameters. Flax may be missing."""
    with contextlib.suppress(ImportError):
        importlib.import_module("flax.core.meta").AxisMetadata.register(Padded)
