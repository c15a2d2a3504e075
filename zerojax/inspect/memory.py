"""Compute the memory that a compiled program takes on one device, and list the gathered parameters that it holds."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from zerojax.inspect.hlo import Computation, Module
from zerojax.inspect.pieces import Piece

# Operations whose result is the same array as an operand. The array is held as long as the result is read.
_ALIASES = frozenset(
    {"all-gather-done", "bitcast", "get-tuple-element", "opt-barrier", "reshape", "transpose", "tuple"}
)


def memory_analysis(compiled: Any) -> Any:
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory


def peak_bytes(compiled: Any) -> int:
    """Return the bytes per device of arguments, results that do not alias donated arguments, and temporary memory."""
    memory = memory_analysis(compiled)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def held_at_once(module: Module, gathers: Iterable[Piece]) -> list[Piece]:
    """Return the gathered parameters that a scheduled program holds when their total bytes are at a maximum."""
    inside: dict[str, list[Piece]] = defaultdict(list)
    for piece in gathers:
        inside[piece.collective.computation].append(piece)
    moments = (_held_in(module.computations[name], found) for name, found in inside.items())
    return max(moments, key=_bytes, default=[])


def _held_in(c: Computation, gathers: Sequence[Piece]) -> list[Piece]:
    order = {i.name: at for at, i in enumerate(c.instructions)}
    last = dict(order)  # the position where each result is read last
    for i in reversed(c.instructions):
        for name in i.operands:
            if name in last:
                last[name] = max(last[name], last[i.name] if i.opcode in _ALIASES else order[i.name])
    spans = [(order[p.collective.name], last[p.collective.name], p) for p in gathers if p.collective.name in order]
    held = ([p for begin, end, p in spans if begin <= at <= end] for at, _, _ in spans)
    return max(held, key=_bytes, default=[])


def _bytes(which: Sequence[Piece]) -> int:
    return sum(piece.bytes // max(piece.collective.times_if_once, 1) for piece in which)
