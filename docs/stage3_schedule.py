"""Draw stage 3's schedule before and after prefetching, read off two compiled programs.

    python docs/stage3_schedule.py                 writes docs/stage3_schedule.png; about a minute on two cores

Needs the extras `aot` and `examples`, no GPU. The order of the work, what overlaps what, the bytes
and the memory are the compiled program's own. The time axis is an estimate: the program is played
on two queues, one for kernels and one for collectives, each piece of work taking as long as it
would at the device's peak rates.
"""

import dataclasses
import math
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

from zerojax import collectives, zero_shard
from zerojax.planning.hlo import Array
from zerojax.planning.overlap import overlap
from zerojax.planning.program import Computation, Instruction, Module, read
from zerojax.planning.topology import absent_mesh

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

# An H200's peak rates: bfloat16 products, device memory, and NVLink in one direction.
FLOPS, MEMORY, LINK = 989e12, 4.8e12, 450e9
COLOURS = {
    "forward": "#4c6a92",
    "recomputed": "#9db4d0",
    "backward": "#2f4460",
    "other": "#d5d8dc",
    "all-gather": "#e08a1e",
    "reduce-scatter": "#2a9d6f",
    "waiting": "#c0392b",
}
FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
LANES, PALE = {"kernels": 2.0, "all-gather": 1.0, "reduce-scatter": 0.3}, 0.25
# Few layers can be told apart; few rows, and waiting is wide enough to be seen; a small vocabulary, so
# that the embedding weighs beside 4 layers about what it does beside 24.
SMALL = {"layers": 4, "rows": 2, "vocabulary": 8192}


@dataclasses.dataclass
class Span:
    """One piece of work: which lane it is drawn in, its colour, and its milliseconds.

    Attributes:
        layer: Which layer of the model it belongs to, as a label.
        done: Of a collective, when its done is reached: until then it may fly.
        hidden: Of a collective, whether a matrix product executes between its start and its done.
    """

    lane: str
    kind: str
    begin: float
    end: float
    layer: str = ""
    done: float = 0.0
    hidden: bool = True


class Compiled(NamedTuple):
    """A compiled program's text, the bytes of its temporary memory, and the elements of the cut parameters."""

    text: str
    temporary: int
    cut: int


def compiled(prefetch: int) -> Compiled:
    """The yardstick's gradient, unrolled, compiled for 8 absent H200s."""
    mesh = absent_mesh("h200:8")
    init, loss, (rows, length) = yardstick.build("gpu", scan=False, **SMALL)
    tx = zero_shard(optax.adamw(1e-4), stage=3, mesh=mesh, prefetch=prefetch)
    shapes = jax.eval_shape(init, jax.random.key(0))
    batch = NamedSharding(mesh, PartitionSpec("data"))
    tokens = jax.ShapeDtypeStruct((rows * mesh.size, length), jnp.int32, sharding=batch)
    program = jax.jit(tx.value_and_grad(loss)).lower(tx.shard(shapes), tokens).compile()
    cut = sum(leaf.size for leaf in tx.create(shapes).plan.parts if leaf.kind == "cut")
    return Compiled(program.as_text(), program.memory_analysis().temp_size_in_bytes, cut)


def play(text: str) -> list[Span]:
    """Run a program on two queues, one for kernels and one for collectives."""
    module = read(text)
    flights = {f.collective.name: f for f in overlap(text).flights}
    entry = module.computations[module.entries[0]]
    spans: list[Span] = []
    flying: dict[str, Span] = {}
    now = link = 0.0
    for i in entry.instructions:
        if (flight := flights.get(i.name)) is not None:
            begin, took = max(now, link), 1e3 * flight.collective.sent / LINK
            lane = "all-gather" if flight.collective.kind == "all-gather" else "reduce-scatter"
            # XLA may have combined the collectives of two layers, under the name of one: ask what feeds it.
            feeding = [layer(entry.by_name[name].rest) for name in i.operands]
            label = ",".join(dict.fromkeys(filter(None, [*feeding, layer(flight.collective.op_name)])))
            span = Span(lane, lane, begin, begin + took, label, hidden=flight.products > 0)
            flying[i.name], link = span, span.end
            spans.append(span)
            if not i.synchronous:
                continue
        if (span := flying.pop(i.operands[0] if i.opcode.endswith("-done") else i.name, None)) is not None:
            if span.end > now:
                spans.append(Span("kernels", "waiting", now, span.end))
            span.done = now = max(now, span.end)
        elif i.opcode not in FREE:
            spans.append(kernel(module, entry, i, now))
            now = spans[-1].end
    return spans


def layer(stack: str) -> str:
    """A short label of the layer that an operation's name speaks of."""
    found = re.search(r"block_(\d+)|Embed", stack)
    return "" if not found else found.group(1) or "E"


def kernel(module: Module, entry: Computation, i: Instruction, now: float) -> Span:
    """A kernel, as long as its products or its memory traffic take at peak rates, whichever is longer."""
    inner = [module.computations[c.callee] for c in module.calls[entry.name] if c.instruction is i]
    flops = sum(dot_flops(c, j) for c in [entry._replace(instructions=[i]), *inner] for j in c.instructions)
    inputs = [read_bytes(c, j) for c in inner for j in c.instructions if j.opcode == "parameter"]
    traffic = size(i.shape) + sum(inputs or [size(entry.by_name[name].shape) for name in i.operands])
    found = re.search(r'op_name="([^"]*)"', i.rest)
    stack = found.group(1) if found else ""
    kind = "recomputed" if "rematted" in stack else "backward" if "transpose(" in stack else "forward"
    took = 1e3 * max(flops / FLOPS, traffic / MEMORY)
    return Span("kernels", kind if flops else "other", now, now + took, layer(stack))


def read_bytes(c: Computation, parameter: Instruction) -> int:
    """Bytes that a fusion reads of one parameter: where it only slices it, those of the slices."""
    names, users = {parameter.name}, []
    for i in c.instructions:
        if names.intersection(i.operands):
            names.update([i.name] if i.opcode == "bitcast" else [])
            users.extend([i] if i.opcode != "bitcast" else [])
    sliced = users and all(i.opcode in ("slice", "dynamic-slice", "gather") for i in users)
    return sum(size(i.shape) for i in users) if sliced else size(parameter.shape)


def size(shape: str) -> int:
    """Bytes of all arrays in an HLO shape."""
    return sum(array.bytes for array in arrays(shape))


def arrays(shape: str) -> list[Array]:
    """The arrays in an HLO shape."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [Array(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found]


def dot_flops(c: Computation, i: Instruction) -> int:
    """Floating-point operations of a matrix product; 0 for anything else."""
    if i.opcode != "dot":
        return 0
    (left, *_), (out, *_) = arrays(c.by_name[i.operands[0]].shape), arrays(i.shape)
    dims = re.findall(r"\d+", re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)[0])
    return 2 * out.elements * math.prod(left.shape[int(d)] for d in dims)


def draw(programs: dict[str, Compiled], out: pathlib.Path) -> None:
    """One panel a program, on one time axis."""
    plt.rcParams.update({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False})
    figure, panels = plt.subplots(len(programs), 1, figsize=(16, 9), dpi=100, sharex=True)
    for panel, (name, program) in zip(panels, programs.items(), strict=True):
        spans = play(program.text)
        for span in spans:
            bar(panel, span)
        marks(panel, spans)
        waiting = sum(s.end - s.begin for s in spans if s.kind == "waiting")
        figures = (
            f"{overlap(program.text).hidden_share:.0%} of collective bytes hidden",
            f"{collectives(program.text).moved('all-gather').elements / program.cut:.2f} passes gathered",
            f"{program.temporary / 2**20:,.0f} MiB temporary",
            f"{waiting:.1f} of {max(s.end for s in spans):.1f} ms waiting",
        )
        panel.set_title(name, loc="left", fontsize=17, fontweight="bold", pad=26)
        panel.set_title("   ·   ".join(figures), loc="right", fontsize=14.5, pad=26)
        panel.set_yticks(list(LANES.values()), ["kernels", "all-gathers", "reduce-scatters"])
        panel.tick_params(axis="y", length=0)
        panel.set(xlim=(0, None), ylim=(-0.15, 2.75))
    panels[-1].set_xlabel(
        f"milliseconds, estimated: the compiled schedule played at peak rates ({FLOPS / 1e12:.0f} bf16 TFLOP/s, "
        f"{MEMORY / 1e12:.1f} TB/s of memory, {LINK / 1e9:.0f} GB/s of link)"
    )
    names = {"forward": "matrix products, forward", "recomputed": "the same, recomputed", "backward": "backward"}
    names |= {"other": "kernels without products", "waiting": "waiting for a collective"}
    names |= {"all-gather": "all-gather", "reduce-scatter": "reduce-scatter"}
    handles: list[Patch] = [Patch(color=COLOURS[kind], label=label) for kind, label in names.items()]
    handles.append(Patch(color=COLOURS["all-gather"], alpha=PALE, linewidth=0, label="the rest of start to done"))
    handles.append(Patch(facecolor="white", edgecolor=COLOURS["waiting"], linewidth=2, label="no product meanwhile"))
    figure.legend(handles=handles, loc="upper center", ncols=5, frameon=False, fontsize=13)
    figure.tight_layout(rect=(0, 0, 1, 0.93), h_pad=2)
    figure.savefig(out)


def bar(panel: Axes, span: Span) -> None:
    """One piece of work; of a collective also, pale, the time from its start to its done."""
    y, colour, collective = LANES[span.lane], COLOURS[span.kind], span.lane != "kernels"
    style = {"height": 0.5 if collective else 0.75, "left": span.begin, "color": colour}
    if collective:
        panel.barh(y, max(span.done, span.end) - span.begin, alpha=PALE, **style)
    edge = {} if span.hidden else {"edgecolor": COLOURS["waiting"], "linewidth": 2}
    panel.barh(y, span.end - span.begin, **style, **edge)
    if collective and (width := span.end - span.begin) > 0.04:
        font = {"color": "white", "fontsize": 11 if width > 0.1 else 8.5, "fontweight": "bold"}
        panel.text(span.begin + width / 2, y, span.layer, ha="center", va="center", **font)


def marks(panel: Axes, spans: list[Span]) -> None:
    """Where each layer's products begin, and where the backward pass does."""
    products = [s for s in spans if s.kind in ("forward", "recomputed", "backward") and s.layer]
    begins: dict = {}
    for span in products:
        begins.setdefault((span.layer, span.kind != "forward" and span.layer != "E"), span.begin)
    ends = [*list(begins.values())[1:], max(s.end for s in products)]
    for ((name, _), begin), end in zip(begins.items(), ends, strict=True):
        panel.plot([begin + 0.02, end - 0.02], [2.46, 2.46], color="#777777", linewidth=1.5)
        panel.text((begin + end) / 2, 2.5, "head" if name == "E" else f"layer {name}", ha="center", fontsize=12.5)
    turned = min(s.begin for s in products if s.kind == "backward")
    panel.axvline(turned, ymax=0.88, color="#333333", linewidth=1.2, linestyle=(0, (4, 3)))
    panel.text(turned - 0.04, -0.1, "forward", ha="right", va="bottom", style="italic")
    panel.text(turned + 0.04, -0.1, "backward", ha="left", va="bottom", style="italic")


if __name__ == "__main__":
    both = {f"{when}: prefetch={k}": compiled(k) for k, when in enumerate(("Before", "After"))}
    draw(both, pathlib.Path(__file__).with_suffix(".png"))
