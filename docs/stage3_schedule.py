"""Draw stage 3's schedule before and after prefetching, read off two compiled programs.

    python docs/stage3_schedule.py                 writes docs/stage3_schedule.png; about a minute on two cores

Needs the extras `aot` and `examples`, no GPU. The order of the work, what overlaps what, the bytes
and the memory are the compiled program's own. The time axis is an estimate: the program is played
on two queues, one for kernels and one for collectives, each instruction taking as long as it
would at the device's peak rates (`zerojax.inspect.timeline`).
"""

import os
import pathlib
import re
import sys
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

import jax
import jax.numpy as jnp
import matplotlib
import optax
import yardstick
from jax.sharding import NamedSharding, PartitionSpec

from zerojax import Tuning, collectives, zero_shard
from zerojax.gpus.devices import Device, Topology, absent_mesh
from zerojax.inspect.hlo import Instruction, read
from zerojax.inspect.roofline import overlap
from zerojax.inspect.timeline import simulate

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

H200 = Device.of(Topology.parse("h200:8"))
COLOURS = {
    "forward": "#4c6a92",
    "recomputed": "#9db4d0",
    "backward": "#2f4460",
    "kernel": "#d5d8dc",
    "gather": "#e08a1e",
    "reduce-scatter": "#2a9d6f",
    "waiting": "#c0392b",
}
LANES, PALE = {"compute": 2.0, "gather": 1.0, "reduce-scatter": 0.3}, 0.25
# Few layers can be told apart; few rows, and waiting is wide enough to be seen; a small vocabulary, so
# that the embedding weighs beside 4 layers about what it does beside 24.
SMALL = {"layers": 4, "rows": 2, "vocabulary": 8192}


class Bar(NamedTuple):
    """A span of the timeline in milliseconds; its colour, and the layer of the model it belongs to as a label."""

    lane: str
    kind: str
    begin: float
    end: float
    done: float
    layer: str
    hidden: bool


class Compiled(NamedTuple):
    """A compiled program's text, the bytes of its temporary memory, and the elements of the sharded parameters."""

    text: str
    temporary: int
    sharded: int


def compiled(prefetch: int) -> Compiled:
    """The yardstick's gradient, unrolled, compiled for 8 absent H200s."""
    mesh = absent_mesh("h200:8")
    init, loss, (rows, length) = yardstick.build("gpu", scan=False, **SMALL)
    tx = zero_shard(optax.adamw(1e-4), stage=3, mesh=mesh, tuning=Tuning(prefetch=prefetch))
    shapes = jax.eval_shape(init, jax.random.key(0))
    batch = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((rows * mesh.size, length), jnp.int32, sharding=batch)
    program = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(shapes), tokens).compile()
    sharded = sum(leaf.size for leaf in tx.create(shapes).plan.grads if leaf.kind == "sharded")
    return Compiled(program.as_text(), program.memory_analysis().temp_size_in_bytes, sharded)


def bars(text: str) -> list[Bar]:
    """The timeline of a program on an H200, without the all-reduce of its loss."""
    module = read(text)
    entry = module.computations[module.entries[0]].by_name
    found = []
    for span in simulate(text, H200).spans:
        i = entry[span.name]
        stack, kind, moved = stack_of(i), span.kind, []
        if span.lane != "compute":
            # XLA may have combined the collectives of two layers, under the name of one: ask what feeds it.
            kind, moved = span.lane, [layer(entry[name].rest) for name in i.operands]
        elif kind == "backward" and "rematted" in stack:
            kind = "recomputed"
        label = ",".join(dict.fromkeys(filter(None, [*moved, layer(stack)])))
        times = [1e3 * time for time in (span.begin, span.end, span.done)]
        found.append(Bar(span.lane, kind, *times, label, span.kind != "exposed"))
    return [bar for bar in found if bar.lane in LANES]


def stack_of(i: Instruction) -> str:
    """The JAX operation that an instruction came from."""
    found = re.search(r'op_name="([^"]*)"', i.rest)
    return found.group(1) if found else ""


def layer(stack: str) -> str:
    """A short label of the layer that an operation's name speaks of."""
    found = re.search(r"block_(\d+)|Embed", stack)
    return "" if not found else found.group(1) or "E"


def draw(programs: dict[str, Compiled], out: pathlib.Path) -> None:
    """One panel a program, on one time axis."""
    plt.rcParams.update({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(len(programs), 1, figsize=(16, 9), dpi=100, sharex=True)
    for panel, (name, program) in zip(panels, programs.items(), strict=True):
        spans = bars(program.text)
        for span in spans:
            draw_bar(panel, span)
        marks(panel, spans)
        waiting = sum(s.end - s.begin for s in spans if s.kind == "waiting")
        figures = (
            f"{overlap(program.text).hidden_share:.0%} of collective bytes hidden",
            f"{collectives(program.text).moved('all-gather').elements / program.sharded:.2f} passes gathered",
            f"{program.temporary / 2**20:,.0f} MiB temporary",
            f"{waiting:.1f} of {max(s.end for s in spans):.1f} ms waiting",
        )
        panel.set_title(name, loc="left", fontsize=17, fontweight="bold", pad=26)
        panel.set_title("   ·   ".join(figures), loc="right", fontsize=14.5, pad=26)
        panel.set_yticks(list(LANES.values()), ["kernels", "all-gathers", "reduce-scatters"])
        panel.tick_params(axis="y", length=0)
        panel.set(xlim=(0, None), ylim=(-0.15, 2.75))
    rates = H200.rates["bf16"] / 1e12, H200.bandwidth / 1e12, H200.link / 1e9
    panels[-1].set_xlabel(
        "milliseconds, estimated: the compiled schedule simulated at peak rates ({:.0f} bf16 TFLOP/s, "
        "{:.1f} TB/s of memory, {:.0f} GB/s of link)".format(*rates)
    )
    names = {"forward": "matrix products, forward", "recomputed": "the same, recomputed", "backward": "backward"}
    names |= {"kernel": "kernels without products", "waiting": "waiting for a collective"}
    names |= {"gather": "all-gather", "reduce-scatter": "reduce-scatter"}
    handles: list[Patch] = [Patch(color=COLOURS[kind], label=label) for kind, label in names.items()]
    handles.append(Patch(color=COLOURS["gather"], alpha=PALE, linewidth=0, label="the rest of start to done"))
    handles.append(Patch(facecolor="white", edgecolor=COLOURS["waiting"], linewidth=2, label="no product meanwhile"))
    figure.legend(handles=handles, loc="upper center", ncols=5, frameon=False, fontsize=13)
    figure.tight_layout(rect=(0, 0, 1, 0.93), h_pad=2)
    figure.savefig(out)


def draw_bar(panel: Axes, span: Bar) -> None:
    """One instruction; of a collective also, pale, the time from its start to its done."""
    y, colour, collective = LANES[span.lane], COLOURS[span.kind], span.lane != "compute"
    style = {"height": 0.5 if collective else 0.75, "left": span.begin, "color": colour}
    if collective:
        panel.barh(y, max(span.done, span.end) - span.begin, alpha=PALE, **style)
    edge = {} if span.hidden else {"edgecolor": COLOURS["waiting"], "linewidth": 2}
    panel.barh(y, span.end - span.begin, **style, **edge)
    if collective and (width := span.end - span.begin) > 0.04:
        font = {"color": "white", "fontsize": 11 if width > 0.1 else 8.5, "fontweight": "bold"}
        panel.text(span.begin + width / 2, y, span.layer, ha="center", va="center", **font)


def marks(panel: Axes, spans: list[Bar]) -> None:
    """Where each layer's products begin, and where the backward pass does."""
    products = [s for s in spans if s.kind in ("forward", "recomputed", "backward") and s.layer]
    begins: dict = {}
    for span in products:
        begins.setdefault((span.layer, span.kind != "forward" and span.layer != "E"), span.begin)
    ends = [*list(begins.values())[1:], max(s.end for s in products)]
    for ((name, _), begin), end in zip(begins.items(), ends, strict=True):
        panel.plot([begin + 0.02, end - 0.02], [2.46, 2.46], color="#777777", linewidth=1.5)
        panel.text((begin + end) / 2, 2.5, "head" if name == "E" else f"layer {name}", ha="center", fontsize=12.5)
    backward = min(s.begin for s in products if s.kind == "backward")
    panel.axvline(backward, ymax=0.88, color="#333333", linewidth=1.2, linestyle=(0, (4, 3)))
    panel.text(backward - 0.04, -0.1, "forward", ha="right", va="bottom", style="italic")
    panel.text(backward + 0.04, -0.1, "backward", ha="left", va="bottom", style="italic")


if __name__ == "__main__":
    both = {f"{when}: prefetch={k}": compiled(k) for k, when in enumerate(("Before", "After"))}
    draw(both, pathlib.Path(__file__).with_suffix(".png"))
