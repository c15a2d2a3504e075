"""Keep master weights, which are wide copies of narrow parameters, in the optimizer's state, and update them.

A transformation around the user's transformation does this. So master weights are ordinary state. The rules for state
match them to parameters and shard them.

As in plain optax, an update starts from the parameters. A master weight only adds the bits that its narrow parameter
cannot hold. Where a program changed the parameter since the last update, the update starts from the parameter.

References:
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from zerojax.layout.tree import Layout

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, PyTree


TWICE_COMPUTED = 16  # two computations of one update may differ by this many roundings, because terms may cancel


class MasterState(NamedTuple):
    """The state of an optimizer that keeps master weights."""

    inner: PyTree  # the state of the wrapped transformation
    master: PyTree  # the master weights; `optax.MaskedNode()` for a parameter that is itself stored in the wide type


def with_master_weights(
    inner: optax.GradientTransformationExtraArgs, trained: Layout
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that it updates master weights. Its `update` returns new parameters, not increments."""
    narrow = zip(trained.params, narrow_leaves(trained), strict=True)
    stored = [leaf.dtype if on else None for leaf, on in narrow]  # None: a parameter without a master weight

    def kept(params):
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten([optax.MaskedNode() if of is None else x for x, of in zip(leaves, stored, strict=True)])

    def init(params):
        return MasterState(inner.init(params), kept(params))

    def update(updates, state, params=None, **extra):
        leaves, tree = jax.tree.flatten(params)
        masters = iter(jax.tree.leaves(state.master))
        pairs = zip(leaves, stored, strict=True)
        wide = tree.unflatten([x if of is None else current_weight(next(masters), x, of) for x, of in pairs])
        updates, inner_state = inner.update(updates, state.inner, wide, **extra)
        moved = optax.apply_updates(wide, updates)
        return moved, MasterState(inner_state, kept(moved))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def current_weight(master: Array, param: Array, stored: Any) -> Array:
    """Return, for each element, the master weight if the parameter is a copy of it, and otherwise the parameter.

    `param` has the type of `master`. In a training step, its values are exact in the type `stored`. In a hand-written
    loop, they need not be rounded to this type.
    """
    return jnp.where(is_copy(master, param, stored), master, param)


def is_copy(master: Array, param: Array, stored: Any) -> Bool[Array, "*shape"]:
    """Return, for each element, whether `param` is the master weight itself, or the master weight cast to `stored`.

    Bits are compared, because XLA removes a cast to a narrower type and back unless the program reads the bits of the
    result. Without the cast, each parameter would be compared with the uncast master weight, and look changed. NaN
    counts as changed.

    XLA may compute an update twice, once for the master weight and once for the parameter, and round a product in only
    one of the two. If the master weight is nearly halfway between two numbers of type `stored`, both are accepted.
    """
    bits = lambda x: lax.bitcast_convert_type(x.astype(stored), jnp.dtype(f"uint{jnp.finfo(stored).bits}"))
    # Only the mantissa is rounded here. `reduce_precision` flushes the subnormal numbers of a smaller exponent to zero.
    rounded = lax.reduce_precision(param, jnp.finfo(param.dtype).nexp, jnp.finfo(stored).nmant)
    margin = TWICE_COMPUTED * jnp.finfo(param.dtype).eps
    near = [master, master * (1 - margin), master * (1 + margin)]  # the products flush subnormal numbers to zero
    is_cast = functools.reduce(operator.or_, [bits(param) == bits(x) for x in near])
    return is_cast & ((param == rounded) | (param == master))


def narrow_leaves(trained: Layout) -> list[bool]:
    """Return, for each trained parameter, whether its stored type is narrower than the type of its update."""
    return [leaf.dtype != part.dtype for leaf, part in zip(trained.params, trained.grads, strict=True)]
