"""The model's line nearest to an instruction that has none: of a barrier, or of a copy that the compiler made."""

from collections import defaultdict, deque
from collections.abc import Iterator

from zerojax.inspect.collectives import frame_reader, lines_of_model
from zerojax.inspect.hlo import Instruction, Module

_MOST = 300  # instructions visited, which bounds the work where no line is near


class Nearest:
    """Find the model's line nearest to an instruction of one program."""

    def __init__(self, module: Module):
        """Prepare to search a program."""
        self.module = module
        self._frames = frame_reader(module.text)
        self._users: dict[str, dict[str, list[str]]] = {}
        self._callers: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for where, calls in module.calls.items():
            for call in calls:
                self._callers[call.callee].append((where, call.instruction.name))

    def __call__(self, computation: str, name: str) -> str:
        """Return the line of the nearest instruction that has one, or "".

        What an instruction reads comes before what reads it. A loop's body, or a call, is left through the
        instruction that runs it.

        Args:
            computation: Of the instruction.
            name: The instruction.
        """
        pending, seen = deque([(computation, name)]), {(computation, name)}
        while pending and len(seen) < _MOST:
            where, name = pending.popleft()
            instruction = self.module.computations[where].by_name.get(name)
            if instruction is None:
                continue
            if found := lines_of_model(self._frames(instruction)):
                return found[0]
            for near in self._neighbours(where, instruction):
                if near not in seen:
                    seen.add(near)
                    pending.append(near)
        return ""

    def _neighbours(self, where: str, i: Instruction) -> Iterator[tuple[str, str]]:
        """Return what an instruction reads and what reads it; for a parameter or a root, what runs the computation."""
        if i.opcode not in ("parameter", "constant"):
            yield from ((where, name) for name in i.operands)
        yield from ((where, name) for name in self._users_in(where).get(i.name, ()))
        if i.opcode == "parameter" or i.root:
            yield from self._callers.get(where, ())

    def _users_in(self, where: str) -> dict[str, list[str]]:
        if where not in self._users:
            users = self._users[where] = defaultdict(list)
            for i in self.module.computations[where].instructions:
                for name in i.operands if i.opcode not in ("parameter", "constant") else ():
                    users[name].append(i.name)
        return self._users[where]
