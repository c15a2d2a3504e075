"""Pictures, with matplotlib: what each stage needs, which device holds what, and when a step computes and sends."""

from __future__ import annotations

import functools
import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from zerojax.gpus.devices import Device
from zerojax.gpus.topology import Topology
from zerojax.inspect.report import name_of
from zerojax.inspect.timeline import Timeline, coarser, play
from zerojax.layout.chunked import Chunked, is_chunked
from zerojax.layout.padded import Padded, is_padded
from zerojax.planning.estimate import PARTS, Estimate, in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

COLORS = {"params": "#4477aa", "grads": "#ee9944", "master": "#99cc99", "opt_state": "#66aa77"}
NAMES = {"params": "parameters", "grads": "gradients", "master": "master weights", "opt_state": "optimizer state"}
WAITING = {"host": "in host memory", "disk": "on disk"}
WHOLE = "#bbbbbb"
MOST_LEAVES = 24
SCALAR = 8  # bytes
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
LANES = {"compute": "compute", "gather": "gather", "reduce-scatter": "reduce-scatter", "other": "other\ncollectives"}
WORK = {
    ("compute", "forward"): ("#4477aa", "matrix products, forward"),
    ("compute", "backward"): ("#1f3a5f", "matrix products, backward"),
    ("compute", "kernel"): ("#cccccc", "other kernels"),
    ("compute", "waiting"): ("#f4c7c3", "waiting for a collective"),
    ("gather", "hidden"): ("#ee9944", "gather, hidden"),
    ("reduce-scatter", "hidden"): ("#66aa77", "reduce-scatter, hidden"),
    ("other", "hidden"): ("#aa7799", "other, hidden"),
}
EXPOSED = ("#cc3311", "exposed: no product meanwhile")
PALE = 0.3
COLORS_SHOWN = 128  # a third of the bytes, of which a notebook stores every one
FINEST = 1 / 800  # of the width: what is shorter is drawn together with its neighbours


def memory(estimate: Estimate, *, capacity: float | None = None) -> Figure:
    """Bytes per device by stage, stacked by part; what waits elsewhere hatched behind.

    Args:
        estimate: Of one number of devices or of several; the first one is drawn.
        capacity: Bytes of a device's memory, drawn as a line.

    Returns:
        A figure that belongs to no window. A notebook shows it; `figure.savefig("memory.png")` writes it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, figure 1.
    """
    rows = [row for row in estimate.rows if row.devices == estimate.rows[0].devices]
    figure, axes = new_figure(height=1.4 + 0.55 * len(rows))
    unit, size = unit_of(max(row.total + row.host + row.disk for row in rows))
    base = [0.0] * len(rows)
    labels = [f"stage {row.stage}" for row in rows]
    for part in (*PARTS, *WAITING):
        sizes = [getattr(row, part) / size for row in rows]
        if not any(sizes):
            continue
        hatched = {"color": "white", "edgecolor": "#888888", "hatch": "///"}
        style: dict[str, Any] = {"color": COLORS[part]} if part in COLORS else hatched
        axes.barh(labels, sizes, 0.6, left=base, label=NAMES.get(part) or WAITING[part], **style)
        base = [b + size for b, size in zip(base, sizes, strict=True)]
    for i, (row, end) in enumerate(zip(rows, base, strict=True)):
        axes.annotate(in_words(row.total), (end, i), (4, 0), textcoords="offset points", va="center")
    if capacity is not None:
        axes.axvline(capacity / size, color="black", linestyle="--", label=f"a device's {in_words(capacity)}")
    axes.invert_yaxis()
    axes.set(xlabel=f"{unit} per device", xlim=(0, 1.15 * max(*base, (capacity or 0) / size)))
    axes.set_title(f"{estimate.parameters:,} parameters, devices: {rows[0].devices}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def holdings(state: Any) -> Figure:
    """Which device holds what: one bar a leaf, cut where the devices' parts begin.

    Of many leaves the largest are drawn; scalars are not.

    Args:
        state: A `ZeroState`, or any tree of arrays.

    Returns:
        A figure, as `memory` gives it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: is_padded(x) or is_chunked(x))[0]
    every = [held for path, x in leaves if (held := Held.of(path, x)) is not None and held.size > SCALAR]
    largest = sorted(every, key=lambda held: -held.size)[:MOST_LEAVES]
    found = [held for held in every if held in largest]
    devices = sorted({device for held in found for device, _, _ in held.parts})
    figure, axes = new_figure(height=1.4 + 0.28 * len(found))
    shade = devices_colors(len(devices))
    for i, held in enumerate(found):
        hatch: dict[str, Any] = {"hatch": "///", "edgecolor": "white"} if held.is_on_host else {}
        if held.whole:
            axes.barh(i, 1, 0.7, color=WHOLE, **hatch)
            ids = sorted(device for device, _, _ in held.parts)
            where = "every device" if ids == devices else f"device {', '.join(map(str, ids))}"
            axes.annotate(f"whole on {where}", (0.5, i), ha="center", va="center", fontsize="small")
            continue
        for device, start, stop in held.parts:
            # on several mesh axes some devices hold the same stretch, or differ along another dim: one above the other
            sharing = [other for other, *stretch in held.parts if stretch == [start, stop]]
            height = 0.7 / len(sharing)
            y = i - 0.35 + height * (sharing.index(device) + 0.5)
            axes.barh(y, stop - start, height, left=start, color=shade[devices.index(device)], **hatch)
    axes.set_yticks(range(len(found)), [held.name for held in found], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="share of the leaf, along the dim that is cut", xlim=(0, 1))
    for device in devices:
        axes.bar(0, 0, color=shade[devices.index(device)], label=f"device {device}")
    axes.set_title("Which device holds what" + "; hatched: waits elsewhere" * any(held.is_on_host for held in found))
    if devices:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def timeline(compiled: Any, *, topology: str | None = None) -> Figure:
    """When a compiled step computes and when it sends: a lane for kernels, lanes for collectives.

    Order and overlap are the program's own, durations those at the device's peak rates. Of a
    loop one turn is drawn. A collective is a bar as long as it moves, then a pale one until its
    result is needed; it is exposed if no matrix product executes from its start to its done.

    Args:
        compiled: A plan; or what `jax.jit(f).lower(...).compile()` gives, or its HLO text.
        topology: Whose rates to take, as `"h200:8"`. Default: the plan's, else that.

    Returns:
        A figure, as `memory` gives it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
        TypeError: If `compiled` is none of these.
        ValueError: If the topology is unknown, or the text is not scheduled HLO.
    """
    topology = str(topology or getattr(compiled, "topology", "h200:8"))
    text = getattr(compiled, "text", compiled)
    played = play(text if isinstance(text, str) else compiled, Device.of(Topology.parse(topology)))
    figure, axes = new_figure(height=3.6, width=10)
    labels = draw_timeline(axes, played)
    figure.suptitle(f"One step: {played.hidden_share:.0%} of the collective bytes hide behind matrix products")
    once = "; one turn of each loop" * bool(played.loops)
    axes.set_xlabel(f"{axes.get_xlabel()}, estimated at the peak rates of {topology}{once}")
    figure.legend(handles=labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def draw_timeline(axes: Axes, played: Timeline) -> list[Patch]:
    """Draw the lanes of one program, and its loops above them.

    Returns:
        What a legend shows.
    """
    from matplotlib.patches import Patch

    unit, scale = ("ms", 1e3) if played.seconds >= 1e-3 else ("µs", 1e6)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in played.spans)]
    used: dict[tuple[str, str], None] = {}
    for y, lane in enumerate(lanes):
        work = [span for span in played.spans if span.lane == lane]
        for kind in dict.fromkeys(span.kind for span in work if lane != "compute"):
            pale = [(scale * s.end, scale * (s.done - s.end)) for s in work if s.kind == kind]
            axes.broken_barh(pale, (y - 0.3, 0.6), color=color_of(lane, kind), alpha=PALE, linewidth=0)
        height, finest = (0.8, FINEST) if lane == "compute" else (0.6, 2 * FINEST)
        for bar in coarser(work, finest * played.seconds):
            used[lane, bar.kind] = None
            long = lane != "compute" and bar.end - bar.begin > 8 * FINEST * played.seconds
            style: dict[str, Any] = {"color": color_of(lane, bar.kind), "edgecolor": "white", "linewidth": 0.4 * long}
            axes.barh(y, scale * (bar.end - bar.begin), height, left=scale * bar.begin, **style)
    for loop in played.loops:
        y, begin, end = -0.55 - 0.45 * loop.depth, scale * loop.begin, scale * loop.end
        axes.plot([begin, begin, end, end], [y, y - 0.1, y - 0.1, y], color="black", linewidth=1)
        turns = "?" if loop.turns is None else loop.turns
        axes.text((begin + end) / 2, y - 0.15, f"× {turns} turns", ha="center", fontsize="small")
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes])
    axes.tick_params(axis="y", length=0)
    top = max((loop.depth + 1 for loop in played.loops), default=0)
    axes.set(xlabel=unit, xlim=(0, 1.005 * scale * played.seconds), ylim=(len(lanes) - 0.5, -0.5 - 0.5 * top))
    named = {WORK.get(key, EXPOSED) for key in used}
    shown = [Patch(color=color, label=label) for color, label in (*WORK.values(), EXPOSED) if (color, label) in named]
    return [*shown, Patch(color="black", alpha=PALE, linewidth=0, label="moved, not needed yet")]


def color_of(lane: str, kind: str) -> str:
    """The color of a kind of work."""
    return WORK.get((lane, kind), EXPOSED)[0]


class Held(NamedTuple):
    """Where one leaf lies.

    Attributes:
        name: Its path.
        size: In bytes, of one copy.
        parts: `(device, start, stop)` of each part, as shares of the dim that is cut.
        whole: Whether each of its devices holds all of it.
        waits: Whether it is outside the devices' memory.
    """

    name: str
    size: int
    parts: list[tuple[int, float, float]]
    whole: bool
    is_on_host: bool

    @classmethod
    def of(cls, path: tuple, x: Any) -> Held | None:
        """What a leaf's sharding says; None for one without elements, or that is no array."""
        array = x.storage if isinstance(x, Padded) else x
        if not isinstance(array, jax.Array | Chunked) or 0 in array.shape:
            return None
        shape = tuple(array.shape)
        where = array.sharding.addressable_devices_indices_map(shape)
        parts = []
        for device, index in where.items():
            chunkings = [(s.indices(n), n) for s, n in zip(index or (), shape, strict=True) if s != slice(None)]
            (start, stop, _), length = chunkings[0] if chunkings else ((0, 1, 1), 1)
            parts.append((device.id, start / length, stop / length))
        whole = all(part[1:] == (0, 1) for part in parts)
        is_on_host = isinstance(array, Chunked) or array.sharding.memory_kind not in (None, "device")
        name = name_of(path[0]) + jax.tree_util.keystr(path[1:]) if path else "array"
        return cls(name, array.dtype.itemsize * math.prod(shape), parts, whole, is_on_host)


def unit_of(size: float) -> tuple[str, float]:
    """The largest unit of which a size in bytes has one, and its bytes."""
    return next((name, unit) for name, unit in UNITS.items() if size >= unit or unit == 1)


def new_figure(*, height: float, width: float = 8) -> tuple[Figure, Axes]:
    """A figure that no window shows and no global state knows, so that nothing has to be closed."""
    figure = picture()(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


@functools.cache
def picture() -> type[Figure]:
    """The class of figures that a notebook shows by itself: of those of no window it prints a line of text."""
    from matplotlib.figure import Figure
    from PIL import Image

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            few = Image.open(data).convert("RGB").quantize(COLORS_SHOWN, Image.Quantize.MAXCOVERAGE)
            few.save(data := io.BytesIO(), "PNG", optimize=True)
            return data.getvalue()

    return Picture


def devices_colors(count: int) -> list:
    """One color a device, neighbours told apart."""
    import matplotlib

    return [matplotlib.colormaps["turbo"](0.08 + 0.84 * i / max(count - 1, 1)) for i in range(count)]
