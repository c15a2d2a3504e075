"""Which gathered parameters a program holds at the same time, by its schedule."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from zerojax.inspect.hlo import Computation, Module
from zerojax.inspect.pieces import Piece

# What gives the same array another name: it is held as long as these are read.
_ALIASES = frozenset(
    {"all-gather-done", "bitcast", "get-tuple-element", "opt-barrier", "reshape", "transpose", "tuple"}
)


def held_at_once(module: Module, gathers: Iterable[Piece]) -> list[Piece]:
    """Return the gathered parameters that are held at the moment when most of their bytes are.

    Args:
        module: The program, scheduled.
        gathers: What it gathers.
    """
    inside: dict[str, list[Piece]] = defaultdict(list)
    for piece in gathers:
        inside[piece.collective.computation].append(piece)
    moments = (_most(module.computations[name], found) for name, found in inside.items())
    return max(moments, key=_bytes, default=[])


def _most(c: Computation, gathers: Sequence[Piece]) -> list[Piece]:
    """Return the same for one computation."""
    order = {i.name: at for at, i in enumerate(c.instructions)}
    last = dict(order)  # where each result is read last
    for i in reversed(c.instructions):
        for name in i.operands if i.opcode not in ("parameter", "constant") else ():
            if name in last:
                last[name] = max(last[name], last[i.name] if i.opcode in _ALIASES else order[i.name])
    spans = [(order[p.collective.name], last[p.collective.name], p) for p in gathers if p.collective.name in order]
    held = ([p for begin, end, p in spans if begin <= at <= end] for at, _, _ in spans)
    return max(held, key=_bytes, default=[])


def _bytes(which: Sequence[Piece]) -> int:
    return sum(piece.bytes // max(piece.collective.times_if_once, 1) for piece in which)
