"""Choosing leaves by path: a mask given as a tree, as a predicate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class LeafMask:
    """A mask as a predicate: which of the leaves whose paths are known are meant.

    Attributes:
        known: Paths of all leaves of the mask.
        meant: Those whose value is true.
        option: The option of `zero_shard` that the mask was given as.
    """

    known: frozenset[str]
    meant: frozenset[str]
    option: str = "trainable"

    @classmethod
    def of(cls, mask: Any, option: str = "trainable") -> LeafMask:
        """Return the predicate of a tree of bools with the structure of the parameters.

        Raises:
            TypeError: If a leaf is no bool.
            ValueError: If two leaves have one path.
        """
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
        """Return whether the mask includes the leaf at `path`.

        Raises:
            ValueError: If the mask has no such leaf.
        """
        if path not in self.known:
            raise ValueError(
                f"The mask in {self.option}= has no leaf {path!r}, which the parameters have. "
                f"Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."
            )
        return path in self.meant

    def check(self, paths: Iterable[str]) -> None:
        """Refuse a mask that has more leaves than the parameters.

        Raises:
            ValueError: Naming the first such leaf.
        """
        if surplus := sorted(self.known.difference(paths)):
            raise ValueError(
                f"The mask in {self.option}= has a leaf {surplus[0]!r}, which the parameters have not. "
                f"Give a tree of bools with the structure of the parameters, or a function of (path, leaf)."
            )


def path_of(keys: tuple) -> str:
    """Return a leaf's path as predicates get it: its keys, "/"-separated."""
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey(
        "value"
    ):  # inside an nnx Variable, which may be a leaf too
        keys = keys[:-1]
    return jax.tree_util.keystr(keys, simple=True, separator="/")
