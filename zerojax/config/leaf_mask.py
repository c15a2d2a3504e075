"""Convert a mask, which is a tree of bools, to a predicate of paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class LeafMask:
    """A mask that was given as an option of `zero_shard`, converted to a predicate.

    `known` has the paths of all leaves of the mask, and `meant` has the paths of the leaves that are True.
    """

    known: frozenset[str]
    meant: frozenset[str]
    option: str = "trainable"

    @classmethod
    def of(cls, mask: Any, option: str = "trainable") -> LeafMask:
        """Convert a tree of bools with the structure of the parameters."""
        leaves = jax.tree_util.tree_flatten_with_path(mask)[0]
        found = {path_of(path): x for path, x in leaves}
        if len(found) < len(leaves):
            raise ValueError(f"Two leaves of the mask in {option}= have one path. Rename the keys that contain '/'.")
        for path, x in found.items():
            if not isinstance(x, bool | np.bool_):
                raise TypeError(
                    f"{option}= is read as a mask, and its leaf {path!r} is {x!r}. Give a tree of bools with the "
                    f"structure of the parameters, or a function of (path, leaf)."
                )
        return cls(frozenset(found), frozenset(path for path, x in found.items() if x), option)

    def __call__(self, path: str, leaf: Any) -> bool:
        """Return whether the mask is True at `path`. Raise a ValueError if the mask has no leaf at this path."""
        if path not in self.known:
            raise ValueError(
                f"The mask in {self.option}= has no leaf {path!r}, which the parameters have. "
                f"Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."
            )
        return path in self.meant

    def check(self, paths: Iterable[str]) -> None:
        """Raise a ValueError if the mask has a leaf that the parameters do not have."""
        if surplus := sorted(self.known.difference(paths)):
            raise ValueError(
                f"The mask in {self.option}= has a leaf {surplus[0]!r}, which the parameters do not have. "
                f"Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."
            )


def path_of(keys: tuple) -> str:
    """Return the path that predicates get for a leaf, which consists of the leaf's keys, separated by "/"."""
    # Drop the last key inside of an NNX Variable, so that trees with and without Variables have equal paths.
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")
