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


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def byte_count(name: str, value: int | str) -> int:
    """Return a number of bytes that is given as an integer, or as text such as `"8 GB"`.

    Raises:
        TypeError: If it is neither.
        ValueError: If the text has another form, or there is less than one byte.
    """
    if not isinstance(value, str):
        check_count(name, value, "bytes", least=1)
        return value
    number, _, unit = value.strip().partition(" ")
    if unit not in _UNITS or not number.replace(".", "", 1).isdecimal() or float(number) * _UNITS[unit] < 1:
        raise ValueError(f'{name} is a number of bytes or text such as "8 GB" (of {", ".join(_UNITS)}), not {value!r}.')
    return int(float(number) * _UNITS[unit])
