"""At stages 1 and 2, compute reductions of parameters, such as penalties, on shards.

`gather.apart` takes the reductions out of a traced loss. Each device computes its part of them from its shards, once
per step. The rest of the loss is differentiated with respect to their results, which are small. From these cotangents,
each device computes its shard of the parameters' gradients, which is added to the gradients after these are reduced. So
no collective moves more bytes than without the penalty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from zerojax import jaxprs
from zerojax.comm.collectives import Collectives
from zerojax.gather.apart import Apart
from zerojax.gather.engine import run_backward, run_forward
from zerojax.gather.schedule import Options
from zerojax.layout.leaf import Leaf
from zerojax.train.loss import at_least_float32

if TYPE_CHECKING:
    from jaxtyping import Array


def reductions_on_shards(
    apart: Apart, args: Sequence, leaves: Mapping[int, Leaf], comm: Collectives, is_sum: bool
) -> tuple[Sequence[Array], Sequence[int], Callable]:
    """Compute the reductions of a loss on shards.

    Args:
        apart: The loss, divided into its reductions and the rest.
        args: The values of the loss's arguments. The batch may have all microbatches, because no reduction reads it.
        leaves: How the gradients of parameters are sharded, by the index of the argument.
        comm: The collectives of the view.
        is_sum: Whether `pull` gets sums over microbatches.

    Returns:
        `(results, moving, pull)`; see `full_params.FullLoss`.
    """
    # The reduction is complete, also if `comm` leaves the sums of other gradients to the end of the step.
    options = Options(dataclasses.replace(comm, defers=False), prefetch=0, reshard_after_forward=True)
    values = [*args, *apart.constants]
    # All devices have a parameter in full, and each takes its shard.
    own = lambda x, leaf: comm.divided(x, leaf.dim, leaf.local_shape[leaf.dim], leaf.axes)
    shards = [own(values[i], leaves[i]) if i in leaves else values[i] for i in apart.reads]
    active = [i in leaves for i in apart.reads]
    results, residuals = run_forward(apart.program, shards, active, options)
    moved = {k: x for k, x in enumerate(results) if jaxprs.differentiable(x.dtype)}
    floats = [*(values[i] for i in apart.reads if i in leaves), *moved.values()]
    mantissa = min((jnp.finfo(x.dtype).nmant for x in floats), default=0)

    def pull(cotangents: Sequence[Array]) -> dict[int, Array]:
        given: list = [None] * len(results)
        for (k, x), cotangent in zip(moved.items(), cotangents, strict=True):
            given[k] = cotangent.astype(x.dtype)
        found = zip(run_backward(apart.program, shards, active, residuals, given, options), shards, strict=True)
        sums = [g if g is None or g.ndim == x.ndim else g.sum(0) for g, x in found]
        return {i: g for i, g in zip(apart.reads, sums, strict=True) if g is not None}

    def pull_sums(cotangents: Sequence[Array]) -> dict[int, Array]:
        # A cotangent may have one more dim in front, with one partial sum per worker.
        sums = [c.sum(0) if c.ndim > x.ndim else c for c, x in zip(cotangents, moved.values(), strict=True)]
        if not is_sum or mantissa >= jnp.finfo(jnp.float32).nmant:
            return pull(sums)
        # The microbatches' cotangents were summed in float32. Narrow parameters would round the gradient of their sum,
        # so pull the sum's leading digits and its other digits one after the other.
        leading = [_rounded(c, mantissa) for c in sums]
        first, second = pull(leading), pull([c - x for c, x in zip(sums, leading, strict=True)])
        return {i: at_least_float32(g) + at_least_float32(second[i]) for i, g in first.items()}

    return results, list(moved), pull_sums


def _rounded(x: Array, mantissa: int) -> Array:
    """Return an array rounded to `mantissa` bits, in its own type. Complex arrays stay as they are."""
    if jnp.iscomplexobj(x):
        return x
    return lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, min(mantissa, jnp.finfo(x.dtype).nmant))
