"""The functions, shell patterns and masks by which options choose parameters."""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from zerojax.config.checks import path_of

REMEDY = "Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."


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


@dataclasses.dataclass(frozen=True)
class LeafMask:
    """A mask that was given as an option of `zero_shard`, converted to a predicate.

    `known` has the paths of all leaves of the mask, and `meant` has the paths of the leaves that are True.
    """

    known: frozenset[str]
    meant: frozenset[str]
    option: str = "trainable"

    @classmethod
    def of(cls, mask: Any, option: str = "trainable") -> "LeafMask":
        """Convert a tree of bools with the structure of the parameters."""
        leaves = jax.tree_util.tree_flatten_with_path(mask)[0]
        found = {path_of(path): x for path, x in leaves}
        if len(found) < len(leaves):
            raise ValueError(f"Two leaves of the mask in {option}= have one path. Rename the keys that contain '/'.")
        for path, x in found.items():
            if not isinstance(x, bool | np.bool_):
                raise TypeError(f"{option}= is read as a mask, and its leaf {path!r} is {x!r}. {REMEDY}")
        return cls(frozenset(found), frozenset(path for path, x in found.items() if x), option)

    def __call__(self, path: str, leaf: Any) -> bool:
        """Return whether the mask is True at `path`. Raise a ValueError if the mask has no leaf at this path."""
        if path not in self.known:
            raise ValueError(f"The mask in {self.option}= has no leaf {path!r}, which the parameters have. {REMEDY}")
        return path in self.meant

    def check(self, paths: Iterable[str]) -> None:
        """Raise a ValueError if the mask has a leaf that the parameters do not have."""
        if surplus := sorted(self.known.difference(paths)):
            leaf = f"a leaf {surplus[0]!r}, which the parameters do not have"
            raise ValueError(f"The mask in {self.option}= has {leaf}. {REMEDY}")
