"""Microbatches: differentiated one after the other, so that the activations are of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.config.precision import common_dtype
from zerojax.train.batch import fold_keys
from zerojax.train.loss import at_least_float32
from zerojax.train.view import LossInputs, View

if TYPE_CHECKING:
    from jaxtyping import Array


def accumulate(view: View, given: LossInputs, scale: Array):
    """Differentiate the microbatches in a loop; local shapes.

    Stages 0 and 1 add up full gradients and reduce them once; stages 2 and 3 reduce-scatter
    each microbatch's, and hold 1/N. In hybrid sharding they do so within a host, and leave the sums
    to be reduced across.

    Returns:
        `(returned, grads, mutable, values)`: what the loss function returned, microbatches on dim 0;
        `scale` times the gradient of the mean over devices and microbatches, or of the sum of weighted losses, reduced
        but for `View.reduce_across`; the last mutable state; the maximum of what each overwritten parameter is to be.
    """
    comm = view.comm

    def zeros(k) -> Array:
        leaf = view.layout.params[view.layout.trained[k]]
        wide = common_dtype(leaf.dtype, jnp.float32)
        dtype = wide if view.config.precision is None else comm.encoding.reduce_dtype(leaf.dtype)
        return (
            jnp.zeros(comm.grad_shape(view.reduced(k)), dtype) if view.reduces_each else comm.zeros(leaf.shape, dtype)
        )

    def iteration(carry, microbatch):
        sums, mutable, maxima = carry
        number, rows = microbatch
        one = LossInputs(given.stored, mutable, rows, fold_keys(given.args, number))
        returned, grads, factor, values = view.value_and_grad(one, scale)
        if view.reduces_each:
            grads = view.reduce(grads)
        # Here XLA fuses the product with the sum; behind the loop it may be another pass over the gradients.
        share = 1 / view.microbatches if factor is None else factor
        grads = [at_least_float32(g) * share for g in grads]
        sums = [comm.add(s, g.astype(s.dtype)) for s, g in zip(sums, grads, strict=True)]
        maxima = [jnp.maximum(m, x) for m, x in zip(maxima, values, strict=True)]
        return (sums, returned.mutable, maxima), returned._replace(mutable=None)

    microbatches = (jnp.arange(view.accumulate), jax.tree.map(view.microbatches_of, given.batch))
    lowest = [jnp.full_like(given.stored[i], -jnp.inf) for i in view.layout.overwritten]
    carry = [zeros(k) for k in view.differentiable], given.mutable, lowest
    (sums, mutable, maxima), returned = lax.scan(iteration, carry, microbatches)
    if not view.reduces_each:
        sums = view.reduce(sums)
    return returned, sums, mutable, maxima
