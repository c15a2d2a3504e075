"""Refuse code in a loss that gives wrong results if the loss is called once per device or microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from zerojax import compat, jaxprs
from zerojax.config.data_mesh import axes_of
from zerojax.train.arguments import is_untyped_key


def checked(fn: Callable, manual: Sequence[str]) -> Callable:
    """Return a function that traces the loss `fn`, checks its jaxpr, and evaluates the jaxpr.

    The losses of the parts of a batch must combine to the loss of the whole batch. So a loss must not close over a PRNG
    key, create a key from a constant, or constrain an array over the `manual` mesh axes, which already divide its rows.
    """

    def call(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        jaxpr, consts = compat.opened(closed)
        check(jaxpr, frozenset(manual))
        results = jaxprs.run(jaxpr, jaxprs.as_jax_values(consts), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


def check(jaxpr: Any, manual: frozenset[str]) -> None:
    """Raise a ValueError if the jaxpr of a loss contains code that `checked` does not allow."""
    for inner in nested(jaxpr):
        check_keys(inner)
        for eqn in inner.eqns:
            sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
            if isinstance(sharding, NamedSharding) and manual.intersection(axes_of(sharding.spec)):
                raise ValueError(
                    f"The loss function divides rows over a mesh axis at {compat.line_of(eqn)}. In device view, each "
                    f'device already has only its own rows. Pass view="global" to zero_shard: then the loss sees all '
                    f"rows."
                )


def check_keys(jaxpr: Any) -> None:
    """Raise a ValueError for a PRNG key that is not from an argument, because all calls would draw equal numbers."""
    same = "a PRNG key: every device (in device view) and every microbatch would draw the same numbers. "
    for var in compat.constvars_of(jaxpr):
        if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.prng_key) or is_untyped_key(var.aval):
            raise ValueError(
                f"The loss function closes over {var.aval.str_short()}, {same}"
                "Pass the key as a further argument of the loss."
            )
    of_arguments = jaxprs.dependent_on(jaxpr.invars, jaxpr.eqns)
    for eqn in jaxprs.alive(jaxpr):
        if eqn.primitive.name == "random_seed" and not of_arguments.intersection(jaxprs.variables_in(eqn.invars)):
            raise ValueError(
                f"The loss function makes a key of a constant at {compat.line_of(eqn)}, {same}"
                "Pass the key as a further argument of the loss. Draw equal numbers outside of the loss."
            )


def nested(jaxpr: Any) -> Iterator[Any]:
    """Yield a jaxpr, and all jaxprs inside of its equations."""
    yield jaxpr
    for eqn in jaxprs.alive(jaxpr):
        for inner in compat.inner_jaxprs(eqn):
            yield from nested(inner)
