"""Separate the collectives of a program into pieces. A piece has the arrays that one JAX operation moves.

XLA combines several collectives into one, and joins the names of their operations. So one collective may move a
parameter's gradient, a loss and an activation. The joined name usually tells which operation moves which array.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator

from zerojax.comm.collectives import LABEL, UPDATE
from zerojax.inspect.compiled_collectives import Collective, collectives_of, leaves_in, lines_of_model
from zerojax.inspect.hlo import Module

# A piece of at most this many elements per operation counts as free. Losses, norms and counts are below this size.
FREE = 64
_NESTED = "\0"  # marks the place of a label in a name


@dataclasses.dataclass(frozen=True)
class CollectivePiece:
    """The part of a collective that one JAX operation moves."""

    collective: Collective  # the collective, which may move other pieces, too
    op_name: str  # the JAX operation that the piece came from, or ""
    elements: int  # the number of elements of the full tensors, in all executions
    bytes: int  # the number of bytes of the full tensors, in all executions
    once: int  # the number of elements of the full tensors, in one execution
    is_free: bool  # whether the piece has so few elements that its cost does not count

    @property
    def kind(self) -> str:
        return self.collective.kind

    @property
    def label(self) -> str:
        """Return `"gather"`, `"reduce_scatter"` or `"all_reduce"` for a collective of zerojax, otherwise `""`."""
        found = LABEL.search(self.op_name)
        return found[1] if found else ""

    @property
    def is_of_update(self) -> bool:
        return UPDATE in self.op_name

    @property
    def cause(self) -> str:
        return leaves_in(self.op_name) or self.line

    @functools.cached_property
    def line(self) -> str:
        """Return the line of the model that caused the collective, or else the operation."""
        return next(iter(lines_of_model(self.collective.frames)), self.op_name or self.collective.name)


def pieces(module: Module, only: Iterable[Collective] | None = None) -> Iterator[CollectivePiece]:
    for c in collectives_of(module) if only is None else only:
        names = operations(c.op_name)
        if len(names) == len(c.arrays):
            parts = [(name, array.elements, array.bytes) for name, array in zip(names, c.arrays, strict=True)]
        else:  # if names and arrays do not match, keep one piece, and prefer a name with a label
            name = next((name for name in names if LABEL.search(name)), names[0])
            parts = [(name, c.elements, c.bytes)]
        free, times = FREE * max(1, len(names) // len(parts)), c.times_if_once
        for name, elements, size in parts:
            yield CollectivePiece(c, name, times * elements, times * size, elements, elements <= free)


def operations(op_name: str) -> list[str]:
    """Return the names of operations that XLA joined into `prefix/(a:b:c)`. Return any other name as the only item."""
    labels: list[str] = []

    def keep(label: re.Match) -> str:
        labels.append(label.group())
        return f"{_NESTED}{len(labels) - 1}{_NESTED}{label.group()[-1]}"

    hidden = LABEL.sub(keep, op_name)  # a label may contain colons and brackets
    before, inside = _split_names(hidden)
    shown = lambda name: re.sub(f"{_NESTED}(\\d+){_NESTED}.", lambda at: labels[int(at[1])], name)
    return [shown(before + part) for part in inside]


def _split_names(name: str) -> tuple[str, list[str]]:
    """Split `prefix/(a:b:c)` into the prefix and the names. Any other name has an empty prefix."""
    depth, start, ends = 0, None, []
    for at, char in enumerate(name):
        if char == "(":
            depth += 1
            if depth == 1 and name[at - 1 : at] in ("/", ""):
                start = at
        elif char == ")":
            depth -= 1
        elif char == ":" and depth == 1 and start is not None:
            ends.append(at)
    if start is None or not ends:
        return "", [name]
    bounds = [start, *ends, len(name) - 1 if name.endswith(")") else len(name)]
    return name[:start], [name[a + 1 : b] for a, b in itertools.pairwise(bounds)]
