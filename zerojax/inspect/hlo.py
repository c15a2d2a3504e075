"""A compiled program's HLO text, parsed: computations in schedule order, and how often each executes.

The text is read in one pass over its lines; operands and attributes are parsed only where asked for.
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
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_DEPTH = 12  # how far a loop counter is traced back, which bounds the work on values that are no counters


class Instruction(NamedTuple):
    """One line of HLO; `rest` is the unparsed line from the operands on."""

    name: str
    opcode: str
    shape: str
    rest: str
    root: bool

    @property
    def literal(self) -> str:
        """Return the text between the parentheses: operands, or a constant's value."""
        depth = 1
        for bracket in re.finditer(r"[()]", self.rest):
            depth += 1 if bracket.group() == "(" else -1
            if depth == 0:
                return self.rest[: bracket.start()]
        return self.rest

    @property
    def operands(self) -> list[str]:
        """Return the names of the operands."""
        literal = self.literal
        if "%" in literal:
            return re.findall(r"%([\w.\-]+)", literal)
        return re.findall(r"([\w.\-]+)\s*(?:,|$)", re.sub(r"\[[^\]]*\]|\{[^}]*\}|/\*.*?\*/", "", literal))

    @property
    def attributes(self) -> str:
        """Return what follows the operands, without metadata and backend config, whose text could match anything."""
        return self.rest[len(self.literal) :].partition(", metadata={")[0].partition(", backend_config=")[0]

    @property
    def is_synchronous(self) -> bool:
        """Return True without a start. XLA:GPU also marks some start and done pairs as synchronous."""
        return not self.opcode.endswith("-start") or re.search(r'"is_sync":\s*true', self.rest) is not None


class Computation(NamedTuple):
    """One HLO computation: its instructions in the order of the text, which is the schedule, and by name."""

    name: str
    instructions: list[Instruction]
    by_name: dict[str, Instruction]

    @property
    def root(self) -> str:
        """Name of the instruction whose value the computation returns."""
        return next((i.name for i in reversed(self.instructions) if i.root), "")


class Call(NamedTuple):
    """An instruction that runs a computation `trip_count` times; None where the program does not fix the number."""

    instruction: Instruction
    callee: str
    trip_count: int | None


@dataclass(frozen=True)
class Module:
    """A parsed program."""

    text: str
    computations: dict[str, Computation]
    entries: tuple[str, ...]

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        """Return, for each computation, those it runs and how often, in schedule order."""
        return {
            c.name: [call for i in c.instructions for call in self._calls(c, i)] for c in self.computations.values()
        }

    def _calls(self, caller: Computation, instruction: Instruction) -> Iterator[Call]:
        opcode, trips = instruction.opcode, 1
        if opcode not in _CALLERS and not opcode.endswith("-start"):
            return
        attributes = _CALLEES.findall(instruction.attributes)
        callees = [(key, name) for key, names in attributes for name in re.findall(r"[\w.\-]+", names)]
        if opcode == "while":
            known = _TRIP_COUNT.search(instruction.rest)
            trips = int(known.group(1)) if known else _trip_count(self, caller, instruction, dict(callees))
        for key, name in callees:
            if name in self.computations:
                # The condition runs once more than the body.
                yield Call(instruction, name, None if trips is None else trips + (key == "condition"))

    @cached_property
    def callers_first(self) -> tuple[str, ...]:
        """Return every computation that the entry reaches, each after all of its callers."""
        order, pending, seen = TopologicalSorter[str](), list(self.entries), set(self.entries)
        while pending:
            name = pending.pop()
            order.add(name)
            for call in self.calls[name]:
                order.add(call.callee, name)
                if call.callee not in seen:
                    seen.add(call.callee)
                    pending.append(call.callee)
        return tuple(order.static_order())

    @cached_property
    def executions(self) -> dict[str, "Executions"]:
        """Return how often each computation that the entry reaches executes in one run."""
        counts = dict.fromkeys(self.callers_first, Executions(0, True, False))
        counts |= dict.fromkeys(self.entries, Executions(1, True, False))
        for caller in self.callers_first:
            outer = counts[caller]
            for call in self.calls[caller]:
                earlier, trips = counts[call.callee], 1 if call.trip_count is None else call.trip_count
                counts[call.callee] = Executions(
                    earlier.times_if_once + outer.times_if_once * trips,
                    earlier.known and outer.known and call.trip_count is not None,
                    earlier.conditional or outer.conditional or call.instruction.opcode == "conditional",
                )
        return counts


class Executions(NamedTuple):
    """Executions of a computation in one run of the program.

    Attributes:
        times_if_once: How many, each loop of unknown trip count taken as one iteration.
        known: Whether every trip count around it is known.
        conditional: Whether it is in a branch of a conditional.
    """

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
        raise TypeError(f"Cannot read a compiled program from a {type(compiled).__name__}. {remedy}.")

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
        elif current is not None and (match := _INSTRUCTION.match(line)):
            root, name, shape, opcode = match.groups()
            instruction = Instruction(name, opcode, shape, line[match.end() :], root is not None)
            current.instructions.append(instruction)
            current.by_name[name] = instruction
    if not entries:
        raise ValueError(
            f"No HLO program in this text of {len(text)} characters: it has no ENTRY computation. "
            "Give the text of compile(), not that of lower(), and all of it."
        )
    return Module(text, computations, tuple(entries))


def _callee(i: Instruction) -> str:
    match = _CALLEES.search(i.attributes)
    return match[2].strip("%") if match else ""


class _Affine(NamedTuple):
    """An integer in a loop: element number `element` of the carry plus `offset`; a constant where that is None."""

    element: int | None
    offset: int


def _trace(
    module: Module,
    c: Computation,
    name: str,
    element: int | None = None,
    arguments: list["_Affine | None"] | None = None,
    depth: int = _DEPTH,
) -> _Affine | None:
    """Trace a value back to a constant or to the loop's carry; `arguments` are those of a fusion or call."""
    i = c.by_name.get(name)
    # A counter is an integer scalar, alone or in a tuple; tracing anything else could fan out without end.
    if i is None or depth == 0 or not re.match(r"[su]\d+\[\]|\(", i.shape):
        return None
    operands, follow = i.operands, lambda name, at=None: _trace(module, c, name, at, arguments, depth - 1)
    if i.opcode == "constant" and re.fullmatch(r"-?\d+", i.literal):
        return _Affine(None, int(i.literal))
    if i.opcode == "parameter":
        carry = None if element is None else _Affine(element, 0)
        return carry if arguments is None else arguments[int(i.literal)]
    if i.opcode in ("copy", "convert", "bitcast", "reshape"):
        return follow(operands[0], element)
    if i.opcode == "tuple" and element is not None:
        return follow(operands[element])
    if i.opcode == "get-tuple-element" and element is None:
        return follow(operands[0], int(i.attributes.partition("index=")[2].partition(",")[0]))
    if i.opcode in ("fusion", "call"):
        inner = module.computations.get(_callee(i))
        passed = [follow(o) for o in operands]
        return _trace(module, inner, inner.root, element, passed, depth - 1) if inner else None
    if i.opcode in ("add", "subtract"):
        left, right = follow(operands[0]), follow(operands[1])
        if i.opcode == "subtract" and right is not None:
            right = _Affine(right.element, -right.offset) if right.element is None else None
        if left and right and None in (left.element, right.element):
            return _Affine(left.element if right.element is None else right.element, left.offset + right.offset)
    return None


def _comparison(
    module: Module, c: Computation, name: str, arguments: list[_Affine | None] | None = None
) -> tuple | None:
    """Return `(left, right, direction)` of the compare that ends a loop; None for any other condition."""
    i = c.by_name.get(name)
    if i is None or i.opcode not in ("compare", "fusion", "call"):
        return None
    operands = [_trace(module, c, operand, arguments=arguments) for operand in i.operands]
    if i.opcode == "compare":
        direction = re.search(r"direction=(\w+)", i.attributes)
        return *operands, direction and direction[1]
    inner = module.computations.get(_callee(i))
    return inner and _comparison(module, inner, inner.root, operands)


def _trip_count(module: Module, caller: Computation, loop: Instruction, callees: dict[str, str]) -> int | None:
    """Return the iterations of a loop whose counter has a constant start, step and bound; None otherwise."""
    condition, body = (module.computations.get(callees.get(key, "")) for key in ("condition", "body"))
    compared = condition and _comparison(module, condition, condition.root)
    if not compared or not body or compared[0] is None or compared[1] is None or compared[2] not in _MIRRORED:
        return None
    counter, bound, direction = compared
    if counter.element is None:
        counter, bound, direction = bound, counter, _MIRRORED[direction]
    if counter.element is None or bound.element is not None:
        return None
    start = _trace(module, caller, loop.operands[0], counter.element)
    following = _trace(module, body, body.root, counter.element)
    if not start or not following or start.element is not None or following.element != counter.element:
        return None
    if following.offset == 0:
        return None
    sign = -1 if direction in ("GT", "GE") else 1
    step, distance = following.offset * sign, (bound.offset - start.offset - counter.offset) * sign

    if direction == "NE":
        return distance // step if distance * step >= 0 and distance % step == 0 else None
    distance += direction in ("LE", "GE")
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None
