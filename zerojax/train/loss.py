"""Call a loss function, and check the values that it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import names
from zerojax.comm.collectives import Collectives
from zerojax.config import check_word
from zerojax.config.precision import common_dtype
from zerojax.train.arguments import call

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree


class Returned(NamedTuple):
    """The values that one call of a loss function returned.

    Attributes:
        total: The loss, or the total of a weighted loss. A scalar in float32 or wider.
        weight: The weight of a weighted loss; otherwise 1.
        aux: The auxiliary results; None without `has_aux`.
        mutable: The new mutable state; None without `mutable`.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    aux: PyTree
    mutable: PyTree


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function, and flags for its arguments and return values.

    Attributes:
        fn: `fn(params, batch, *args)`. In device view, `batch` has only the rows of the device.
        has_aux: Whether `fn` returns `(loss, aux)`.
        weighted: Whether the loss is `(total, weight)`. The mean loss is the sum of totals over the sum of weights.
        mutable: Whether `fn` is `fn(params, mutable, batch, *args)` and returns `(loss, mutable)`, or
            `(loss, mutable, aux)` with `has_aux`.
        reduction: Whether the losses of microbatches and, in device view, of devices are averaged ("mean", or None) or
            added up ("sum"). None also refuses to average losses that are sums over rows.
        undivided: The kernels that every device ran on all rows when the loss was last traced, in words.
    """

    fn: Callable
    has_aux: bool = False
    weighted: bool = False
    mutable: bool = False
    reduction: Literal["mean", "sum"] | None = None
    undivided: list[str] = dataclasses.field(default_factory=list, init=False, compare=False, repr=False)

    def returned(self, loss: Any, mutable: PyTree, aux: PyTree) -> Any:
        """Return a loss, a mutable state and aux in the form that `fn` returns, as one value or as a tuple."""
        parts = (loss, *((mutable,) if self.mutable else ()), *((aux,) if self.has_aux else ()))
        return parts if len(parts) > 1 else loss

    def __post_init__(self):
        """Check the reduction."""
        check_word("reduction", self.reduction, (None, "mean", "sum"))
        if self.weighted and self.reduction is not None:
            raise ValueError(
                f"reduction={self.reduction!r} says how losses are combined, and with weighted=True they are the sum "
                f"of totals over the sum of weights. Give one of them."
            )

    @property
    def form(self) -> str:
        """Describe the values that `fn` must return, for an error message."""
        parts = self.returned("(total, weight)" if self.weighted else "loss", "mutable", "aux")
        return parts if isinstance(parts, str) else f"({', '.join(parts)})"

    def call(self, params: PyTree, mutable: PyTree, batch: PyTree, args: tuple) -> Returned:
        """Call `fn` on logical parameters, and check the values that it returns. `args` may be `packed` or not."""
        given = (mutable,) if self.mutable else ()
        value = call(self.fn, (params, *given), batch, args)
        aux = new = None
        if self.has_aux or self.mutable:
            if not (isinstance(value, tuple) and len(value) == len(self.returned(None, None, None))):
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
    """Convert a value that the loss function returned to an array. Raise an error if it is not a real scalar."""
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
        raise TypeError(
            f"The loss function must return a floating point {name}, but it is {value.dtype}, which has no gradient. "
            f"Compute it with floating point numbers."
        )
    return value


def at_least_float32(value: Array) -> Array:
    """Cast a value to float32, unless its type is wider, because sums over devices need this precision."""
    return value.astype(common_dtype(value.dtype, jnp.float32))


def check_mutable(new: PyTree, old: PyTree) -> None:
    """Raise a TypeError if the `new` mutable state differs from the `old` state in structure, shape or type."""
    found, structure = jax.tree_util.tree_flatten_with_path(new)
    if structure != jax.tree.structure(old):
        raise TypeError(
            f"The loss function returns a mutable state of the structure {structure}, but it was given a state of the "
            f"structure {jax.tree.structure(old)}. Return a state of the same structure."
        )
    for (path, x), before in zip(found, jax.tree.leaves(old), strict=True):
        if jnp.shape(x) != jnp.shape(before) or jnp.result_type(x) != jnp.result_type(before):
            raise TypeError(
                f"mutable{jax.tree_util.keystr(path)} comes back as {jnp.result_type(x)}{list(jnp.shape(x))}, and was "
                f"given as {jnp.result_type(before)}{list(jnp.shape(before))}. Return the same shape and type."
            )


@jax.named_scope(names.MEAN)
def mean_mutable(mutable: PyTree, comm: Collectives) -> Any:
    """Average the float leaves of the mutable state over the devices. Return other leaves unchanged."""

    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return comm.over_workers(lax.pmean, at_least_float32(x)).astype(x.dtype)

    return jax.tree.map(mean, mutable)
