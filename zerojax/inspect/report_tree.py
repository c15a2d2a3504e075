"""The tree of a report: parts, modules and leaves with their bytes, alike ones folded into one line."""

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
WAITS = {"host": "host memory", "disk": "files"}
NUMBER = re.compile(r"\d+")


class Leaf(NamedTuple):
    """One leaf on its way into a tree.

    Attributes:
        steps: Its path, from the part on.
        place: One of `PLACES`.
        held: Bytes there of each device.
        said: Type, shape, where it lies, and why it is not cut.
    """

    steps: tuple[str, ...]
    place: str
    held: Mapping[Any, int]
    said: str


@dataclasses.dataclass(frozen=True)
class Node:
    """A state, a part of it, a module in that, or a leaf.

    Two nodes are equal if everything below them is: their own names are not part of them.

    Attributes:
        device: Bytes in the memory of the device that has most of it.
        host: Bytes that wait in host memory, of the device that has most there.
        disk: As `host`, on disk.
        said: Of a leaf, its type, shape, where it lies, and why it is not cut; else empty.
        children: What it consists of, each with its name.
    """

    device: int
    host: int
    disk: int
    said: str = ""
    children: tuple[tuple[str, Node], ...] = ()

    def __getitem__(self, name: str) -> Node:
        """The child of a name.

        Raises:
            KeyError: If there is none.
        """
        return dict(self.children)[name]


class Line(NamedTuple):
    """One line of a report.

    Attributes:
        depth: How far it is indented; 0 for a part.
        label: Names of what it stands for.
        count: How many alike nodes it stands for; the bytes are those of one.
        node: The first of them.
    """

    depth: int
    label: str
    count: int
    node: Node


def grown(leaves: Iterable[Leaf]) -> Node:
    """The tree of some leaves."""
    branches: dict[str, list[Leaf]] = {}
    held: dict[str, Counter] = {place: Counter() for place in PLACES}
    said = ""
    for leaf in leaves:
        held[leaf.place].update(leaf.held)
        if leaf.steps:
            branches.setdefault(leaf.steps[0], []).append(leaf._replace(steps=leaf.steps[1:]))
        else:
            said = leaf.said
    children = tuple((name, grown(inside)) for name, inside in branches.items())
    sizes = {place: max(found.values(), default=0) for place, found in held.items()}
    return Node(**sizes, said=said, children=children)


def lines(node: Node, depth: int = 0) -> Iterator[Line]:
    """Everything below a node, alike neighbours as one line, and a lone child on the line of its parent."""
    for names, child in folded(node.children):
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}, {len(names)} alike"
        while len(child.children) == 1 and len(names) == 1:
            (name, child), *_ = child.children
            label = f"{label}/{name}"
        yield Line(depth, label, len(names), child)
        yield from lines(child, depth + 1)


def folded(children: Sequence[tuple[str, Node]]) -> Iterator[tuple[list[str], Node]]:
    """Runs of children that are alike and differ by one number in their names, counting up."""
    first: dict[str, int] = {}
    for i, (name, _) in enumerate(children):
        first.setdefault(NUMBER.sub("#", name), i)

    def order(child: tuple[str, Node]) -> tuple[int, list[int]]:
        return first[NUMBER.sub("#", child[0])], [int(n) for n in NUMBER.findall(child[0])]

    # JAX sorts the keys of a dict as words: blocks_10 stands before blocks_2
    ordered = sorted(children, key=order)
    for _, run in itertools.groupby(enumerate(ordered), key=lambda item: run_of(*item)):
        found = [child for _, child in run]
        yield [name for name, _ in found], found[0][1]


def run_of(place: int, child: tuple[str, Node]) -> tuple:
    """What children of one run have in common: the words of the name, what is below, and number less place."""
    name, node = child
    numbers = NUMBER.findall(name)
    return (NUMBER.sub("#", name), int(numbers[0]) - place, node) if len(numbers) == 1 else (name,)


def as_text(node: Node) -> str:
    """A table: the tree on the left, bytes by place, and what is said of each leaf."""
    found = list(lines(node))
    places = ["device", *(place for place in WAITS if getattr(node, place))]
    labels = ["  " * line.depth + line.label for line in found]
    columns = [[amount(line, place) for line in found] for place in places]
    titles = ["bytes/device" if place == "device" else f"in {WAITS[place]}" for place in places]
    widths = [max(map(len, (title, *column))) for title, column in zip(titles, columns, strict=True)]
    left = max(map(len, labels), default=0)
    rows = [(label, *cells, line.node.said) for label, *cells, line in zip(labels, *columns, found, strict=True)]
    return "\n".join(
        "  ".join([label.ljust(left), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)), said]).rstrip()
        for label, *cells, said in [("", *titles, ""), *rows]
    )


def amount(line: Line, place: str) -> str:
    """Bytes of a line in one place; nothing where all of it is elsewhere."""
    size = getattr(line.node, place)
    if not size and (place != "device" or line.node.host or line.node.disk):
        return ""
    return f"{line.count} x {size:,d}" if line.count > 1 else f"{size:,d}"


def as_rich(title: str, node: Node) -> Tree:
    """The same as a tree for rich's consoles."""
    from rich.text import Text
    from rich.tree import Tree

    branches = [Tree(Text(title))]
    for line in lines(node):
        del branches[line.depth + 1 :]
        text = Text(line.label, style="bold" if line.node.children else "")
        for place in PLACES:
            if size := amount(line, place):
                text.append(f"  {size} bytes" + (f" in {WAITS[place]}" if place in WAITS else ""), "cyan")
        if line.node.said:
            text.append(f"  {line.node.said}", "dim")
        branches.append(branches[line.depth].add(text))
    return branches[0]
