"""A compiled program's HLO text, parsed: computations in schedule order, and how often each executes.

Text is read in one pass over its lines, and only the few lines that matter are taken apart.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? ?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_CALLEES = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_CALLERS = frozenset({"fusion", "call", "while", "conditional", "custom-call"})
_TURNS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_DEPTH = 12  # how far a loop counter is traced back; bounds the work on a text that is no counter


class Instruction(NamedTuple):
    """One line of HLO; `rest` is the line from the operands on, taken apart only where needed."""

    name: str
    opcode: str
    shape: str
    rest: str
    root: bool

    @property
    def literal(self) -> str:
        """What stands between the brackets."""
        depth = 1
        for bracket in re.finditer(r"[()]", self.rest):
            depth += 1 if bracket.group() == "(" else -1
            if depth == 0:
                return self.rest[: bracket.start()]
        return self.rest

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        literal = self.literal
        if "%" in literal:
            return re.findall(r"%([\w.\-]+)", literal)
        return re.findall(r"([\w.\-]+)\s*(?:,|$)", re.sub(r"\[[^\]]*\]|\{[^}]*\}|/\*.*?\*/", "", literal))

    @property
    def attributes(self) -> str:
        """What follows the operands, without metadata and backend config: their free text could mislead."""
        return self.rest[len(self.literal) :].partition(", metadata={")[0].partition(", backend_config=")[0]

    @property
    def synchronous(self) -> bool:
        """True without a start; XLA:GPU also marks some start and done pairs as run in place."""
        return not self.opcode.endswith("-start") or re.search(r'"is_sync":\s*true', self.rest) is not None


class Computation(NamedTuple):
    """One HLO computation: its instructions in the order of the text, which is the schedule, and by name."""

    name: str
    instructions: list[Instruction]
    by_name: dict[str, Instruction]

    @property
    def root(self) -> str:
        """Name of the instruction whose value is the computation's."""
        return next((i.name for i in reversed(self.instructions) if i.root), "")


class Call(NamedTuple):
    """An instruction runs a computation `turns` times, None if the program does not fix it."""

    instruction: Instruction
    callee: str
    turns: int | None


@dataclass(frozen=True)
class Module:
    """A parsed program."""

    text: str
    computations: dict[str, Computation]
    entries: tuple[str, ...]

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        """By caller, which computations it runs and how often, in schedule order."""
        return {
            c.name: [call for i in c.instructions for call in self._calls(c, i)] for c in self.computations.values()
        }

    def _calls(self, caller: Computation, instruction: Instruction) -> Iterator[Call]:
        opcode, turns = instruction.opcode, 1
        if opcode not in _CALLERS and not opcode.endswith("-start"):
            return
        attributes = _CALLEES.findall(instruction.attributes)
        found = [(key, name) for key, names in attributes for name in re.findall(r"[\w.\-]+", names)]
        if opcode == "while":
            known = _TURNS.search(instruction.rest)
            turns = int(known.group(1)) if known else _turns(self, caller, instruction, dict(found))
        for key, name in found:
            if name in self.computations:
                # The condition is asked once more than the body runs.
                yield Call(instruction, name, None if turns is None else turns + (key == "condition"))

    @cached_property
    def callers_first(self) -> tuple[str, ...]:
        """Every computation that the entry reaches, each after all of its callers."""
        order, waiting, seen = TopologicalSorter[str](), list(self.entries), set(self.entries)
        while waiting:
            name = waiting.pop()
            order.add(name)
            for call in self.calls[name]:
                order.add(call.callee, name)
                if call.callee not in seen:
                    seen.add(call.callee)
                    waiting.append(call.callee)
        return tuple(order.static_order())

    @cached_property
    def executions(self) -> dict[str, "Count"]:
        """How often each computation that the entry reaches executes in one run."""
        counts = dict.fromkeys(self.callers_first, Count(0, True, False))
        counts |= dict.fromkeys(self.entries, Count(1, True, False))
        for caller in self.callers_first:
            here = counts[caller]
            for call in self.calls[caller]:
                was, turns = counts[call.callee], 1 if call.turns is None else call.turns
                counts[call.callee] = Count(
                    was.times_if_once + here.times_if_once * turns,
                    was.known and here.known and call.turns is not None,
                    was.conditional or here.conditional or call.instruction.opcode == "conditional",
                )
        return counts


class Count(NamedTuple):
    """Executions of a computation in one run of the program; see `Collective` for the words."""

    times_if_once: int
    known: bool
    conditional: bool


def read(compiled: Any) -> Module:
    """Parse a compiled program.

    Args:
        compiled: What `jax.jit(f).lower(...).compile()` gives, or its HLO text.

    Returns:
        The parsed program.

    Raises:
        TypeError: If `compiled` is no compiled program.
        ValueError: If the text is not HLO.
    """
    if not isinstance(compiled, str) and not (hasattr(compiled, "as_text") and hasattr(compiled, "memory_analysis")):
        remedy = "Give what jax.jit(f).lower(...).compile() returns, or its as_text()"
        if hasattr(compiled, "compile"):
            remedy = "It is lowered, not compiled: call .compile() on it first"
        elif hasattr(compiled, "lower"):
            remedy = "It is a function: give what its .lower(...).compile() returns"
        raise TypeError(f"Cannot read collectives from a {type(compiled).__name__}. {remedy}.")
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    computations: dict[str, Computation] = {}
    entries, current = [], None
    for line in text.split("\n"):
        if line[:1] == "}":
            current = None
        elif line[:1] not in ("", " ", "\t"):
            if line.endswith("{") and (header := _HEADER.match(line)):
                current = computations[header[2]] = Computation(header[2], [], {})
                if header[1]:
                    entries.append(header[2])
        elif current is not None and (found := _INSTRUCTION.match(line)):
            root, name, shape, opcode = found.groups()
            instruction = Instruction(name, opcode, shape, line[found.end() :], root is not None)
            current.instructions.append(instruction)
            current.by_name[name] = instruction
    if not entries:
        raise ValueError(
            f"No HLO program in this text of {len(text)} characters: it has no ENTRY computation. "
            "Give the text of compile(), not that of lower(), and all of it."
        )
    return Module(text, computations, tuple(entries))


def _callee(i: Instruction) -> str:
    found = _CALLEES.search(i.attributes)
    return found[2].strip("%") if found else ""


class _Counter(NamedTuple):
    """A value in a loop: number `element` of the loop's state plus `offset`, or just `offset` where that is None."""

    element: int | None
    offset: int


def _trace(
    module: Module,
    c: Computation,
    name: str,
    element: int | None = None,
    given: list["_Counter | None"] | None = None,
    depth: int = _DEPTH,
) -> _Counter | None:
    """Trace a value back to a constant or to the loop's state; `given` are the arguments of a fusion or call."""
    i = c.by_name.get(name)
    # A counter is an integer scalar, alone or in a tuple; anything else could fan out without end.
    if i is None or depth == 0 or not re.match(r"[su]\d+\[\]|\(", i.shape):
        return None
    operands, follow = i.operands, lambda name, at=None: _trace(module, c, name, at, given, depth - 1)
    if i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal):
        return _Counter(None, int(i.literal))
    if i.opcode == "parameter":
        return given[int(i.literal)] if given is not None else None if element is None else _Counter(element, 0)
    if i.opcode in ("copy", "convert", "bitcast", "reshape"):
        return follow(operands[0], element)
    if i.opcode == "tuple" and element is not None:
        return follow(operands[element])
    if i.opcode == "get-tuple-element" and element is None:
        return follow(operands[0], int(i.attributes.partition("index=")[2].partition(",")[0]))
    if i.opcode in ("fusion", "call"):
        inner = module.computations.get(_callee(i))
        arguments = [follow(o) for o in operands]
        return _trace(module, inner, inner.root, element, arguments, depth - 1) if inner else None
    if i.opcode in ("add", "subtract"):
        left, right = follow(operands[0]), follow(operands[1])
        if i.opcode == "subtract" and right is not None:
            right = _Counter(right.element, -right.offset) if right.element is None else None
        if left and right and None in (left.element, right.element):
            return _Counter(left.element if right.element is None else right.element, left.offset + right.offset)
    return None


def _compared(module: Module, c: Computation, name: str, given: list[_Counter | None] | None = None) -> tuple | None:
    """The two sides and the direction of the compare that decides a loop."""
    i = c.by_name.get(name)
    if i is not None and i.opcode == "compare":
        direction = re.search(r"direction=(\w+)", i.attributes)
        return *(_trace(module, c, o, given=given) for o in i.operands), direction and direction[1]
    if i is not None and i.opcode in ("fusion", "call"):
        inner = module.computations.get(_callee(i))
        return inner and _compared(module, inner, inner.root, [_trace(module, c, o, given=given) for o in i.operands])
    return None


def _turns(module: Module, caller: Computation, loop: Instruction, parts: dict[str, str]) -> int | None:
    """Turns of a loop that counts from a constant by a constant to a constant; None for any other."""
    condition, body = (module.computations.get(parts.get(key, "")) for key in ("condition", "body"))
    compared = condition and _compared(module, condition, condition.root)
    if not compared or not body or compared[0] is None or compared[1] is None or compared[2] not in _FLIPPED:
        return None
    counter, bound, direction = compared
    if counter.element is None:
        counter, bound, direction = bound, counter, _FLIPPED[direction]
    if counter.element is None or bound.element is not None:
        return None
    start = _trace(module, caller, loop.operands[0], counter.element)
    after = _trace(module, body, body.root, counter.element)
    if not start or not after or start.element is not None or after.element != counter.element or after.offset == 0:
        return None
    way = -1 if direction in ("GT", "GE") else 1
    step, distance = after.offset * way, (bound.offset - start.offset - counter.offset) * way
    if direction == "NE":
        return distance // step if distance * step >= 0 and distance % step == 0 else None
    distance += direction in ("LE", "GE")
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None
