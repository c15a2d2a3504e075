"""What collectives carry: how a value is encoded before it is sent, and decoded after it was received."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Wire:
    """The types in which parameters are gathered and gradients are summed.

    A gathered parameter is decoded where it is used: by the model's own cast, or widened (`gather/evaluate.py`).

    Attributes:
        reduce: Floating type in which gradients are summed over the devices; None: their own.
    """

    reduce: np.dtype | None = None

    def encode_param(self, shard: jax.Array, dtype: np.dtype) -> jax.Array:
        """A parameter's shard as it is all-gathered, for uses that read `dtype`."""
        return lax.convert_element_type(shard, dtype)

    def encode_grad(self, grad: jax.Array) -> jax.Array:
        """A device's gradient as it is reduced."""
        return grad.astype(self.reduce_dtype(grad.dtype))

    def decode_grad(self, grad: jax.Array, dtype: np.dtype) -> jax.Array:
        """A reduced gradient in its parameter's type."""
        return lax.convert_element_type(grad, dtype)

    def reduce_dtype(self, dtype: np.dtype) -> np.dtype:
        """The type in which gradients of a type are summed over the devices."""
        return dtype if self.reduce is None or not jnp.issubdtype(dtype, jnp.floating) else self.reduce

    def sum_dtype(self, dtype: np.dtype) -> np.dtype:
        """The type in which one device sums the gradients of several uses."""
        return dtype if self.reduce is None else jnp.promote_types(dtype, self.reduce)
