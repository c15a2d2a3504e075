"""List the collectives of a compiled program, with their kinds, arrays and bytes, and how often each executes.

XLA may combine the collectives of several JAX operations. `pieces` separates a combined collective again.
"""

import itertools
import math
import re
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zerojax import compat
from zerojax.comm.collectives import LABEL, UPDATE
from zerojax.inspect.hlo import HloArray, HloComputation, Instruction, Module, read
from zerojax.units import format_bytes

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# `check` ignores a piece with at most this many elements per JAX operation, such as a loss, a norm or a count.
FREE = 64
_NESTED = "\0"  # marks the place of a label while `operations` splits a name


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Sizes are of the full tensor in one execution. The full tensor is the result of an all-gather, and the operand of
    other kinds. So a parameter's all-gather and its gradient's reduce-scatter have the same size.

    Attributes:
        kind: One of `KINDS`. A start instruction and its done instruction are one collective.
        arrays: The arrays that the collective moves, in full shapes: the shape before a scatter, or after a gather.
            XLA may combine several tensors into one collective.
        group: The devices of the first group, as numbers in the mesh. For a permute, all devices in its pairs.
        times: How often one run of the program executes the collective. None if the collective is in a loop whose trip
            count the program does not fix.
        times_if_once: As `times`, but a loop whose trip count the program does not fix counts as one iteration.
        conditional: Whether the collective is in a branch of a conditional. The branch counts as executed.
        computation: The HLO computation that contains the collective.
        name: The name of the HLO instruction.
        op_name: The JAX operation that the collective came from, or "".
        frames: The Python stack that traced the operation, innermost first, as "file:line in function".
        dim: The dim along which an all-gather joins arrays, or an all-to-all exchanges them. None for other kinds.
        products: Number of matrix products from start to done of one execution. None unless `overlap` counted them.
    """

    kind: str
    arrays: tuple[HloArray, ...]
    group: tuple[int, ...]
    times: int | None
    times_if_once: int
    conditional: bool
    computation: str
    name: str
    op_name: str
    frames: tuple[str, ...]
    dim: int | None = None
    products: int | None = None

    @property
    def group_size(self) -> int:
        return len(self.group)

    @property
    def dtype(self) -> str:
        """Return the HLO dtype of the arrays. Several dtypes are joined with "+"."""
        return "+".join(sorted({array.dtype for array in self.arrays}))

    @property
    def elements(self) -> int:
        """Return the size of the full tensor in elements, for one execution."""
        return sum(array.elements for array in self.arrays)

    @property
    def bytes(self) -> int:
        """Return the size of the full tensor in bytes, for one execution."""
        return sum(array.bytes for array in self.arrays)

    @property
    def sent(self) -> int:
        """Return the bytes that a device sends per execution over a ring: (n-1)/n of `bytes`, twice for all-reduce."""
        return self._ring(self.bytes)

    @property
    def sent_elements(self) -> int:
        """Return the elements that one device sends per execution over a ring."""
        return self._ring(self.elements)

    def _ring(self, size: int) -> int:
        hops, devices = self.group_size - 1, max(self.group_size, 1)
        if self.kind in ("collective-permute", "collective-broadcast"):
            return size if hops > 0 else 0
        return -(-size * hops * (2 if self.kind == "all-reduce" else 1) // devices)


class Volume(NamedTuple):
    """Totals over the collectives in one run: the size of the full tensors, and what one device sends over a ring."""

    elements: int
    bytes: int
    sent: int
    sent_elements: int


class CompiledCollectives(tuple[Collective, ...]):
    """The collectives of a compiled program. Calling computations come before called ones. `print` shows totals."""

    __slots__ = ()

    def of(self, *kinds: str) -> "CompiledCollectives":
        """Return the collectives of some kinds, in the program's order.

        Args:
            kinds: Names from `KINDS`. Without names, all collectives are returned.

        Raises:
            ValueError: If a kind is not one of `KINDS`.
        """
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ValueError(f"No kind of collective is called {unknown[0]!r}. The kinds are {', '.join(KINDS)}.")
        return CompiledCollectives(c for c in self if not kinds or c.kind in kinds)

    def moved(self, *kinds: str, unknown_once: bool = False) -> Volume:
        """Add up the sizes of the collectives of some kinds, over all executions.

        Args:
            kinds: Names from `KINDS`. Without names, all collectives are added up.
            unknown_once: Whether to count a loop of unknown trip count as one iteration.

        Raises:
            ValueError: If a kind is not one of `KINDS`, or a collective executes an unknown number of times and
                `unknown_once` is not set.
        """
        chosen = self.of(*kinds)
        for c in chosen:
            if c.times is None and not unknown_once:
                raise ValueError(
                    f"Cannot total {c.kind} {c.name!r} ({c.op_name or 'no op_name'}): it runs in a loop whose trip "
                    "count the program does not fix. Pass unknown_once=True to count such a loop as one iteration."
                )
        return Volume(
            elements=sum(c.times_if_once * c.elements for c in chosen),
            bytes=sum(c.times_if_once * c.bytes for c in chosen),
            sent=sum(c.times_if_once * c.sent for c in chosen),
            sent_elements=sum(c.times_if_once * c.sent_elements for c in chosen),
        )

    @property
    def exposed(self) -> "CompiledCollectives":
        """Return the collectives, largest first, during which no product runs. Needs a result of `overlap`."""
        alone = (c for c in self if not c.products)
        return CompiledCollectives(sorted(alone, key=lambda c: -c.bytes * c.times_if_once))

    @property
    def hidden_share(self) -> float:
        """Return the share of the bytes that matrix products hide, for a result of `overlap`. 1 without collectives."""
        size, exposed = self.moved(unknown_once=True).bytes, self.exposed.moved(unknown_once=True).bytes
        return (size - exposed) / size if size else 1.0

    def __str__(self) -> str:
        if not self:
            return "no collectives"
        groups: dict[tuple[str, str], list[Collective]] = defaultdict(list)
        for c in sorted(self, key=lambda c: (KINDS.index(c.kind), c.dtype)):
            groups[c.kind, c.dtype].append(c)
        lines = [f"{'kind':20} {'dtype':>9} {'in text':>8} {'times':>8} {'elements':>16} {'size':>9} {'sent':>9}"]
        for (kind, dtype), group in groups.items():
            total, times = CompiledCollectives(group).moved(unknown_once=True), sum(c.times_if_once for c in group)
            lines.append(
                f"{kind:20} {dtype:>9} {len(group):8} {times:8} {total.elements:16,} "
                f"{format_bytes(total.bytes):>9} {format_bytes(total.sent):>9}"
            )
        if unknown := sum(c.times is None for c in self):
            lines.append(f"{unknown} run in loops of unknown trip count: counted as one iteration")
        if conditional := sum(c.conditional for c in self):
            lines.append(f"{conditional} are in a branch of a conditional: counted as executed")
        return "\n".join(lines)


def collectives(compiled: Any) -> CompiledCollectives:
    """List every collective of a compiled program, with the arrays that it moves and how often it executes.

    How often a collective executes follows from the loops, calls, fusions and asynchronous computations around it:

    - The trip count of a loop is the number that XLA wrote into the program, or unknown if XLA wrote none.
    - Every branch of a conditional counts as executed.

    Dtypes are from the compiled program. XLA:CPU widens bf16 to f32. If XLA replaces a permute by point-to-point
    sends, the sends are not listed.

    Args:
        compiled: The result of `jax.jit(f).lower(...).compile()`, or its HLO text.

    Returns:
        The collectives. `moved()` returns totals, and `print` shows a table.

    Raises:
        TypeError: If `compiled` is not a compiled program.
        ValueError: If the text is not HLO, or is truncated.
    """
    return collectives_of(read(compiled))


def collectives_of(module: Module) -> CompiledCollectives:
    listed = []
    for name in module.callers_first:
        computation, count = module.computations[name], module.executions[name]
        for i in computation.instructions:
            kind = i.opcode.removesuffix("-start")
            # If a start calls a computation, the collective in the computation is listed instead of the start.
            if kind not in KINDS or (kind != i.opcode and "calls=" in i.attributes):
                continue
            dim = re.search(r"\bdimensions=\{(\d+)\}", i.attributes)
            listed.append(
                Collective(
                    kind=kind,
                    arrays=_full_arrays(kind, computation, i),
                    group=_group(module, i),
                    times=count.times_if_once if count.known else None,
                    times_if_once=count.times_if_once,
                    conditional=count.conditional,
                    computation=name,
                    name=i.name,
                    op_name=i.op_name,
                    frames=module.frames(i),
                    dim=int(dim[1]) if dim else None,
                )
            )
    return CompiledCollectives(listed)


def cause_of(c: Collective) -> str:
    """Return the leaves that zerojax wrote into `c.op_name`; without leaves, the model's line or the operation."""
    if leaves := leaves_in(c.op_name):
        more = len(c.arrays) - 1  # XLA combines collectives, and keeps the name of one collective
        return f"{leaves} and {more} combined with it" if more else leaves
    return next(iter(lines_of_model(c.frames)), c.op_name or c.name)


def leaves_in(op_name: str) -> str:
    found = LABEL.search(op_name)
    return found[2].replace("\\", "") if found else ""


def lines_of_model(frames: Sequence[str]) -> list[str]:
    """Return the frames in the user's model. Skip those of the calling script, which are on the current call stack."""
    callers = {f"{frame.f_code.co_filename}:{number}" for frame, number in traceback.walk_stack(None)}
    return [frame for frame in frames if compat.is_users(frame) and frame.rsplit(" in ", 1)[0] not in callers]


def _full_arrays(kind: str, computation: HloComputation, i: Instruction) -> tuple[HloArray, ...]:
    operands = i.operands[:1] if kind == "ragged-all-to-all" else i.operands
    if kind == "all-gather":
        arrays = i.arrays
        # The shape of a start lists operands, then results, then context. Their nesting varies.
        return tuple(arrays if i.opcode == kind else arrays[len(operands) : 2 * len(operands)])
    if missing := [name for name in operands if name not in computation.by_name]:
        raise ValueError(
            f"The HLO text is truncated: {kind} {i.name!r} takes {missing[0]!r}, which it does not define. "
            "Give the whole text of as_text()."
        )
    return tuple(array for name in operands for array in computation.by_name[name].arrays)


def _group(module: Module, i: Instruction) -> tuple[int, ...]:
    text = i.attributes
    if pairs := re.search(r"source_target_pairs=\{([\d{},\s]*)\}", text):
        return tuple(sorted({int(n) for n in re.findall(r"\d+", pairs[1])}))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, order = ([int(n) for n in (part or "").split(",") if n] for part in iota.groups()[1:])
        numbers = np.arange(math.prod(shape)).reshape(shape)
        return tuple(numbers.transpose(order or None).reshape(-1, int(iota[1]))[0].tolist())
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        # For each axis, the difference between the numbers of neighbouring devices.
        strides = {name: math.prod([*sizes.values()][k + 1 :]) for k, name in enumerate(sizes)}
        numbers = np.zeros((), int)
        # A sub-axis is written 'name':(size before)size.
        for name, before, own in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", mesh[2]):
            size, outer = int(own or sizes[name]), int(before or 1)
            numbers = numbers[..., None] + np.arange(size) * strides[name] * (sizes[name] // (outer * size))
        return tuple(numbers.ravel().tolist())
    if listed := re.search(r"replica_groups=\{\{([^}]*)\}", text):
        return tuple(int(n) for n in listed[1].split(","))
    header = module.text.partition("\n")[0]  # no groups: all devices
    return tuple(range(math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))))


@dataclass(frozen=True)
class CollectivePiece:
    """The part of a collective that one JAX operation moves.

    XLA combines several collectives into one, and joins the names of their operations. So one collective may move a
    parameter's gradient, a loss and an activation. The joined name usually tells which operation moves which array.
    """

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

    @cached_property
    def line(self) -> str:
        """Return the line of the model that caused the collective, or the operation if no line is known."""
        return next(iter(lines_of_model(self.collective.frames)), self.op_name or self.collective.name)


def pieces(module: Module, only: Iterable[Collective] | None = None) -> Iterator[CollectivePiece]:
    for c in collectives_of(module) if only is None else only:
        names = operations(c.op_name)
        if len(names) == len(c.arrays):
            parts = [(name, array.elements, array.bytes) for name, array in zip(names, c.arrays, strict=True)]
        else:  # there are not as many names as arrays: keep one piece, and prefer a name with a label
            name = next((name for name in names if LABEL.search(name)), names[0])
            parts = [(name, c.elements, c.bytes)]
        free, times = FREE * max(1, len(names) // len(parts)), c.times_if_once
        for name, elements, size in parts:
            yield CollectivePiece(c, name, times * elements, times * size, elements, elements <= free)


def operations(op_name: str) -> list[str]:
    """Return the names of the operations that XLA joined into `prefix/(a:b:c)`, or `[op_name]` for any other name."""
    labels: list[str] = []

    def keep(label: re.Match) -> str:
        labels.append(label.group())
        return f"{_NESTED}{len(labels) - 1}{_NESTED}{label.group()[-1]}"

    hidden = LABEL.sub(keep, op_name)  # a label may contain colons and brackets
    before, inside = _split_names(hidden)
    shown = lambda name: re.sub(f"{_NESTED}(\\d+){_NESTED}.", lambda at: labels[int(at[1])], name)
    return [shown(before + part) for part in inside]


def _split_names(name: str) -> tuple[str, list[str]]:
    """Split `prefix/(a:b:c)` into `prefix/` and the names a, b, c. For any other name, return `""` and this name."""
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
