"""Define `rows`, with which a loss declares which dim of a value holds the rows of the batch."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from zerojax.primitives import ROWS


def rows(x: "PyTree[Array]", dim: int = 0) -> "PyTree[Array]":
    """Declare that dim `dim` of each array in `x` holds the rows of the batch, and return `x` unchanged.

    In global view, zerojax finds the rows of the batch in every value, so that each device adds up the gradients of its
    own rows. A kernel, a callback or a shuffle of all rows hides them, so zerojax guesses the dim of the result from
    the result's shape. Call `rows` on the result if `train_step` warns that the guess failed. A wrong dim costs time,
    and does not change any value. Outside of global view, and without zerojax, `rows` has no effect.

    Args:
        x: An array, or a tree of arrays.
        dim: The dim that holds the rows. In a dim of size `rows * n`, the rows must vary slowest, as after a reshape of
            `(rows, n)`. A negative dim counts from the end.

    Returns:
        `x`, unchanged. The cotangent of `x` holds the rows on the same dim.

    Raises:
        ValueError: If an array in `x` has no dim `dim`.

    Examples:
        >>> import jax.numpy as jnp
        >>> rows(jnp.ones((4, 3))).shape
        (4, 3)
    """

    def of(x):
        ndim = jax.numpy.ndim(x)
        if not -ndim <= dim < ndim:
            raise ValueError(
                f"rows(x, dim={dim}) was called on an array of shape {jax.numpy.shape(x)}, which has no dim {dim}. "
                "Give the dim that holds the rows of the batch, or leave scalars out."
            )
        return rows_p.bind(x, dim=dim % ndim)

    return jax.tree.map(of, x)


def _batched(args: Sequence, dims: Sequence, *, dim: int) -> tuple[Any, int]:
    return rows_p.bind(args[0], dim=dim + (dim >= dims[0])), dims[0]


rows_p = Primitive(ROWS)
rows_p.def_impl(lambda x, *, dim: x)
rows_p.def_abstract_eval(lambda x, *, dim: x)
ad.deflinear2(rows_p, lambda cotangent, _, *, dim: [rows_p.bind(cotangent, dim=dim)])
batching.primitive_batchers[rows_p] = _batched
mlir.register_lowering(rows_p, lambda context, x, *, dim: [x])
