"""What a loss function returns, read and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.comm.collectives import Collectives
from zerojax.config.precision import common_dtype
from zerojax.train.arguments import call

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree


class Returned(NamedTuple):
    """One call of a loss function, read.

    Attributes:
        total: Its loss, or the total of a weighted one; a scalar of at least float32.
        weight: The weight of the total; 1 unless the loss is weighted.
        aux: What it returned beside; None without `has_aux`.
        mutable: The new mutable state; None without `mutable`.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    aux: PyTree
    mutable: PyTree


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function and how to read what it returns.

    Attributes:
        fn: `fn(params, batch, *args)`, on the rows of its view.
        has_aux: It returns `(loss, aux)`.
        weighted: Its loss is `(total, weight)`; the mean is the sum of the totals over
            the sum of the weights.
        mutable: It is `fn(params, mutable, batch, *args)`, and returns the new mutable
            state beside the loss: `(loss, mutable)`, or `(loss, mutable, aux)`.
    """

    fn: Callable
    has_aux: bool = False
    weighted: bool = False
    mutable: bool = False

    @property
    def form(self) -> str:
        """Describe what the function has to return."""
        loss = "(total, weight)" if self.weighted else "loss"
        parts = [loss, *(["mutable"] if self.mutable else []), *(["aux"] if self.has_aux else [])]
        return f"({', '.join(parts)})" if len(parts) > 1 else loss

    def returned(self, loss: Array, mutable: PyTree, aux: PyTree) -> Any:
        """Return the combined results in the form in which the function returns its own."""
        parts = (loss, *((mutable,) if self.mutable else ()), *((aux,) if self.has_aux else ()))
        return parts if len(parts) > 1 else loss

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Returned:
        """Call the function and read what it returns.

        Args:
            params: Full parameters, logical shapes.
            mutable: The mutable state; None without `mutable`.
            batch: The rows of its view.
            args: Further arguments, `packed` or as they are.

        Raises:
            TypeError: If it is not of the form announced.
            ValueError: If loss or weight is no scalar.
        """
        given = (mutable,) if self.mutable else ()
        value = call(self.fn, (params, *given), batch, args)
        aux = new = None
        if self.has_aux or self.mutable:
            count = 1 + self.has_aux + self.mutable
            if not (isinstance(value, tuple) and len(value) == count):
                options = [name for name in ("mutable", "has_aux") if getattr(self, name)]
                raise TypeError(
                    f"With {' and '.join(f'{name}=True' for name in options)} the loss function returns {self.form}, "
                    f"not {type(value).__name__}{f' of {len(value)}' if isinstance(value, tuple) else ''}."
                )
            value, *rest = value
            aux = rest.pop() if self.has_aux else None
            new = rest.pop() if self.mutable else None
            check_mutable(new, mutable)
        if self.weighted:
            if not (isinstance(value, tuple) and len(value) == 2):
                raise TypeError(f"With weighted=True the loss function returns {self.form}, and its loss is {value!r}.")
            total, weight = scalar("total", value[0]), scalar("weight", value[1])
        else:
            total, weight = scalar("loss", value), jnp.ones((), jnp.float32)
        return Returned(at_least_float32(total), at_least_float32(weight), aux, new)


def scalar(name: str, value: Any) -> Array:
    """Check that the loss function returned a real scalar."""
    if isinstance(value, tuple | list | dict):
        raise TypeError(
            f"The loss function must return a scalar {name}, not a {type(value).__name__}. "
            f"For (loss, aux) pass has_aux=True; for (total, weight) pass weighted=True."
        )
    if value is None:
        raise TypeError(f"The loss function must return a scalar {name}, but it returns None: is its `return` missing?")
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"The loss function must return a scalar {name}, but it has shape {list(value.shape)}. "
            f"Take jnp.mean(...) over the rows, or return (total, weight) with weighted=True."
        )
    if name != "weight" and not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"The loss function must return a floating point {name}, but it is {value.dtype}.")
    return value


def at_least_float32(value: Array) -> Array:
    """Cast to float32 unless the value is wider: sums over devices need the precision."""
    return value.astype(common_dtype(value.dtype, jnp.float32))


def check_mutable(new: PyTree, old: PyTree) -> None:
    """Refuse a mutable state that is not of the kind it was.

    Raises:
        TypeError: If the structure, or the shape or type of a leaf, is not that of the old state.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(new)
    if structure != jax.tree.structure(old):
        raise TypeError(
            f"The loss function returns a mutable state of the structure {structure}, and it was given "
            f"{jax.tree.structure(old)}. Return a state of the same tree."
        )
    for (path, x), before in zip(found, jax.tree.leaves(old), strict=True):
        if jnp.shape(x) != jnp.shape(before) or jnp.result_type(x) != jnp.result_type(before):
            raise TypeError(
                f"mutable{jax.tree_util.keystr(path)} comes back as {jnp.result_type(x)}{list(jnp.shape(x))}, and was "
                f"given as {jnp.result_type(before)}{list(jnp.shape(before))}. Return it in the shape and type it had."
            )


def mean_mutable(mutable: PyTree, comm: Collectives) -> Any:
    """Average the float leaves of the mutable state over the devices; others are the same on each."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return comm.pmean(at_least_float32(x)).astype(x.dtype)

    return jax.tree.map(mean, mutable)
