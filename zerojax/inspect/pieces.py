"""Separate the collectives of a program into pieces: the arrays that one JAX operation moves.

XLA combines collectives into one launch, and joins the names of their operations. So one collective may move a
parameter's gradient, a loss and an activation. A piece has its own operation again, if the joined name tells which.
"""

import dataclasses
import functools
import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from zerojax.comm.collectives import LABEL, UPDATE
from zerojax.comm.owners import EXCHANGE
from zerojax.inspect.collectives import Collective, collectives_of, leaves_in, lines_of_model
from zerojax.inspect.hlo import Instruction, Module

# Losses, norms, weights and counts are free: arrays of at most this many elements per operation.
FREE = 64
_NESTED = "\0"  # marks, in a name, the place of a label
_MOST = 300  # instructions that `Nearest` visits, which bounds its work if no line is near


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a collective that one JAX operation moves.

    Attributes:
        collective: The collective. It may move other pieces, too.
        op_name: The JAX operation that the piece came from, or "".
        elements: Elements of the full tensors, in all executions.
        bytes: Bytes of the full tensors, in all executions.
        once: Elements of the full tensors, in one execution.
        is_free: Whether the piece has so few elements that it costs nothing.
        nearest: Finds the model's line for a collective that has none.
    """

    collective: Collective
    op_name: str
    elements: int
    bytes: int
    once: int
    is_free: bool
    nearest: "Nearest"

    @property
    def kind(self) -> str:
        """Return the kind of the collective."""
        return self.collective.kind

    @property
    def label(self) -> str:
        """Return the kind of zerojax's own collective: `"gather"`, `"reduce_scatter"` or `"all_reduce"`, or `""`."""
        found = LABEL.search(self.op_name)
        return found[1] if found else ""

    @property
    def is_of_update(self) -> bool:
        """Return whether the piece belongs to the optimizer's update."""
        return UPDATE in self.op_name

    @property
    def is_exchange(self) -> bool:
        """Return whether the piece takes matrices to their owners, or back."""
        return EXCHANGE in self.op_name

    @property
    def cause(self) -> str:
        """Return the leaves that the engine noted, or `line`."""
        return leaves_in(self.op_name) or self.line

    @functools.cached_property
    def line(self) -> str:
        """Return the model's line, or the nearest line of the model, or the operation."""
        c = self.collective
        own = lines_of_model(c.frames)
        return own[0] if own else self.nearest(c.computation, c.name) or self.op_name or c.name


def pieces(module: Module, only: Iterable[Collective] | None = None) -> Iterator[Piece]:
    """Return the pieces of a program's collectives, or of `only` some of them, in the program's order."""
    nearest = Nearest(module)
    for c in collectives_of(module) if only is None else only:
        names = operations(c.op_name)
        if len(names) == len(c.arrays):
            parts = [(name, array.elements, array.bytes) for name, array in zip(names, c.arrays, strict=True)]
        else:  # XLA flattened several arrays, or one operation moves several: a parameter among them decides
            name = next((name for name in names if LABEL.search(name)), names[0])
            parts = [(name, c.elements, c.bytes)]
        free, times = FREE * max(1, len(names) // len(parts)), c.times_if_once
        for name, elements, size in parts:
            yield Piece(c, name, times * elements, times * size, elements, elements <= free, nearest)


def operations(op_name: str) -> list[str]:
    """Split a name that XLA joined from several operations, `prefix/(a:b:c)`; any other name is returned alone."""
    labels: list[str] = []

    def keep(label: re.Match) -> str:
        labels.append(label.group())
        return f"{_NESTED}{len(labels) - 1}{_NESTED}{label.group()[-1]}"

    hidden = LABEL.sub(keep, op_name)  # a label may contain colons and brackets
    before, inside = _joined(hidden)
    shown = lambda name: re.sub(f"{_NESTED}(\\d+){_NESTED}.", lambda at: labels[int(at[1])], name)
    return [shown(before + part) for part in inside]


def _joined(name: str) -> tuple[str, list[str]]:
    """Return the prefix of joined names, and the names."""
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


class Nearest:
    """Find the model's line nearest to an instruction that has none, such as a barrier or a copy by the compiler."""

    def __init__(self, module: Module):
        """Prepare to search a program."""
        self.module = module
        self._callers: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for where, calls in module.calls.items():
            for call in calls:
                self._callers[call.callee].append((where, call.instruction.name))

    def __call__(self, computation: str, name: str) -> str:
        """Return the line of the nearest instruction that has one, or "".

        The operands of an instruction come before its users. The search leaves the body of a loop, or of a call,
        through the instruction that runs it.
        """
        pending, seen = deque([(computation, name)]), {(computation, name)}
        while pending and len(seen) < _MOST:
            where, name = pending.popleft()
            instruction = self.module.computations[where].by_name.get(name)
            if instruction is None:
                continue
            if found := lines_of_model(self.module.frames(instruction)):
                return found[0]
            new = [near for near in self._neighbours(where, instruction) if near not in seen]
            pending.extend(dict.fromkeys(new))
            seen.update(new)
        return ""

    def _neighbours(self, where: str, i: Instruction) -> Iterator[tuple[str, str]]:
        """Return operands and users; for a parameter or a root also the instructions that run the computation."""
        yield from ((where, name) for name in i.operands)
        yield from ((where, user.name) for user in self.module.computations[where].users.get(i.name, ()))
        if i.opcode == "parameter" or i.root:
            yield from self._callers.get(where, ())
