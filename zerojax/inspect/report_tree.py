"""Build and print a report's tree of parts, modules and leaves with their bytes. Equal siblings share one line."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jax

PLACES = ("device", "host", "disk")
OFFLOADED = {"host": "host memory", "disk": "files"}
NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of a state."""

    part: str  # the field of the state that contains the leaf: `"params"`, `"opt_state"` and others
    path: str  # the leaf's path within the part
    keys: tuple[str, ...]  # the leaf's path in the report's tree: its part, or "master", then one key per level
    shape: tuple[int, ...]  # the logical shape if it is known, otherwise the storage shape
    dtype: Any  # element type
    place: str  # one of `PLACES`
    device_bytes: dict[jax.Device, int]  # for each device, the bytes in this place, with padding
    kept: dict[jax.Device, int]  # for each device, the bytes of an offloaded leaf's chunks that are on the device
    total: int  # bytes of the global array in storage
    sharding: str  # the `PartitionSpec` and the memory kind. A sharding without a spec is described in words
    note: str  # why the leaf is replicated or flat, or how it is padded. Empty for a sharded leaf without padding

    @property
    def bytes(self) -> int:
        return max(self.device_bytes.values(), default=0)

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}  {self.sharding}"
        return f"{text}  ({self.note})" if self.note else text


@dataclasses.dataclass(frozen=True)
class Node:
    """A state, a part, a module, or a leaf.

    Two nodes are equal if all nodes below them are equal. Only the names of the two nodes may differ.
    """

    device: int  # bytes in device memory, on the fullest device
    host: int  # bytes in host memory that belong to the device with the most bytes in host memory
    disk: int  # bytes on disk that belong to the device with the most bytes on disk
    text: str = ""  # a leaf's type, shape and sharding, and why it is not sharded. Empty if the node is not a leaf
    children: tuple[tuple[str, Node], ...] = ()  # the names and nodes below this node

    def __getitem__(self, name: str) -> Node:
        return dict(self.children)[name]


class Line(NamedTuple):
    """One line of a report."""

    depth: int  # the indent; 0 for a part
    label: str  # the names of the nodes that share the line
    count: int  # the number of these nodes, which are equal: the line shows the bytes of one of them
    node: Node  # the first of these nodes


def build_tree(rows: Sequence[Row], depth: int = 0) -> Node:
    branches: dict[str, list[Row]] = {}
    totals: dict[str, Counter] = {place: Counter() for place in PLACES}
    text = ""
    for row in rows:
        totals[row.place].update(row.device_bytes)
        totals["device"].update(row.kept)
        if row.keys[depth:]:
            branches.setdefault(row.keys[depth], []).append(row)
        else:
            text = str(row)
    children = tuple((name, build_tree(below, depth + 1)) for name, below in branches.items())
    fullest = {place: max(total.values(), default=0) for place, total in totals.items()}
    return Node(**fullest, text=text, children=children)


def lines(node: Node, depth: int = 0) -> Iterator[Line]:
    """Return the lines below a node. Equal neighbours share a line, and an only child is on its parent's line."""
    for names, child in fold_equal(node.children):
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} alike"
        while len(child.children) == 1 and len(names) == 1:
            (name, child), *_ = child.children
            label = f"{label}/{name}"
        yield Line(depth, label, len(names), child)
        yield from lines(child, depth + 1)


def fold_equal(children: Sequence[tuple[str, Node]]) -> Iterator[tuple[list[str], Node]]:
    """Yield runs of equal children, such as layers, whose names differ only in a number that increases by 1."""
    first: dict[str, int] = {}
    for i, (name, _) in enumerate(children):
        first.setdefault(NUMBER.sub("#", name), i)

    def order(child: tuple[str, Node]) -> tuple[int, list[int]]:
        return first[NUMBER.sub("#", child[0])], [int(n) for n in NUMBER.findall(child[0])]

    # JAX sorts the keys of a dict as words: blocks_10 comes before blocks_2.
    ordered = sorted(children, key=order)
    for _, run in itertools.groupby(enumerate(ordered), key=lambda item: run_key(*item)):
        members = [child for _, child in run]
        yield [name for name, _ in members], members[0][1]


def run_key(index: int, child: tuple[str, Node]) -> tuple:
    """Return a key that all children of a run share: the name without its number, number minus index, and node."""
    name, node = child
    numbers = NUMBER.findall(name)
    return (NUMBER.sub("#", name), int(numbers[0]) - index, node) if len(numbers) == 1 else (name,)


def as_text(node: Node) -> str:
    all_lines = list(lines(node))
    places = ["device", *(place for place in OFFLOADED if getattr(node, place))]
    labels = ["  " * line.depth + line.label for line in all_lines]
    columns = [[size_text(line, place) for line in all_lines] for place in places]
    titles = ["bytes/device" if place == "device" else f"in {OFFLOADED[place]}" for place in places]
    widths = [max(map(len, (title, *column))) for title, column in zip(titles, columns, strict=True)]
    left = max(map(len, labels), default=0)
    rows = [(label, *cells, line.node.text) for label, *cells, line in zip(labels, *columns, all_lines, strict=True)]
    return "\n".join(
        "  ".join([label.ljust(left), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)), text]).rstrip()
        for label, *cells, text in [("", *titles, ""), *rows]
    )


def size_text(line: Line, place: str) -> str:
    size = getattr(line.node, place)
    if not size and (place != "device" or line.node.host or line.node.disk):
        return ""
    return f"{line.count} x {size:,d}" if line.count > 1 else f"{size:,d}"
