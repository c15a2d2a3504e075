"""Checks that several options share, and the functions and shell patterns by which options choose parameters."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any


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


def checked_where(name: str, where: Any) -> Callable | tuple[str, ...] | None:
    """Check an option that chooses parameters. Return it as a function, a tuple of shell patterns, or None."""
    if where is None or callable(where):
        return where
    patterns = (where,) if isinstance(where, str) else tuple(where)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{name} is a function of (path, leaf) or shell patterns, not {where!r}.")
    return patterns


def chooses(where: Callable[[str, Any], bool] | Sequence[str], path: str, leaf: Any) -> bool:
    """Return whether the function `where`, or one of the patterns in `where`, matches the "/"-separated `path`."""
    if callable(where):
        return bool(where(path, leaf))
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in where)


def check_chosen(option: str, where: Any, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise a ValueError if an option that chooses parameters chooses none of them, as with a misspelled name."""
    if where is None or not paths or any(chooses(where, *pair) for pair in zip(paths, leaves, strict=True)):
        return
    strings = getattr(getattr(where, "__code__", None), "co_consts", ()) if callable(where) else where
    words = [word for one in strings if isinstance(one, str) for word in one.split("/") if word.strip("*")]
    parts = {part.lower(): path for path in reversed(paths) for part in path.split("/")}
    near = {parts[found]: None for word in words for found in difflib.get_close_matches(word.lower(), parts)}
    some = list(near or dict.fromkeys(paths))[:5]
    raise ValueError(
        f"{option} chooses none of the {len(paths)} parameters. {'Paths that come close' if near else 'Their paths'}: "
        f"{', '.join(map(repr, some))}{'' if near or len(paths) <= 5 else ', ...'}. Correct the name, or leave "
        f"{option} out."
    )
