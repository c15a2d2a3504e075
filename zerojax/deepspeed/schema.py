"""The schema of a DeepSpeed configuration: which values a key takes, and how a file is read as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MOST_LEVELS = 32
MOST_SHOWN = 200
LARGEST_INTEGER = 2**63 - 1
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Invalid(Exception):
    """A value that a rule does not take."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which values a key takes.

    Attributes:
        what: The values, in words.
        convert: Return the value in the type that is used; raise `Invalid` for any other value.
        null: Whether null means that the key is not given.
    """

    what: str
    convert: Callable[[Any], Any]
    null: bool = False

    def check(self, path: str, value: Any) -> Any:
        """Return the value in the type that is used.

        Raises:
            ValueError: If the key does not take the value, naming both.
        """
        if value is None and self.null:
            return None
        try:
            return self.convert(value)
        except Invalid:
            instead = "null, or leave the key out" if self.null else "leave the key out"
            raise ValueError(f"{path} is {shown(value)}. Give {self.what}; or {instead}.") from None


def integer(least: int, most: int = LARGEST_INTEGER, *, null: bool = False) -> Rule:
    """Take integers within bounds, also written as `5e8`."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Invalid
        if value != int(value):
            raise Invalid
        return int(value)

    bounds = f"of at least {least}" if most == LARGEST_INTEGER else f"from {least} to {most}"
    return Rule(f"an integer {bounds}", convert, null)


def number(least: float = 0.0, most: float = math.inf, *, above: bool = False, below: bool = False) -> Rule:
    """Take finite numbers within bounds; `above` and `below` leave the bounds themselves out."""

    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise Invalid
        if (above and value == least) or (below and value == most) or abs(value) > 1e308:
            raise Invalid
        return float(value)

    lower = f"greater than {least:g}" if above else f"of at least {least:g}"
    upper = "" if most == math.inf else f" and {'less than' if below else 'at most'} {most:g}"
    return Rule(f"a finite number {lower}{upper}", convert)


def pair(rule: Rule) -> Rule:
    """Take a list of two values that each follow a rule."""

    def convert(value: Any) -> tuple[Any, Any]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise Invalid
        first, second = map(rule.convert, value)
        return first, second

    return Rule(f"a list of two: each {rule.what}", convert)


def word(*known: str, null: bool = False) -> Rule:
    """Take one of some words."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise Invalid
        return value

    return Rule(f"one of {', '.join(map(json.dumps, known))}", convert, null)


def _instance(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise Invalid
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise Invalid
    return value


def _block(value: Any) -> Any:
    return value if value is False else _instance(value, Mapping)


ANY = Rule("any JSON value", lambda value: value, null=True)
TRUTH = Rule("true or false", lambda value: _instance(value, bool))
TRUTH_OR_NULL = dataclasses.replace(TRUTH, null=True)
TEXT = Rule("a string", _text, null=True)
BLOCK = Rule("an object of settings, or false", _block, null=True)


def shown(value: Any) -> str:
    """Return a value as one line of ASCII, cut where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def read_json(path: str | os.PathLike) -> Any:
    """Read a file of JSON.

    Raises:
        ValueError: If the file is no JSON, an object in it has a key twice, or a number is not finite.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {json.dumps(key)} is given twice in one object")
            found[key] = value
        return found

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is no JSON number")

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise ValueError(f"{path} has more than {MOST_LEVELS} levels of objects and lists.") from None
    except ValueError as error:  # of decoding, too
        raise ValueError(f"{path} is no DeepSpeed configuration: {error}. Give a file of JSON.") from error


def check_tree(value: Any, path: str = "", level: int = 0) -> None:
    """Check that a value consists of what JSON has: objects, lists, strings, finite numbers, truth values and null.

    Raises:
        ValueError: If it has anything else, or too many levels, with the path.
    """
    where = path or "The configuration"
    if level > MOST_LEVELS:
        raise ValueError(f"{where[:MOST_SHOWN]} has more than {MOST_LEVELS} levels of objects and lists.")
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!a}; keys of JSON are strings.")
            check_tree(one, f"{path}.{ascii(key)[1:-1]}" if path else ascii(key)[1:-1], level + 1)
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            check_tree(one, f"{where}[{i}]", level + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, which is no JSON number. Give a finite number.")
    elif value is not None and not isinstance(value, bool | int | str):
        raise ValueError(f"{where} is a {type(value).__name__}. Give a string, a number, true, false, null or a list.")


def check_key(path: str) -> None:
    """Refuse a path with anything but names of letters, digits and underscores, joined by dots.

    Raises:
        ValueError: Naming the path, escaped.
    """
    if not all(KEY.fullmatch(part) for part in path.split(".")):
        raise ValueError(f"{path!a} is no key of DeepSpeed: its keys have letters, digits and underscores alone.")
