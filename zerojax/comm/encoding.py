"""Encode values before collectives send them, and decode the results."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.comm.quantised import Codec
from zerojax.config.options import Wire
from zerojax.config.precision import common_dtype
from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The types and formats in which parameters are gathered and gradients are summed.

    A gathered parameter is converted back where it is used: the model casts it, or `gather/evaluate.py` widens it.
    """

    # the floating type in which gradients are summed over the devices; if None, the type of each gradient
    reduce: np.dtype | None = None
    formats: Wire | None = None  # the formats of quantised leaves; if None, no leaf is quantised

    def encode_grad(self, grad: jax.Array) -> jax.Array:
        return grad.astype(self.reduce_dtype(grad.dtype))

    def gather_codec(self, leaf: Leaf) -> Codec | None:
        """Return the codec that quantises a leaf's shards for a gather, or None if they are sent unquantised.

        If the loss itself quantises a weight to one byte, the weight is sent unchanged: a second rounding would change
        its values.
        """
        if getattr(leaf.dtype, "itemsize", 0) == 1:
            return None
        return self.formats and self._codec(leaf, self.formats.gather)

    def reduce_codec(self, leaf: Leaf) -> Codec | None:
        return self.formats and self._codec(leaf, self.formats.reduce, self.formats.rounding == "stochastic")

    def axes(self, leaf: Leaf) -> tuple[str, ...]:
        over = self.formats and self.formats.over
        return tuple(axis for axis in leaf.axes if over is None or axis in over)

    def _codec(self, leaf: Leaf, fmt: str | None, stochastic: bool = False) -> Codec | None:
        if self.formats is None or fmt is None or leaf.dim is None or not leaf.is_quantised or not self.axes(leaf):
            return None
        return Codec(fmt, self.formats.block, stochastic)

    def reduce_dtype(self, dtype: np.dtype) -> np.dtype:
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return _at_least_bfloat16(dtype) if self.reduce is None else self.reduce

    def sum_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which one device sums a parameter's gradients from several uses: at least bfloat16."""
        wide = _at_least_bfloat16(dtype)
        return wide if self.reduce is None else common_dtype(wide, self.reduce)


def _at_least_bfloat16(dtype: np.dtype) -> np.dtype:
    """Replace a floating type narrower than bfloat16 by bfloat16, because a sum in float8 loses most of its digits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 2
    return np.dtype(jnp.bfloat16) if narrow else dtype
