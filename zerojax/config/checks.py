"""Shared checks of the arguments a caller gives."""

from __future__ import annotations

from typing import Any


def check_count(name: str, value: Any, unit: str, *, least: int) -> None:
    """Refuse what is no count.

    Raises:
        TypeError: If it is no int.
        ValueError: If it is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} counts {unit} and must be an int, not {value!r}.")
    if value < least:
        raise ValueError(f"{name} counts {unit} and must be at least {least}, but is {value}.")


def check_word(name: str, value: Any, known: tuple) -> None:
    """Refuse a word that is none of those known.

    Raises:
        ValueError: Naming those known.
    """
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}.")
