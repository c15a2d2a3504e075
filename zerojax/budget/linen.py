"""`zerojax.remat` for Linen modules, whose variables Flax must hand in and out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core import lift

from zerojax.budget import remat as plain


def remat(target: Any, *, static_argnums: int | tuple[int, ...] = (), methods: Any = None, **options: Any) -> Any:
    """Rematerialise a Linen module within a budget of memory, as `zerojax.remat` does a function.

    Use it where `flax.linen.remat` goes, for a module class or a method, inside `nn.scan` too. Parameters, other
    variables and PRNG keys of the module count as arguments: they are no part of the budget.

    Args:
        target: A module class, or a method in the definition of one.
        static_argnums: Positional arguments that are no arrays; `self` is number 0, as for `flax.linen.remat`.
        methods: Names of the methods to transform; by default `__call__`.
        **options: Options of `zerojax.remat`, such as `budget="1 GiB"`.

    Returns:
        A module class or method that is used like `target`.

    Raises:
        TypeError: If `budget` is no size.
        ValueError: As for `zerojax.remat`.

    Examples:
        >>> block = zerojax.flax.remat(Block, budget="256 MiB", prevent_cse=False)
        >>> layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=24)
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    # Flax passes `self` apart, and the variables and PRNG keys come first.
    rematerialised = functools.partial(plain.remat, static_argnums=tuple(i + 1 for i in numbers), **options)
    rematerialised(lambda: ())  # checks the options where they are given

    def rematerialise_call(fn: Callable) -> Callable:
        return _lifted(rematerialised, fn)

    return nn.transforms.lift_transform(rematerialise_call, target, methods=methods)


def _lifted(rematerialised: Callable, fn: Callable) -> Callable:
    """Lift a function of a Flax scope: its variables and PRNG keys become arguments, changed variables results."""

    def inner(scope_of, repack, variables, rngs, *args, **kwargs):
        def pure(variables, rngs, *args, **kwargs):
            scope = scope_of(variables, rngs)
            return fn(scope, *args, **kwargs), repack(scope)

        return rematerialised(pure)(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)
