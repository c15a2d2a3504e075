"""Keep master weights, which are wide copies of narrow parameters, in the optimizer's state, and update them.

A transformation wraps the user's transformation to do this. So master weights are ordinary state, and the rules for
state match them to parameters and shard them.

As in plain optax, an update starts from the parameters. A master weight only adds the bits that its narrow parameter
cannot hold. Where a program changed the parameter since the last update, the update starts from the parameter.

References:
    Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, PyTree

from zerojax.config import Config
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout

WITHOUT = optax.MaskedNode()  # stands for a parameter without a master weight, in the tree of master weights
TWICE_COMPUTED = 16  # two computations of one update may differ by this many roundings, because terms may cancel


class MasterState(NamedTuple):
    """The state of an optimizer that keeps master weights."""

    inner: PyTree  # the state of the wrapped transformation
    master: PyTree  # what `WideMaster` or another form keeps; `optax.MaskedNode()` for a parameter stored wide


@dataclasses.dataclass(frozen=True)
class WideMaster:
    """Keep a master weight as a copy in the type of the update. `stored` is the parameter's type.

    `Narrow(masters=)` has other forms, which keep other arrays. `leaf` converts the layout of a wide weight to that of
    the kept array. `first` makes the first kept array. `current` returns the weight from which the next update starts.
    `kept` returns the new parameter, not yet cast, and the new kept array. Parameters have the type of the update.
    """

    stored: Any
    is_weight = True  # whether the kept array is the weight itself

    def leaf(self, leaf: Leaf) -> Leaf:
        return leaf

    def first(self, weight: Array, number: int) -> Array:
        return weight

    def current(self, master: Array, param: Array) -> Array:
        return current_weight(master, param, self.stored)

    def kept(self, moved: Array, master: Array) -> tuple[Array, Array]:
        return moved, moved


def master_forms(config: Config, trained: Layout, *, encodes: bool = True) -> list[Any]:
    """Return the form of each trained parameter's master weight, or None if it has no master weight.

    If `encodes` is false, every form is a `WideMaster`.
    """
    pairs = zip(trained.params, narrow_leaves(trained), strict=True)
    forms: list[Any] = [WideMaster(leaf.dtype) if on else None for leaf, on in pairs]
    if not encodes or config.state is None or config.state.masters == "float32":
        return forms
    from zerojax.narrow_state.masters import narrow_forms

    return narrow_forms(config, trained, forms)


def form_of(master: Leaf, param: Leaf) -> Any:
    """Return the form of a master weight, given the layouts of the kept array and of the parameter."""
    if master.encoding is None and master.dtype != param.dtype:
        return WideMaster(param.dtype)
    from zerojax.narrow_state.masters import Compensated, Rounded

    return Compensated() if master.encoding is None else Rounded(master.encoding)


def with_master_weights(
    inner: optax.GradientTransformationExtraArgs, forms: Sequence[Any]
) -> optax.GradientTransformationExtraArgs:
    """Wrap a transformation so that it updates master weights. Its `update` returns new parameters, not increments.

    `forms` is the result of `master_forms`.
    """

    def init(params):
        leaves, tree = jax.tree.flatten(params)
        pairs = enumerate(zip(leaves, forms, strict=True))
        return MasterState(
            inner.init(params), tree.unflatten([WITHOUT if f is None else f.first(x, i) for i, (x, f) in pairs])
        )

    def update(updates, state, params=None, **extra):
        leaves, tree = jax.tree.flatten(params)
        stored = iter(jax.tree.leaves(state.master))
        masters = [None if form is None else next(stored) for form in forms]
        trios = list(zip(leaves, forms, masters, strict=True))
        wide = tree.unflatten([x if form is None else form.current(master, x) for x, form, master in trios])
        updates, inner_state = inner.update(updates, state.inner, wide, **extra)
        new = jax.tree.leaves(optax.apply_updates(wide, updates))
        trios = zip(new, forms, masters, strict=True)
        pairs = [(x, WITHOUT) if form is None else form.kept(x, master) for x, form, master in trios]
        moved, kept = (tree.unflatten(leaves) for leaves in zip(*pairs, strict=True)) if pairs else (wide, wide)
        return moved, MasterState(inner_state, kept)

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
