"""Check the values of keys in a DeepSpeed configuration, and read its file as JSON."""

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


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that a key takes, and their conversion."""

    what: str  # a description of the values
    takes: Callable[[Any], bool]  # returns whether the key takes a value
    convert: Callable[[Any], Any] = lambda value: value  # converts a value to the type that is used
    null: bool = False  # whether null means that the key is not given

    def check(self, path: str, value: Any) -> Any:
        """Return the converted value. Raise a `ValueError` if the key does not take the value."""
        if value is None and self.null:
            return None
        if not self.takes(value):
            instead = "null, or leave the key out" if self.null else "leave the key out"
            raise ValueError(f"{path} is {shown(value)}. Give {self.what}; or {instead}.")
        return self.convert(value)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite JSON number. Booleans do not count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e308


def integer(least: int, most: int = LARGEST_INTEGER, *, null: bool = False) -> Rule:
    """Make a rule that takes integers within bounds. An integer may be written like `5e8`."""
    takes = lambda value: is_number(value) and least <= value <= most and value == int(value)
    bounds = f"of at least {least}" if most == LARGEST_INTEGER else f"from {least} to {most}"
    return Rule(f"an integer {bounds}", takes, int, null)


def number(least: float = 0.0, most: float = math.inf, *, above: bool = False, below: bool = False) -> Rule:
    """Make a rule that takes finite numbers within bounds. `above` excludes `least`, and `below` excludes `most`."""

    def takes(value: Any) -> bool:
        within = is_number(value) and least <= value <= most
        return within and not (above and value == least) and not (below and value == most)

    lower = f"greater than {least:g}" if above else f"of at least {least:g}"
    upper = "" if most == math.inf else f" and {'less than' if below else 'at most'} {most:g}"
    return Rule(f"a finite number {lower}{upper}", takes, float)


def pair(rule: Rule) -> Rule:
    """Make a rule that takes a list of two values, each of which follows `rule`."""
    takes = lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(rule.takes, value))
    return Rule(f"a list of two: each {rule.what}", takes, lambda value: tuple(map(rule.convert, value)))


def word(*known: str, null: bool = False) -> Rule:
    """Make a rule that takes one of the known words."""
    takes = lambda value: isinstance(value, str) and value in known
    return Rule(f"one of {', '.join(map(json.dumps, known))}", takes, null=null)


def only(allowed: Any, why: str) -> Rule:
    """Make a rule that takes only one value. `why` is the reason that its error gives."""
    takes = lambda value: value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
    return Rule(f"{json.dumps(allowed)}, because {why}", takes)


ANY = Rule("any JSON value", lambda value: True, null=True)
TRUTH = Rule("true or false", lambda value: isinstance(value, bool))
TRUTH_OR_NULL = dataclasses.replace(TRUTH, null=True)
TEXT = Rule("a string", lambda value: isinstance(value, str) and bool(value) and "\0" not in value, null=True)
BLOCK = Rule("an object of settings, or false", lambda value: value is False or isinstance(value, Mapping), null=True)


def shown(value: Any) -> str:
    """Return a value as one line of ASCII. A long line is cut."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = ascii(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file. Raise an error for an object that has a key twice, and for numbers that are not finite."""

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
    except ValueError as error:  # also a UnicodeDecodeError
        raise ValueError(f"{path} is no DeepSpeed configuration: {error}. Give a file of JSON.") from error


def check_tree(value: Any, path: str = "", level: int = 0) -> None:
    """Raise an error unless a value consists of the types of JSON, with at most `MOST_LEVELS` levels."""
    where = path or "The configuration"
    if level > MOST_LEVELS:
        raise ValueError(f"{where[:MOST_SHOWN]} has more than {MOST_LEVELS} levels of objects and lists.")
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!a}; keys of JSON are strings.")
            check_tree(entry, f"{path}.{ascii(key)[1:-1]}" if path else ascii(key)[1:-1], level + 1)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            check_tree(entry, f"{where}[{i}]", level + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, which is no JSON number. Give a finite number.")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise ValueError(f"{where} is a {type(value).__name__}. Give a string, a number, true, false, null or a list.")


def check_key(path: str) -> None:
    """Raise an error unless a path consists of names of letters, digits and underscores, joined by dots."""
    if not all(KEY.fullmatch(part) for part in path.split(".")):
        raise ValueError(f"{path!a} is no key of DeepSpeed: its keys have letters, digits and underscores alone.")
