"""Pictures of estimates and states, with matplotlib: what each stage needs, and which device holds what."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .layout.chunked import Chunked, is_chunked
from .layout.padded import Padded, is_padded
from .memory.report import name_of
from .planning.estimate import PARTS, Estimate, in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"params": "#4477aa", "grads": "#ee9944", "master": "#99cc99", "opt_state": "#66aa77"}
NAMES = {"params": "parameters", "grads": "gradients", "master": "master weights", "opt_state": "optimizer state"}
WAITING = {"host": "in host memory", "disk": "on disk"}
WHOLE = "#bbbbbb"
MOST_LEAVES = 24


def memory(estimate: Estimate) -> Figure:
    """Bytes per device by stage, stacked by part; what waits elsewhere hatched behind.

    Args:
        estimate: Of one number of devices or of several; the first one is drawn.

    Returns:
        A figure that belongs to no window; `figure.savefig("memory.png")` writes it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.

    References:
        Rajbhandari et al. 2020, arXiv 1910.02054, figure 1.
    """
    rows = [row for row in estimate.rows if row.devices == estimate.rows[0].devices]
    figure, axes = new_figure(height=1.4 + 0.55 * len(rows))
    base = [0.0] * len(rows)
    labels = [f"stage {row.stage}" for row in rows]
    for part in (*PARTS, *WAITING):
        sizes = [getattr(row, part) / 1e9 for row in rows]
        if not any(sizes):
            continue
        hatched = {"color": "white", "edgecolor": "#888888", "hatch": "///"}
        style: dict[str, Any] = {"color": COLORS[part]} if part in COLORS else hatched
        axes.barh(labels, sizes, 0.6, left=base, label=NAMES.get(part) or WAITING[part], **style)
        base = [b + size for b, size in zip(base, sizes, strict=True)]
    for i, (row, end) in enumerate(zip(rows, base, strict=True)):
        axes.annotate(in_words(row.total), (end, i), (4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="GB per device", xlim=(0, 1.15 * max(base)))
    axes.set_title(f"{estimate.parameters:,} parameters, devices: {rows[0].devices}")
    axes.legend(frameon=False, loc="lower right")
    return figure


def holdings(state: Any) -> Figure:
    """Which device holds what: one bar a leaf, cut where the devices' parts begin, the largest leaves first.

    Args:
        state: A `ZeroState`, or any tree of arrays.

    Returns:
        A figure, as `memory` gives it.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: is_padded(x) or is_chunked(x))[0]
    found = [held for path, x in leaves if (held := Held.of(path, x)) is not None]
    found = sorted(found, key=lambda held: -held.size)[:MOST_LEAVES]
    devices = sorted({device for held in found for device, _, _ in held.parts})
    figure, axes = new_figure(height=1.4 + 0.28 * len(found))
    shade = devices_colors(len(devices))
    for i, held in enumerate(found):
        hatch: dict[str, Any] = {"hatch": "///", "edgecolor": "white"} if held.waits else {}
        if held.whole:
            axes.barh(i, 1, 0.7, color=WHOLE, **hatch)
            axes.annotate("whole on every device", (0.5, i), ha="center", va="center", fontsize="small")
            continue
        for device, start, stop in held.parts:
            axes.barh(i, stop - start, 0.7, left=start, color=shade[devices.index(device)], **hatch)
    axes.set_yticks(range(len(found)), [held.name for held in found], fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="share of the leaf, along the dim that is cut", xlim=(0, 1))
    for device in devices:
        axes.bar(0, 0, color=shade[devices.index(device)], label=f"device {device}")
    axes.set_title("Which device holds what" + "; hatched: waits elsewhere" * any(held.waits for held in found))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


class Held(NamedTuple):
    """Where one leaf lies.

    Attributes:
        name: Its path.
        size: In bytes, of one copy.
        parts: `(device, start, stop)` of each part, as shares of the dim that is cut.
        whole: Whether every device holds all of it.
        waits: Whether it is outside the devices' memory.
    """

    name: str
    size: int
    parts: list[tuple[int, float, float]]
    whole: bool
    waits: bool

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
            cuts = [(s.indices(n), n) for s, n in zip(index or (), shape, strict=True) if s != slice(None)]
            (start, stop, _), length = cuts[0] if cuts else ((0, 1, 1), 1)
            parts.append((device.id, start / length, stop / length))
        whole = all(part[1:] == (0, 1) for part in parts)
        waits = isinstance(array, Chunked) or array.sharding.memory_kind not in (None, "device")
        name = name_of(path[0]) + jax.tree_util.keystr(path[1:]) if path else "array"
        return cls(name, array.dtype.itemsize * math.prod(shape), parts, whole, waits)


def new_figure(*, height: float) -> tuple[Figure, Axes]:
    """A figure that no window shows and no global state knows, so that nothing has to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def devices_colors(count: int) -> list:
    """One color a device, neighbours told apart."""
    import matplotlib

    return [matplotlib.colormaps["turbo"](0.08 + 0.84 * i / max(count - 1, 1)) for i in range(count)]
