"""Parse the HLO text of a compiled program into computations, in schedule order, and count how often each executes.

`read` scans the lines once. An instruction's operands, attributes and callees are parsed when they are used.
"""

import math
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
# Opcodes that run the computations that they name. An all-reduce, for example, only refers to the computation of a sum.
_CALLERS = frozenset({"fusion", "call", "while", "conditional", "custom-call"})
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=? ]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')


@dataclass(frozen=True)
class HloArray:
    """One array of an HLO shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the size in bytes. Elements of less than eight bits are packed."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        width = int(bits.group(1)) if bits else {"pred": 8, "token": 0, "opaque": 0}.get(self.dtype)
        if width is None:
            raise ValueError(f"Cannot size an array of HLO type {self.dtype!r}: zerojax does not know this dtype.")
        return -(-self.elements * width // 8)


class Instruction(NamedTuple):
    """One line of HLO. `rest` is its text from the operands on. `root` says whether it is a computation's result."""

    name: str
    opcode: str
    shape: str
    rest: str
    root: bool

    @property
    def arrays(self) -> list[HloArray]:
        return [
            HloArray(dtype, tuple(int(d.strip(" <=")) for d in dims.split(",") if d.strip()))
            for dtype, dims in _ARRAY.findall(self.shape)
        ]

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

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
        """Return the text after the operands, without metadata and backend config, which may contain any text."""
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
class HloComputation:
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


class HloCall(NamedTuple):
    """An instruction that runs the computation `callee`. `trip_count` is None if the program does not fix it."""

    instruction: Instruction
    callee: str
    trip_count: int | None

    @property
    def trips(self) -> int:
        return 1 if self.trip_count is None else self.trip_count


@dataclass(frozen=True)
class Module:
    """A parsed program: its text, its computations by name, and the names of its entry computations."""

    text: str
    computations: dict[str, HloComputation]
    entries: tuple[str, ...]

    @cached_property
    def calls(self) -> dict[str, list[HloCall]]:
        return {c.name: [call for i in c.instructions for call in self.calls_of(i)] for c in self.computations.values()}

    def calls_of(self, instruction: Instruction) -> Iterator[HloCall]:
        opcode, trips = instruction.opcode, 1
        if opcode not in _CALLERS and not opcode.endswith("-start"):
            return
        if opcode == "while":
            known = _TRIP_COUNT.search(instruction.rest)
            trips = int(known.group(1)) if known else None
        for key, name in instruction.callees:
            if name in self.computations:
                # The condition runs once more than the body.
                yield HloCall(instruction, name, None if trips is None else trips + (key == "condition"))

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
                earlier = counts[call.callee]
                counts[call.callee] = Executions(
                    earlier.times_if_once + outer.times_if_once * call.trips,
                    earlier.known and outer.known and call.trip_count is not None,
                    earlier.conditional or outer.conditional or call.instruction.opcode == "conditional",
                )
        return counts

    def callee(self, instruction: Instruction) -> HloComputation | None:
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
    """How often one run of the program executes a computation."""

    times_if_once: int  # the number of executions, if each loop of unknown trip count has one iteration
    known: bool  # whether every trip count around the computation is known
    conditional: bool  # whether the computation is in a branch of a conditional


def read(compiled: Any) -> Module:
    """Parse the result of `jax.jit(f).lower(...).compile()`, or its HLO text. Return a parsed program unchanged."""
    if isinstance(compiled, Module):
        return compiled
    if not isinstance(compiled, str) and not (hasattr(compiled, "as_text") and hasattr(compiled, "memory_analysis")):
        raise TypeError(
            f"Cannot read a compiled program from a {type(compiled).__name__}. Give what "
            f"jax.jit(f).lower(...).compile() returns, or its as_text()."
        )

    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    computations: dict[str, HloComputation] = {}
    entries, current = [], None
    for line in text.split("\n"):
        if line[:1] == "}":
            current = None
        elif line[:1] not in ("", " ", "\t"):
            if line.endswith("{") and (header := _HEADER.match(line)):
                current = computations[header[2]] = HloComputation(header[2], [], {})
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


def memory_analysis(compiled: Any) -> Any:
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory


def peak_bytes(compiled: Any) -> int:
    """Return the bytes per device of arguments, temporary memory, and results that do not alias donated arguments."""
    memory = memory_analysis(compiled)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
