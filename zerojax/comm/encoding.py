"""What collectives carry: how a value is encoded before it is sent, and decoded after it was received."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.comm.quantised import Codec
from zerojax.config.precision import common_dtype
from zerojax.config.wire import Wire
from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Encoding:
    """In which types and formats parameters are gathered and gradients are summed.

    A gathered parameter is decoded where it is used: by the model's own cast, or widened (`gather/evaluate.py`).

    Attributes:
        reduce: Floating type in which gradients are summed over the devices; None: their own.
        formats: The formats of quantised leaves. None: no leaf is quantised.
    """

    reduce: np.dtype | None = None
    formats: Wire | None = None

    def encode_param(self, shard: jax.Array, dtype: np.dtype) -> jax.Array:
        """Return a parameter's shard as it is all-gathered, for uses that read `dtype`."""
        return lax.convert_element_type(shard, dtype)

    def encode_grad(self, grad: jax.Array) -> jax.Array:
        """Return a device's gradient as it is reduced."""
        return grad.astype(self.reduce_dtype(grad.dtype))

    def decode_grad(self, grad: jax.Array, dtype: np.dtype) -> jax.Array:
        """Return a reduced gradient in its parameter's type."""
        return lax.convert_element_type(grad, dtype)

    def gather_codec(self, leaf: Leaf) -> Codec | None:
        """Return how a leaf's shards are quantised for a gather, or None if they are sent unchanged."""
        return self._codec(leaf, None if self.formats is None else self.formats.gather)

    def reduce_codec(self, leaf: Leaf) -> Codec | None:
        """Return how a leaf's gradients are quantised for a reduction, or None if they are sent unchanged."""
        codec = self._codec(leaf, None if self.formats is None else self.formats.reduce)
        stochastic = self.formats is not None and self.formats.rounding == "stochastic"
        return dataclasses.replace(codec, stochastic=True) if codec and stochastic else codec

    def axes(self, leaf: Leaf) -> tuple[str, ...]:
        """Return the axes of a leaf on which payloads are quantised."""
        over = None if self.formats is None else self.formats.over
        return tuple(axis for axis in leaf.axes if over is None or axis in over)

    def _codec(self, leaf: Leaf, fmt: str | None) -> Codec | None:
        if self.formats is None or fmt is None or leaf.dim is None or not leaf.is_quantised or not self.axes(leaf):
            return None
        return Codec(fmt, self.formats.block)

    def reduce_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which gradients are summed over the devices: at least bfloat16."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return _at_least_bfloat16(dtype) if self.reduce is None else self.reduce

    def sum_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the type in which one device sums the gradients of several uses: at least bfloat16."""
        wide = _at_least_bfloat16(dtype)
        return wide if self.reduce is None else common_dtype(wide, self.reduce)


def _at_least_bfloat16(dtype: np.dtype) -> np.dtype:
    """Return bfloat16 for a narrower floating type: a sum of a few float8 numbers loses most of its digits."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 2
    return np.dtype(jnp.bfloat16) if narrow else dtype
