"""Draw memory, shards, the timeline of a step, and plans with different activations, with matplotlib.

Every function returns a figure without a window. A notebook shows it, and `figure.savefig("memory.png")` writes it to a
file.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from zerojax.gpus.devices import Device, Topology
from zerojax.inspect.hlo import read
from zerojax.inspect.report import key_in_words
from zerojax.inspect.roofline import overlap
from zerojax.inspect.timeline import Span, Timeline, simulate
from zerojax.layout.padded import Padded
from zerojax.offload.chunked import Chunked
from zerojax.placement.storage import is_stored_node
from zerojax.planning.compiled_plan import Plan
from zerojax.planning.estimate import Estimate
from zerojax.units import byte_unit, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

COLORS = {"params": "#4477aa", "grads": "#ee9944", "master": "#99cc99", "opt_state": "#66aa77"}
NAMES = {"params": "parameters", "grads": "gradients", "master": "master weights", "opt_state": "optimizer state"}
OFFLOADED = {"host": "in host memory", "disk": "on disk"}
REPLICATED = "#bbbbbb"
MOST_LEAVES = 24
SCALAR = 8  # a leaf of at most this many bytes counts as a scalar
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
EXPOSED = ("#cc3311", "exposed: hidden by no product")
PALE = 0.3
COLORS_SHOWN = 128  # fewer colors reduce the PNGs in a notebook to a third of their size
SHORTEST = 1 / 800  # a share of the picture's width; shorter spans are merged with neighbouring spans


def memory(estimate: Estimate, *, capacity: float | None = None) -> Figure:
    """Draw bytes per device by stage, stacked by part. Offloaded parts are hatched.

    Args:
        estimate: The result of `estimate`. If it has several numbers of devices, only the first is drawn.
        capacity: Bytes of a device's memory, drawn as a line.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, figure 1.
    """
    rows = [row for row in estimate.rows if row.devices == estimate.rows[0].devices]
    figure, axes = new_figure(height=1.4 + 0.55 * len(rows))
    unit, size = byte_unit(max(row.total + row.host + row.disk for row in rows))
    base = [0.0] * len(rows)
    labels = [f"stage {row.stage}" for row in rows]
    for part in (*COLORS, *OFFLOADED):
        sizes = [getattr(row, part) / size for row in rows]
        if not any(sizes):
            continue
        hatched = {"color": "white", "edgecolor": "#888888", "hatch": "///"}
        style: dict[str, Any] = {"color": COLORS[part]} if part in COLORS else hatched
        axes.barh(labels, sizes, 0.6, left=base, label=NAMES.get(part) or OFFLOADED[part], **style)
        base = [b + size for b, size in zip(base, sizes, strict=True)]
    for i, (row, end) in enumerate(zip(rows, base, strict=True)):
        axes.annotate(format_bytes(row.total), (end, i), (4, 0), textcoords="offset points", va="center")
    if capacity is not None:
        axes.axvline(capacity / size, color="black", linestyle="--", label=f"a device's {format_bytes(capacity)}")
    axes.invert_yaxis()
    axes.set(xlabel=f"{unit} per device", xlim=(0, 1.15 * max(*base, (capacity or 0) / size)))
    axes.set_title(f"{estimate.parameters:,} parameters, devices: {rows[0].devices}")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def frontier(plans: Sequence[Plan], *, policies: Mapping[str, Plan] = MappingProxyType({})) -> Figure:
    """Draw the least time of a step against its peak memory, for plans that save more or fewer activations.

    Args:
        plans: Plans of one step with different limits `memory=`. A line connects them by their memory.
        policies: Plans with policies of `jax.checkpoint` instead of a limit, by name.
    """
    every = [*plans, *policies.values()]
    (unit, size), longest = byte_unit(max(plan.peak for plan in every)), max(plan.seconds for plan in every)
    time, second = ("ms", 1e-3) if longest < 1 else ("s", 1.0)
    at = lambda plan: (plan.peak / size, plan.seconds / second)
    figure, axes = new_figure(height=4.2)
    if plans:
        line = sorted(map(at, plans))
        axes.plot(*zip(*line, strict=True), "o-", color=COLORS["params"], label="zerojax, memory=")
    for (name, plan), marker in zip(policies.items(), itertools.cycle("sD^vP")):
        axes.plot(*at(plan), marker, color=COLORS["grads"], markersize=8, label=name)
    axes.set(xlabel=f"peak memory, {unit} per device", ylabel=f"least time of a step, {time}")
    axes.margins(0.08)
    axes.set_title(f"Memory against time on {every[0].topology}: down and left is better")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def shards(state: Any) -> Figure:
    """Draw which shards each device has, with one bar per leaf, along the leaf's first sharded dim.

    Only the largest leaves are drawn, and no scalars. This is `jax.debug.visualize_array_sharding` for a whole state.

    Args:
        state: A `ZeroState`, or any tree of arrays.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_stored_node)[0]
    every = [leaf for path, x in leaves if (leaf := LeafShards.of(path, x)) is not None and leaf.size > SCALAR]
    largest = sorted(every, key=lambda leaf: -leaf.size)[:MOST_LEAVES]
    drawn = [leaf for leaf in every if leaf in largest]
    devices = sorted({device for leaf in drawn for device, _, _ in leaf.shards})
    figure, axes = new_figure(height=1.4 + 0.28 * len(drawn))
    colors = device_colors(len(devices))
    for i, leaf in enumerate(drawn):
        hatch: dict[str, Any] = {"hatch": "///", "edgecolor": "white"} if leaf.is_offloaded else {}
        if leaf.is_replicated:
            axes.barh(i, 1, 0.7, color=REPLICATED, **hatch)
            ids = sorted(device for device, _, _ in leaf.shards)
            text = "replicated" if ids == devices else f"on device {', '.join(map(str, ids))}"
            axes.annotate(text, (0.5, i), ha="center", va="center", fontsize="small")
            continue
        for device, start, stop in leaf.shards:
            # Devices with the same range (replicas, or shards of another dim) are drawn one above the other.
            same_range = [other for other, *extent in leaf.shards if extent == [start, stop]]
            height = 0.7 / len(same_range)
            y = i - 0.35 + height * (same_range.index(device) + 0.5)
            axes.barh(y, stop - start, height, left=start, color=colors[devices.index(device)], **hatch)
    axes.set_yticks(range(len(drawn)), [leaf.name for leaf in drawn], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="share of the leaf, along the sharded dim", xlim=(0, 1))
    for device in devices:
        axes.bar(0, 0, color=colors[devices.index(device)], label=f"device {device}")
    axes.set_title("Shards by device" + "; hatched: offloaded" * any(leaf.is_offloaded for leaf in drawn))
    if devices:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def timeline(compiled: Any, *, topology: str | None = None) -> Figure:
    """Draw when a compiled step computes and communicates, in one lane for kernels and several for collectives.

    Order and overlap come from the program, and durations are estimated from the device's peak rates. One iteration of
    each loop is drawn. A collective is drawn as a bar until it is complete, and as a pale bar until its result is used.
    It is exposed if no matrix product runs between its start and its done.

    Args:
        compiled: A plan, the result of `jax.jit(f).lower(...).compile()`, or its HLO text.
        topology: The GPUs whose rates are used. Default: the plan's topology, otherwise `"h200:8"`.
    """
    topology = str(topology or getattr(compiled, "topology", "h200:8"))
    text = getattr(compiled, "text", compiled)
    from matplotlib.patches import Patch

    module = read(text if isinstance(text, str) else compiled)
    simulated, hidden = simulate(module, Device.of(Topology.parse(topology))), overlap(module).hidden_share
    figure, axes = new_figure(height=3.6, width=10)
    labels = draw_timeline(axes, simulated)
    figure.suptitle(f"One step: {hidden:.0%} of the collective bytes hide behind matrix products")
    of_gpus = hasattr(compiled, "topology")  # a plan
    if not hidden and not of_gpus and any(span.lane != "compute" for span in simulated.spans):
        labels.append(Patch(color="none", label="nothing overlaps, as in all programs for CPUs"))
    once = "; one iteration of each loop" * bool(simulated.loops)
    axes.set_xlabel(f"{axes.get_xlabel()}, estimated at the peak rates of {topology}{once}")
    figure.legend(handles=labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def draw_timeline(axes: Axes, simulated: Timeline) -> list[Patch]:
    """Draw the lanes of one program, and the program's loops above the lanes. Return handles for a legend."""
    from matplotlib.patches import Patch

    unit, scale = ("ms", 1e3) if simulated.seconds >= 1e-3 else ("µs", 1e6)
    lanes = [lane for lane in LANES if any(span.lane == lane for span in simulated.spans)]
    used: dict[tuple[str, str], None] = {}
    for y, lane in enumerate(lanes):
        spans = [span for span in simulated.spans if span.lane == lane]
        for kind in dict.fromkeys(span.kind for span in spans if lane != "compute"):
            pale = [(scale * s.end, scale * (s.done - s.end)) for s in spans if s.kind == kind]
            axes.broken_barh(pale, (y - 0.3, 0.6), color=color_of(lane, kind), alpha=PALE, linewidth=0)
        height, shortest = (0.8, SHORTEST) if lane == "compute" else (0.6, 2 * SHORTEST)
        for bar in merge_short(spans, shortest * simulated.seconds):
            used[lane, bar.kind] = None
            is_edged = lane != "compute" and bar.end - bar.begin > 8 * SHORTEST * simulated.seconds
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4 * is_edged}
            left, length = scale * bar.begin, scale * (bar.end - bar.begin)
            axes.barh(y, length, height, left=left, color=color_of(lane, bar.kind), **edge)
    around = lambda loop: sum(one.begin <= loop.begin and loop.end <= one.end for one in simulated.loops) - 1
    for loop in simulated.loops:
        y, begin, end = -0.55 - 0.45 * around(loop), scale * loop.begin, scale * loop.end
        axes.plot([begin, begin, end, end], [y, y - 0.1, y - 0.1, y], color="black", linewidth=1)
        count = "?" if loop.trip_count is None else loop.trip_count
        is_wide = end - begin > 0.065 * scale * simulated.seconds  # the names of two short loops would overlap
        label = f"× {count}{' iterations' * is_wide}"
        axes.text((begin + end) / 2, y - 0.15, label, ha="center", fontsize="small")
    axes.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes])
    axes.tick_params(axis="y", length=0)
    top = max((around(loop) + 1 for loop in simulated.loops), default=0)
    axes.set(xlabel=unit, xlim=(0, 1.005 * scale * simulated.seconds), ylim=(len(lanes) - 0.5, -0.5 - 0.5 * top))
    named = {WORK.get(key, EXPOSED) for key in used}
    handles = [Patch(color=color, label=label) for color, label in (*WORK.values(), EXPOSED) if (color, label) in named]
    return [*handles, Patch(color="black", alpha=PALE, linewidth=0, label="complete, not taken yet")]


def merge_short(spans: Iterable[Span], shortest: float) -> list[Span]:
    """Merge each span that is too short to draw with the short spans after it. All `spans` are in one lane.

    All returned spans take at least `shortest` seconds. A merged span has the kind that takes most of its time.
    """
    merged, group = [], list[Span]()
    for span in [*spans, None]:
        is_long = span is not None and span.end - span.begin >= shortest
        ends_group = span is None or is_long or (group and span.begin - group[-1].end >= shortest)
        if group and (ends_group or group[-1].end - group[0].begin >= shortest):
            times: dict[str, float] = {}
            for short in group:
                times[short.kind] = times.get(short.kind, 0.0) + short.end - short.begin
            end, kind = max(group[-1].end, group[0].begin + shortest), max(times, key=times.__getitem__)
            merged.append(dataclasses.replace(group[0], kind=kind, end=end, done=max(end, group[-1].done)))
            group = []
        if span is not None:
            (merged if is_long else group).append(span)
    return merged


def color_of(lane: str, kind: str) -> str:
    return WORK.get((lane, kind), EXPOSED)[0]


class LeafShards(NamedTuple):
    """The shards of one leaf."""

    name: str  # the leaf's path
    size: int  # bytes of the global array
    shards: list[tuple[int, float, float]]  # per shard: the device, and start and stop as shares of the sharded dim
    is_replicated: bool  # whether every device of the leaf has the whole leaf
    is_offloaded: bool  # whether the leaf is outside the devices' memory

    @classmethod
    def of(cls, path: tuple, x: Any) -> LeafShards | None:
        """Read a leaf's sharding. Return None if the leaf is not an array, or has no elements."""
        array = x.storage if isinstance(x, Padded) else x
        if not isinstance(array, jax.Array | Chunked) or 0 in array.shape:
            return None
        shape = tuple(array.shape)
        shards = []
        for device, index in array.sharding.addressable_devices_indices_map(shape).items():
            extents = [(s.indices(n), n) for s, n in zip(index or (), shape, strict=True) if s != slice(None)]
            (start, stop, _), length = extents[0] if extents else ((0, 1, 1), 1)
            shards.append((device.id, start / length, stop / length))
        is_replicated = all(extent == [0, 1] for _, *extent in shards)
        is_offloaded = isinstance(array, Chunked) or array.sharding.memory_kind not in (None, "device")
        name = key_in_words(path[0]) + jax.tree_util.keystr(path[1:]) if path else "array"
        return cls(name, array.dtype.itemsize * math.prod(shape), shards, is_replicated, is_offloaded)


def new_figure(*, height: float, width: float = 8) -> tuple[Figure, Axes]:
    """Return a figure that is made without pyplot, so that it has no window and need not be closed."""
    figure = notebook_figure()(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


@functools.cache
def notebook_figure() -> type[Figure]:
    """Return a class of figures that are made without pyplot, and that a notebook shows nevertheless."""
    from matplotlib.figure import Figure
    from PIL import Image

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            data = io.BytesIO()
            self.savefig(data, format="png")
            reduced = Image.open(data).convert("RGB").quantize(COLORS_SHOWN, Image.Quantize.MAXCOVERAGE)
            reduced.save(data := io.BytesIO(), "PNG", optimize=True)
            return data.getvalue()

    return Picture


def device_colors(count: int) -> list:
    import matplotlib

    return [matplotlib.colormaps["turbo"](0.08 + 0.84 * i / max(count - 1, 1)) for i in range(count)]
