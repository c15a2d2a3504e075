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

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import jaxprs
from zerojax.comm.collectives import Collectives
from zerojax.gather.apart import Apart
from zerojax.gather.engine import as_function
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
    run = as_function(apart.program, Options(dataclasses.replace(comm, defers=False), 0, True), {})
    values = dict(enumerate([*args, *apart.constants]))
    used = [i for i in apart.reads if i in leaves]

    def own(i: int) -> Array:
        """Return the device's shard of a parameter that all devices have in full."""
        leaf = leaves[i]
        assert leaf.dim is not None
        return comm.divided(values[i], leaf.dim, leaf.local_shape[leaf.dim], leaf.axes)

    def reductions(shards: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        of = values | dict(zip(used, shards, strict=True))
        found = run(*[of[i] for i in apart.reads])
        return [x for x in found if jaxprs.differentiable(x.dtype)], found

    moved, pull, results = jax.vjp(reductions, [own(i) for i in used], has_aux=True)
    moving = [k for k, x in enumerate(results) if jaxprs.differentiable(x.dtype)]

    mantissa = min((jnp.finfo(x.dtype).nmant for x in [*(values[i] for i in used), *moved]), default=0)

    def pull_shards(cotangents: Sequence[Array]) -> dict[int, Array]:
        # A cotangent may have one more dim in front, with one partial sum per worker.
        sums = [c.sum(0) if c.ndim > x.ndim else c for c, x in zip(cotangents, moved, strict=True)]
        if not is_sum or mantissa >= jnp.finfo(jnp.float32).nmant:
            (shards,) = pull([c.astype(x.dtype) for c, x in zip(sums, moved, strict=True)])
            return dict(zip(used, shards, strict=True))
        # The microbatches' cotangents were summed in float32. Narrow parameters would round the gradient of their sum,
        # so pull the sum's leading digits and its other digits one after the other.
        leading = [_rounded(c, mantissa) for c in sums]
        parts = leading, [c - x for c, x in zip(sums, leading, strict=True)]
        (first,), (second,) = (pull([c.astype(x.dtype) for c, x in zip(cs, moved, strict=True)]) for cs in parts)
        wide = [at_least_float32(a) + at_least_float32(b) for a, b in zip(first, second, strict=True)]
        return dict(zip(used, wide, strict=True))

    return results, moving, pull_shards


def _rounded(x: Array, mantissa: int) -> Array:
    """Return an array rounded to `mantissa` bits, in its own type. Complex arrays stay as they are."""
    if jnp.iscomplexobj(x):
        return x
    return lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, min(mantissa, jnp.finfo(x.dtype).nmant))
