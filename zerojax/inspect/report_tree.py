"""The tree of a report: parts, modules and leaves with their bytes, equal siblings folded into one line."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.tree import Tree

PLACES = ("device", "host", "disk")
OFFLOADED = {"host": "host memory", "disk": "files"}
NUMBER = re.compile(r"\d+")


class Entry(NamedTuple):
    """One leaf to put into a tree.

    Attributes:
        keys: Its path, from the part on.
        place: One of `PLACES`.
        device_bytes: Bytes there, for each device.
        text: Type, shape and sharding, and why it is not sharded.
    """

    keys: tuple[str, ...]
    place: str
    device_bytes: Mapping[Any, int]
    text: str


@dataclasses.dataclass(frozen=True)
class Node:
    """A state, a part of it, a module in that, or a leaf.

    Two nodes are equal if everything below them is: their own names are not compared.

    Attributes:
        device: Bytes in device memory, on the fullest device.
        host: Bytes offloaded to host memory, of the device that has most there.
        disk: As `host`, on disk.
        text: Of a leaf, its type, shape and sharding, and why it is not sharded; else empty.
        children: Names and nodes below.
    """

    device: int
    host: int
    disk: int
    text: str = ""
    children: tuple[tuple[str, Node], ...] = ()

    def __getitem__(self, name: str) -> Node:
        """Return the child of a name.

        Raises:
            KeyError: If there is none.
        """
        return dict(self.children)[name]


class Line(NamedTuple):
    """One line of a report.

    Attributes:
        depth: Its indent; 0 for a part.
        label: Names of its nodes.
        count: How many equal nodes it is for; the bytes are those of one.
        node: The first of them.
    """

    depth: int
    label: str
    count: int
    node: Node


def build_tree(entries: Iterable[Entry]) -> Node:
    """Build the tree of some leaves."""
    branches: dict[str, list[Entry]] = {}
    totals: dict[str, Counter] = {place: Counter() for place in PLACES}
    text = ""
    for entry in entries:
        totals[entry.place].update(entry.device_bytes)
        if entry.keys:
            branches.setdefault(entry.keys[0], []).append(entry._replace(keys=entry.keys[1:]))
        else:
            text = entry.text
    children = tuple((name, build_tree(below)) for name, below in branches.items())
    fullest = {place: max(total.values(), default=0) for place, total in totals.items()}
    return Node(**fullest, text=text, children=children)


def lines(node: Node, depth: int = 0) -> Iterator[Line]:
    """Return everything below a node: equal neighbours on one line, an only child on its parent's line."""
    for names, child in fold_equal(node.children):
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} alike"
        while len(child.children) == 1 and len(names) == 1:
            (name, child), *_ = child.children
            label = f"{label}/{name}"
        yield Line(depth, label, len(names), child)
        yield from lines(child, depth + 1)


def fold_equal(children: Sequence[tuple[str, Node]]) -> Iterator[tuple[list[str], Node]]:
    """Return runs of equal children whose names differ by one number, counting up."""
    first: dict[str, int] = {}
    for i, (name, _) in enumerate(children):
        first.setdefault(NUMBER.sub("#", name), i)

    def order(child: tuple[str, Node]) -> tuple[int, list[int]]:
        return first[NUMBER.sub("#", child[0])], [int(n) for n in NUMBER.findall(child[0])]

    # JAX sorts the keys of a dict as words, blocks_10 before blocks_2.
    ordered = sorted(children, key=order)
    for _, run in itertools.groupby(enumerate(ordered), key=lambda item: run_key(*item)):
        members = [child for _, child in run]
        yield [name for name, _ in members], members[0][1]


def run_key(index: int, child: tuple[str, Node]) -> tuple:
    """Return a key that children of one run share: name without number, node, and number minus index."""
    name, node = child
    numbers = NUMBER.findall(name)
    return (NUMBER.sub("#", name), int(numbers[0]) - index, node) if len(numbers) == 1 else (name,)


def as_text(node: Node) -> str:
    """Return a table: the tree on the left, bytes by place, and the text of each leaf."""
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
    """Return bytes of a line in one place; empty if all of them are elsewhere."""
    size = getattr(line.node, place)
    if not size and (place != "device" or line.node.host or line.node.disk):
        return ""
    return f"{line.count} x {size:,d}" if line.count > 1 else f"{size:,d}"


def as_rich(title: str, node: Node) -> Tree:
    """Return the same as a tree for rich's consoles."""
    from rich.text import Text
    from rich.tree import Tree

    branches = [Tree(Text(title))]
    for line in lines(node):
        del branches[line.depth + 1 :]
        text = Text(line.label, style="bold" if line.node.children else "")
        for place in PLACES:
            if size := size_text(line, place):
                text.append(f"  {size} bytes" + (f" in {OFFLOADED[place]}" if place in OFFLOADED else ""), "cyan")
        if line.node.text:
            text.append(f"  {line.node.text}", "dim")
        branches.append(branches[line.depth].add(text))
    return branches[0]
