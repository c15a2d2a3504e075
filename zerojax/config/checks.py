"""The checks that options share."""

from typing import Any

import jax


def check_count(name: str, value: Any, unit: str, *, least: int) -> None:
    """Raise a TypeError if `value` is not an int, and a ValueError if it is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} counts {unit} and must be an int, not {value!r}.")
    if value < least:
        raise ValueError(f"{name} counts {unit} and must be at least {least}, but is {value}.")


def check_flag(name: str, value: Any) -> None:
    """Raise a TypeError if `value` is not a bool. Text such as "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}.")


def check_word(name: str, value: Any, known: tuple) -> None:
    """Raise a ValueError if `value` is not one of the `known` words."""
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}.")


def path_of(keys: tuple) -> str:
    """Return the path of a leaf as predicates get it: the leaf's keys, separated by "/"."""
    # Drop the last key inside of an NNX Variable, so that trees with and without Variables have equal paths.
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")
