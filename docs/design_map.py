"""Draw the rooms of zerojax and the imports between them, read off the source.

    python docs/design_map.py        writes docs/design_map.png

Needs the extra `plot`. A room is a folder of `zerojax/`, or a module directly in it. It stands one floor above the
highest room that it imports from.
"""

import ast
import functools
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "zerojax"
# Small modules that nearly every room imports; their lines would hide the others.
EVERYWHERE = {"version", "compat", "units", "jaxprs", "__init__", "__main__"}


def imports() -> dict[str, Counter]:
    """Count the imports of each room from each other room."""
    found: dict[str, Counter] = {}
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        counts = found.setdefault(room, Counter())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "zerojax":
                inner = node.module.split(".")[1:]
                counts.update([inner[0]] if inner else [alias.name for alias in node.names])
        del counts[room]
    return {
        room: Counter({k: v for k, v in counts.items() if (ROOT / k).is_dir() or (ROOT / f"{k}.py").exists()})
        for room, counts in found.items()
    }


def floors(edges: dict[str, Counter]) -> dict[str, int]:
    """Return the floor of each room, from 0."""

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in edges[room]), default=-1)

    return {room: floor(room) for room in edges}


def lines_of(room: str) -> int:
    """Count the lines of a room's source."""
    paths = (ROOT / room).rglob("*.py") if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]
    return sum(len(path.read_text().splitlines()) for path in paths)


def draw(path: Path) -> None:
    """Draw the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    edges = {
        room: Counter({k: v for k, v in counts.items() if k not in EVERYWHERE})
        for room, counts in imports().items()
        if room not in EVERYWHERE
    }
    level = floors(edges)
    used = sorted(set(level.values()))
    rows = {floor: sorted(room for room in edges if level[room] == floor) for floor in used}
    place = {}
    for y, floor in enumerate(used):
        row = rows[floor]
        for i, room in enumerate(row):
            place[room] = ((i + 1) / (len(row) + 1) * 10, y)
    fig, ax = plt.subplots(figsize=(10, 0.85 * len(used) + 0.6))
    for room, counts in edges.items():
        for other, count in counts.items():
            (x0, y0), (x1, y1) = place[room], place[other]
            ax.plot(
                [x0, x1], [y0 - 0.2, y1 + 0.2], color="#4c72b0", alpha=0.25, lw=0.4 + 0.15 * min(count, 20), zorder=1
            )
    for room, (x, y) in place.items():
        kind = "/" if (ROOT / room).is_dir() else ".py"
        box = {"boxstyle": "round,pad=0.35", "fc": "white" if kind == ".py" else "#e8eef7", "ec": "#4c72b0"}
        ax.text(
            x, y, f"{room}{kind}\n{lines_of(room):,} lines", ha="center", va="center", fontsize=8, bbox=box, zorder=2
        )
    ax.set(xlim=(0, 10), ylim=(-0.5, len(used) - 0.4))
    ax.axis("off")
    fig.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
