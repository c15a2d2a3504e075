"""Apply `zerojax.remat` to Linen modules, whose variables become arguments and results of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from flax.core import lift

from zerojax.budget import remat as plain


def remat(target: Any, *, static_argnums: int | tuple[int, ...] = (), methods: Any = None, **options: Any) -> Any:
    """Rematerialise a Linen module within a budget of memory, as `zerojax.remat` does for a function.

    Use it like `flax.linen.remat`: for a module class or a method, and also inside `nn.scan`. The module's parameters,
    other variables and PRNG keys count as arguments, so they do not count towards the budget.

    Args:
        target: A module class, or a method in the definition of a module class.
        static_argnums: Positional arguments that are no arrays; `self` is number 0, as for `flax.linen.remat`.
        methods: Names of the methods to transform. Default: `__call__`.
        **options: Options of `zerojax.remat`, such as `budget="1 GiB"`.

    Returns:
        A module class or method that is used like `target`.

    Raises:
        TypeError: If `budget` is not a size.
        ValueError: As for `zerojax.remat`.

    Examples:
        >>> block = zerojax.flax.remat(Block, budget="256 MiB", prevent_cse=False)
        >>> layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=24)
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    # Add 1, because Flax passes `self` separately, and `_lifted` inserts the variables and PRNG keys in front.
    rematerialised = functools.partial(plain.remat, static_argnums=tuple(i + 1 for i in numbers), **options)
    rematerialised(lambda: ())  # checks the options in the user's call of `remat`

    def rematerialise_call(fn: Callable) -> Callable:
        return _lifted(rematerialised, fn)

    return nn.transforms.lift_transform(rematerialise_call, target, methods=methods)


def _lifted(rematerialised: Callable, fn: Callable) -> Callable:
    """Return a lifted `fn` that passes a Flax scope's variables and PRNG keys as arguments to a pure function."""

    def inner(scope_of, repack, variables, rngs, *args, **kwargs):
        def pure(variables, rngs, *args, **kwargs):
            scope = scope_of(variables, rngs)
            return fn(scope, *args, **kwargs), repack(scope)

        return rematerialised(pure)(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)
