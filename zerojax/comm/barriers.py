"""Order collectives and compute through data dependences, because XLA's schedulers keep no other order."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax import compat, jaxprs, names


@jax.named_scope(names.SHARDS)
def barrier(anchor: Sequence[jax.Array], *groups: Sequence[jax.Array]) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """Return the arrays after one optimization barrier. A returned array can be read only after all are computed.

    If the anchor is empty, or all groups are empty, there is no barrier.
    """
    if not anchor or not any(groups):
        return list(anchor), [list(group) for group in groups]
    values = iter(lax.optimization_barrier((*anchor, *[x for group in groups for x in group])))
    return [next(values) for _ in anchor], [[next(values) for _ in group] for group in groups]


@jax.named_scope(names.SHARDS)
def zero_after(anchor: Sequence[jax.Array]) -> jax.Array:
    """Return an int32 zero that depends on `anchor`. XLA cannot simplify this dependence away.

    A barrier alone is not enough: XLA:CPU removes barriers, and then schedules operations without operands first.
    """
    zero, place = lax.optimization_barrier(jnp.int32(0)), first_float(anchor)
    if place is None:
        return zero
    array = anchor[place]
    some = array[(0,) * array.ndim].astype(jnp.float32)
    return lax.bitcast_convert_type(some, jnp.int32) & zero


def first_float(arrays: Sequence[jax.Array]) -> int | None:
    return next((i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating) and x.size), None)


def evaluate_after(zero: jax.Array | None, closed: Any, values: Sequence) -> list:
    """Evaluate a closed jaxpr. If `zero` is given, arrays of zeros are made from it, so XLA cannot make them before."""
    return jaxprs.evaluate(*compat.opened(closed), values, lambda eqn, values: zeros_from(zero, eqn, values))


def zeros_from(zero: jax.Array | None, eqn: Any, values: Sequence) -> list | None:
    """Make the array of zeros that `eqn` makes from `zero` instead. Return None for another equation, or no `zero`."""
    makes_zeros = eqn.primitive.name == "broadcast_in_dim" and compat.is_literal(eqn.invars[0]) and not values[0]
    if zero is None or not makes_zeros:
        return None
    out = eqn.outvars[0].aval
    return [lax.broadcast(zero.astype(out.dtype), out.shape)]
