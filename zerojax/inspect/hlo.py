"""Parse the HLO text of a compiled program into computations, in schedule order, and count how often each executes.

`read` scans the lines once. An instruction's operands, attributes and callees are parsed when they are used.
"""

import re
from collections import defaultdict
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
# Other instructions also name computations, such as the sum of an all-reduce, but do not run them as programs.
_CALLERS = frozenset({"fusion", "call", "while", "conditional", "custom-call"})
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_DEPTH = 12  # the most instructions through which a loop counter is traced, to bound the work on other values


class Instruction(NamedTuple):
    """One line of HLO. `rest` is the line from the operands on, not parsed. `root` marks a computation's result."""

    name: str
    opcode: str
    shape: str
    rest: str
    root: bool

    @property
    def literal(self) -> str:
        """Return the text in parentheses, which has the operands, a constant's value, or a parameter's number."""
        depth = 1
        for bracket in re.finditer(r"[()]", self.rest):
            depth += 1 if bracket.group() == "(" else -1
            if depth == 0:
                return self.rest[: bracket.start()]
        return self.rest

    @property
    def operands(self) -> list[str]:
        """Return the names of the operands. A parameter or a constant has none."""
        if self.opcode in ("parameter", "constant"):
            return []
        literal = self.literal
        if "%" in literal:
            return re.findall(r"%([\w.\-]+)", literal)
        return re.findall(r"([\w.\-]+)\s*(?:,|$)", re.sub(r"\[[^\]]*\]|\{[^}]*\}|/\*.*?\*/", "", literal))

    @property
    def attributes(self) -> str:
        """Return the text after the operands, without metadata and backend config, where any text may occur."""
        return self.rest[len(self.literal) :].partition(", metadata={")[0].partition(", backend_config=")[0]

    @property
    def callees(self) -> list[tuple[str, str]]:
        found = _CALLEES.findall(self.attributes)
        return [(key, name) for key, names in found for name in re.findall(r"[\w.\-]+", names)]

    @property
    def op_name(self) -> str:
        """Return the JAX operation that the instruction came from, or ""."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def is_synchronous(self) -> bool:
        return not self.opcode.endswith("-start") or re.search(r'"is_sync":\s*true', self.rest) is not None


@dataclass(frozen=True)
class Computation:
    """One HLO computation. `instructions` are in the order of the text, which is the schedule."""

    name: str
    instructions: list[Instruction]
    by_name: dict[str, Instruction]

    @property
    def root(self) -> str:
        return next((i.name for i in reversed(self.instructions) if i.root), "")

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found = defaultdict(list)
        for i in self.instructions:
            for name in i.operands:
                found[name].append(i)
        return found


class Call(NamedTuple):
    """An instruction that runs `callee` `trip_count` times. `trip_count` is None if the program does not fix it."""

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
        return {
            c.name: [call for i in c.instructions for call in self._calls(c, i)] for c in self.computations.values()
        }

    def _calls(self, caller: Computation, instruction: Instruction) -> Iterator[Call]:
        opcode, trips = instruction.opcode, 1
        if opcode not in _CALLERS and not opcode.endswith("-start"):
            return
        if opcode == "while":
            known = _TRIP_COUNT.search(instruction.rest)
            trips = int(known.group(1)) if known else _trip_count(self, caller, instruction)
        for key, name in instruction.callees:
            if name in self.computations:
                # The condition runs once more than the body.
                yield Call(instruction, name, None if trips is None else trips + (key == "condition"))

    @cached_property
    def callers_first(self) -> tuple[str, ...]:
        """Return the names of all computations that the entry reaches. Callers come before callees."""
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
        """Return, for each computation that the entry reaches, how often it executes in one run."""
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

    def callee(self, instruction: Instruction) -> Computation | None:
        return next((self.computations.get(name) for _, name in instruction.callees), None)

    def frames(self, instruction: Instruction) -> tuple[str, ...]:
        """Return the Python stack that traced an instruction, innermost first, as "file:line in function"."""
        if own := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.rest):
            return (f"{own[1]}:{own[2]}",)
        match = re.search(r"stack_frame_id=(\d+)", instruction.rest)
        frame, lines = int(match[1]) if match else 0, []
        while frame in self._stack:
            line, parent = self._stack[frame]
            if lines[-1:] != [line]:
                lines.append(line)
            frame = parent if parent < frame else 0
        return tuple(lines)

    @cached_property
    def _stack(self) -> dict[int, tuple[str, int]]:
        """Return the line and the parent of each stack frame, from the tables at the head of the text."""
        tables = {}
        for block in self.text[: self.text.find("\n%")].split("\n\n"):
            title, _, body = block.strip().partition("\n")
            tables[title] = body
        files, names = (dict(re.findall(r'(\d+) "(.*)"', tables.get(t, ""))) for t in ("FileNames", "FunctionNames"))
        location = re.compile(r"(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
        locations = {
            number: f"{files.get(file, '?')}:{line} in {names.get(name, '?')}"
            for number, file, name, line in location.findall(tables.get("FileLocations", ""))
        }
        linked = re.findall(r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", tables.get("StackFrames", ""))
        # jax 0.10 to 0.12 print the parent's number plus one, so that the first frame names itself.
        shift = 1 if linked and linked[0][2] == "1" else 0
        return {int(frame): (locations.get(number, "?"), int(parent or 0) - shift) for frame, number, parent in linked}


class Executions(NamedTuple):
    """How often one run of the program executes a computation.

    Attributes:
        times_if_once: The number of executions, if each loop of unknown trip count has one iteration.
        known: Whether every trip count around the computation is known.
        conditional: Whether the computation is in a branch of a conditional.
    """

    times_if_once: int
    known: bool
    conditional: bool


def read(compiled: Any) -> Module:
    """Parse a compiled program. A parsed program is returned unchanged.

    Args:
        compiled: The result of `jax.jit(f).lower(...).compile()`, or its HLO text.

    Raises:
        TypeError: If `compiled` is not a compiled program.
        ValueError: If the text is not HLO.
    """
    if isinstance(compiled, Module):
        return compiled
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
            "Give the whole text of compile(), not of lower()."
        )
    return Module(text, computations, tuple(entries))


class _Affine(NamedTuple):
    """An integer in a loop. It is `offset`, plus element number `element` of the carry unless `element` is None."""

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
    """Trace the value `name`, or its `element` if it is a tuple, to a constant or to an element of the loop's carry.

    In a fusion or a call, `arguments` are the traced arguments. If `arguments` is None, the parameter is the carry.
    """
    i = c.by_name.get(name)
    # A counter is an integer scalar, alone or in a tuple. Tracing other values could take exponential time.
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
        inner = module.callee(i)
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
    """Return `(left, right, direction)` of the comparison that ends a loop, or None for any other condition."""
    i = c.by_name.get(name)
    if i is None or i.opcode not in ("compare", "fusion", "call"):
        return None
    operands = [_trace(module, c, operand, arguments=arguments) for operand in i.operands]
    if i.opcode == "compare":
        direction = re.search(r"direction=(\w+)", i.attributes)
        return *operands, direction and direction[1]
    inner = module.callee(i)
    return inner and _comparison(module, inner, inner.root, operands)


def _trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Return the number of iterations of a loop if its counter has a constant start, step and bound, otherwise None."""
    callees = dict(loop.callees)
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
