"""Show a run: a progress bar, a table of memory, and two pictures."""

from collections.abc import Sequence
from pathlib import Path

from memory import PARTS, Memory
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

COLORS = {"params": "#4477aa", "grads": "#ee9944", "opt_state": "#66aa77"}


class TokensPerSecond(ProgressColumn):
    """The speed over about the last half minute."""

    def __init__(self, tokens_per_step: int):
        super().__init__()
        self.tokens_per_step = tokens_per_step

    def render(self, task: Task) -> Text:
        return Text(f"{(task.speed or 0) * self.tokens_per_step:,.0f} tokens/s")


def progress_bar(steps: int, *, tokens_per_step: int) -> tuple[Progress, TaskID]:
    """A bar with steps, loss, tokens per second and remaining time."""
    progress = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[loss]:.2f} bits/byte"),
        TokensPerSecond(tokens_per_step),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    return progress, progress.add_task("train", total=steps, loss=8.0)


MIXED = (
    " Master weights are counted as optimizer; at stage 3 they are the parameters themselves. Gradients are summed in "
    "float32, which the formula leaves in the narrow type."
)


OFFLOADED = " What is offloaded is in host memory or on disk, of which the formula knows nothing."


def show_memory(memory: Sequence[Memory], *, trained: int, devices: int, mixed: bool) -> None:
    """Print bytes per device at every stage, measured and expected."""
    table = Table(
        title=f"Memory per device, devices: {devices} (measured | the paper's formula)",
        caption=f"kB of 1,000 bytes. Parameters and optimizer of stage {trained} were read off the live arrays, "
        "the rest off the sharding plan; gradients are those within the training step. Beyond the formula are small "
        "leaves that stay replicated, and padding where the devices do not divide a leaf."
        + MIXED * mixed
        + OFFLOADED * any(m.offloaded for m in memory),
    )
    table.add_column("stage")
    is_offloaded = any(m.offloaded for m in memory)
    for name in (*PARTS.values(), "all", *["offloaded"] * is_offloaded):
        table.add_column(name, justify="right")
    for stage, (found, paper, size) in enumerate(memory):
        cells = [f"{found[p] / 1e3:,.0f} | {paper[p] / 1e3:,.0f}" for p in PARTS]
        total = f"{sum(found[p] for p in PARTS) / 1e3:,.0f} | {sum(paper.values()) / 1e3:,.0f}"
        offloaded = [f"{size / 1e3:,.0f}"] * is_offloaded
        table.add_row(f"{stage}", *cells, total, *offloaded, style="bold" if stage == trained else "")
    Console().print(table)


def draw_memory(memory: Sequence[Memory], path: Path, *, devices: int) -> None:
    """Stack the measured bytes by part, one bar per stage, with a tick at the formula's total."""
    figure, axes = new_axes()
    stages = range(len(memory))
    base = [0.0] * len(memory)
    for part, name in PARTS.items():
        sizes = [m.found[part] / 1e6 for m in memory]
        axes.bar(stages, sizes, 0.6, bottom=base, color=COLORS[part], label=name)
        base = [b + size for b, size in zip(base, sizes, strict=True)]
    paper = [sum(m.paper.values()) / 1e6 for m in memory]
    axes.hlines(paper, [s - 0.38 for s in stages], [s + 0.38 for s in stages], "black", label="paper's formula")
    for stage, top in zip(stages, base, strict=True):
        axes.annotate(f"{top:.2f}", (stage, top), (0, 4), textcoords="offset points", ha="center")
    axes.set(xticks=stages, xlabel="ZeRO stage", ylabel="MB per device", title=f"Memory per device, devices: {devices}")
    finish(figure, axes, path)


def draw_loss(train: dict[int, float], held_out: dict[int, float], path: Path) -> None:
    """Draw bits per byte by step: every batch (faint), the running mean, and the held-out text."""
    figure, axes = new_axes()
    steps, losses = list(train.keys()), list(train.values())
    axes.plot(steps, losses, color=COLORS["params"], alpha=0.25, linewidth=0.8)
    axes.plot(steps, running_mean(losses), color=COLORS["params"], label="training batches")
    axes.plot(list(held_out.keys()), list(held_out.values()), "o-", color=COLORS["grads"], label="held-out files")
    step, last = max(held_out.items())
    axes.annotate(f"{last:.2f}", (step, last), (0, 8), textcoords="offset points", ha="center")
    axes.set(xlabel="step", ylabel="bits per byte", xlim=(0, None), ylim=(0, None), title="Loss")
    finish(figure, axes, path)


def running_mean(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Smooth exponentially, with a correction for the start at zero."""
    smooth, total = [], 0.0
    for i, value in enumerate(values, 1):
        total = keep * total + (1 - keep) * value
        smooth.append(total / (1 - keep**i))
    return smooth


def new_axes() -> tuple:
    from matplotlib.figure import Figure  # only here, because train_gpt.py also trains without matplotlib

    figure = Figure(figsize=(6, 4), layout="constrained")
    return figure, figure.subplots()


def finish(figure, axes, path: Path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
