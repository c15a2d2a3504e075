"""A loss that several devices or microbatches call: traced once and read, for what would mean something else there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import NamedSharding

from zerojax import compat, jaxprs
from zerojax.config.data_mesh import axes_of
from zerojax.train.batch import is_untyped_key
from zerojax.train.remedies import DIVIDED_ALREADY


def checked(fn: Callable, manual: Sequence[str]) -> Callable:
    """Return a function that refuses losses whose calls would not add up to one loss.

    Args:
        fn: The loss.
        manual: Mesh axes over which its rows are divided already.

    Raises:
        ValueError: When the result is called, if it closes over a PRNG key or makes one of a
            constant, or if it constrains an array to `manual` axes.
    """

    def call(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, consts = compat.opened(closed)
        check(jaxpr, frozenset(manual))
        results = jax.core.eval_jaxpr(jaxpr, jaxprs.as_jax_values(consts), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


def check(jaxpr: Any, manual: frozenset[str]) -> None:
    """Apply the check of `checked` to a traced loss."""
    for inner in nested(jaxpr):
        check_keys(inner)
        for eqn in inner.eqns:
            sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
            if isinstance(sharding, NamedSharding) and manual.intersection(axes_of(sharding.spec)):
                raise ValueError(f"{DIVIDED_ALREADY} It is at {compat.line_of(eqn)}.")


def check_keys(jaxpr: Any) -> None:
    """Refuse keys that every call would draw the same numbers with: those that are no argument."""
    same = "a PRNG key: every device (in device view) and every microbatch would draw the same numbers. "
    for var in compat.constvars_of(jaxpr):
        if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key) or is_untyped_key(var.aval):
            raise ValueError(
                f"The loss function closes over {var.aval.str_short()}, {same}"
                "Pass the key as a further argument of the loss."
            )
    of_arguments = jaxprs.dependent_on(jaxpr.invars, jaxpr.eqns, lambda eqn, reads: eqn.outvars if reads else ())
    for eqn in jaxprs.alive(jaxpr):
        if eqn.primitive.name == "random_seed" and not of_arguments.intersection(jaxprs.variables_in(eqn.invars)):
            raise ValueError(
                f"The loss function makes a key of a constant at {compat.line_of(eqn)}, {same}"
                "Pass the key as a further argument of the loss; numbers that are to be the same, draw outside of it."
            )


def nested(jaxpr: Any) -> Iterator[Any]:
    """Return a jaxpr, and the jaxprs within its equations."""
    yield jaxpr
    for eqn in jaxprs.alive(jaxpr):
        for inner in compat.inner_jaxprs(eqn):
            yield from nested(inner)
