"""What the collectives of a program move, array by array: parameters, which zerojax labels, or something else.

XLA combines collectives into one launch and joins their names, so one collective may move a parameter's gradient, a
loss and an activation. Here each array has its own operation again, as far as the joined name tells.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator

from zerojax.comm.collectives import LABEL, UPDATE
from zerojax.comm.owners import EXCHANGE
from zerojax.inspect.collectives import Collective, collectives_of, lines_of_model
from zerojax.inspect.hlo import Module
from zerojax.inspect.nearest import Nearest

# Losses, norms, weights and counts are free: arrays of at most this many elements for each operation.
FREE = 64
_NESTED = "\0"


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one operation moves in a collective, in all of its executions.

    Attributes:
        collective: The collective; it may move other pieces too.
        op_name: The JAX operation it came from, or "".
        elements: Elements of full tensors.
        bytes: The same in bytes.
        once: Elements in one execution.
        is_free: Whether it is but a few numbers.
        nearest: Finds the model's line for a collective that has none.
    """

    collective: Collective
    op_name: str
    elements: int
    bytes: int
    once: int
    is_free: bool
    nearest: Nearest

    @property
    def kind(self) -> str:
        """Return the kind of the collective."""
        return self.collective.kind

    @property
    def label(self) -> str:
        """Return what zerojax does here: `"gather"`, `"reduce_scatter"`, `"all_reduce"`, or `""`."""
        found = LABEL.search(self.op_name)
        return found[1] if found else ""

    @property
    def is_of_update(self) -> bool:
        """Return whether it belongs to the optimizer's update."""
        return UPDATE in self.op_name

    @property
    def is_exchange(self) -> bool:
        """Return whether it brings matrices to their owners, or back."""
        return EXCHANGE in self.op_name

    @property
    def cause(self) -> str:
        """Return the leaf and line that the engine noted, else `line`."""
        found = LABEL.search(self.op_name)
        return found[2].replace("\\", "") if found else self.line

    @functools.cached_property
    def line(self) -> str:
        """Return the model's line, or the nearest one, or the operation where none is known."""
        c = self.collective
        own = lines_of_model(c.frames)
        return own[0] if own else self.nearest(c.computation, c.name) or self.op_name or c.name


def pieces(module: Module, only: Iterable[Collective] | None = None) -> Iterator[Piece]:
    """Return every piece that a program moves, in its order.

    Args:
        module: The program.
        only: Some of its collectives; None: all.
    """
    nearest = Nearest(module)
    for c in collectives_of(module) if only is None else only:
        names = operations(c.op_name)
        if len(names) == len(c.arrays):
            parts = [(name, array.elements, array.bytes) for name, array in zip(names, c.arrays, strict=True)]
        else:  # flattened into one array, or one operation for several: if it has a parameter it counts as one
            name = next((name for name in names if LABEL.search(name)), names[0])
            parts = [(name, c.elements, c.bytes)]
        free, times = FREE * max(1, len(names) // len(parts)), c.times_if_once
        for name, elements, size in parts:
            yield Piece(c, name, times * elements, times * size, elements, elements <= free, nearest)


def operations(op_name: str) -> list[str]:
    """Return the operations that XLA joined into one name, `prefix/(a:b:c)`, or the name alone."""
    labels: list[str] = []

    def keep(label: re.Match) -> str:
        labels.append(label.group())
        return f"{_NESTED}{len(labels) - 1}{_NESTED}{label.group()[-1]}"

    hidden = LABEL.sub(keep, op_name)  # a label may have colons and brackets of its own
    before, inside = _joined(hidden)
    shown = lambda name: re.sub(f"{_NESTED}(\\d+){_NESTED}.", lambda at: labels[int(at[1])], name)
    return [shown(before + part) for part in inside]


def _joined(name: str) -> tuple[str, list[str]]:
    """Return what comes before the joined names, and the names."""
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
