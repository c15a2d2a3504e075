"""A loss that several devices or microbatches call: traced once and read, for what would mean something else there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zerojax import compat, jaxprs
from zerojax.gather.engine import split_arrays
from zerojax.train.remedies import DIVIDED_ALREADY


def checked(fn: Callable, manual: Sequence[str]) -> Callable:
    """The same function, called once, that is refused where its calls would not add up to one loss.

    Args:
        fn: The loss.
        manual: Mesh axes over which its rows are divided already.

    Raises:
        ValueError: When the result is called, if it closes over a PRNG key or constrains an
            array to `manual` axes.
    """

    def call(*args):
        arrays, put_back = split_arrays(args)
        closed, shape = jax.make_jaxpr(lambda arrays: fn(*put_back(arrays)), return_shape=True)(arrays)
        jaxpr, consts = compat.opened(closed)
        check(jaxpr, frozenset(manual))
        results = jax.core.eval_jaxpr(jaxpr, jaxprs.as_jax_values(consts), *arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


def check(jaxpr: Any, manual: frozenset[str]) -> None:
    """`checked` for a traced loss."""
    for inner in nested(jaxpr):
        for var in compat.constvars_of(inner):
            if is_key(var.aval):
                raise ValueError(
                    f"The loss function closes over {var.aval.str_short()}, a PRNG key: every device (in device view) "
                    "and every microbatch would draw the same numbers. Pass the key as a further argument of the loss."
                )
        for eqn in inner.eqns:
            sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
            if isinstance(sharding, NamedSharding) and manual & named_axes(sharding):
                raise ValueError(f"{DIVIDED_ALREADY} It is at {compat.line_of(eqn)}.")


def nested(jaxpr: Any) -> Iterator[Any]:
    """A jaxpr, and those within it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in compat.inner_jaxprs(eqn):
            yield from nested(inner)


def named_axes(sharding: NamedSharding) -> set[str]:
    """The mesh axes that a sharding divides an array over."""
    named = [entry for entry in sharding.spec if isinstance(entry, str | tuple)]
    return {axis for entry in named for axis in ([entry] if isinstance(entry, str) else entry)}


def is_key(x: Any) -> bool:
    """Whether an array is a PRNG key, or looks like an untyped one."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or (x.shape == (2,) and x.dtype == jnp.uint32)
