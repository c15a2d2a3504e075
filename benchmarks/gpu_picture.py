"""Draw the picture of `gpu.py`: speed, plan against measured, offload, and the largest model, side by side."""

import textwrap

from matplotlib.figure import Figure


def draw(found, path):
    """Draw what was found; of what was not, the panel says so."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    for axes, panel in zip(panels, (speed, planned, offload, activations, checkpoint, largest), strict=True):
        panel(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
        if not axes.has_data():
            axes.text(0.5, 0.5, reason(found, panel), ha="center", va="center", transform=axes.transAxes, color="0.5")
            axes.set(xticks=[], yticks=[])
    name, count = found["machine"]["devices"]
    title = f"{count} x {name}, jax {found['machine']['versions']['jax']}, {found['date']}"
    if found["dry run"]:
        title = f"A DRY RUN with tiny models on simulated devices: its figures mean nothing. {title}"
    figure.suptitle(title, color="C3" if found["dry run"] else "black")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def reason(found, panel):
    """Why a panel is empty."""
    part = {"planned": "plan", "offload": "rows"}.get(panel.__name__, panel.__name__)
    rows = found[part] if isinstance(found[part], list) else list(found[part].values())
    said = next((row["status"] for row in rows if row.get("status", "ran") != "ran"), "not asked for")
    return textwrap.fill(f"nothing measured: {said}", 40)


def ran(rows):
    return {name: row for name, row in rows.items() if row.get("status") == "ran"}


def bars(axes, heights, labels, values, **options):
    """Horizontal bars, the first on top, each with its value."""
    drawn = axes.barh(range(len(heights)), heights, **options)
    axes.set_yticks(range(len(heights)), labels)
    axes.invert_yaxis()
    axes.bar_label(drawn, values, padding=3, fontsize=8)
    axes.margins(x=0.25)


def speed(axes, found):
    rows = [(size, name, way) for size, row in ran(found["speed"]).items() for name, way in row["ways"].items()]
    axes.set_title("tokens/s, and MFU")
    if rows:
        text = [f"{way['tokens/s']:,.0f}" + (f", {way['MFU']:.0%}" if way["MFU"] else "") for _, _, way in rows]
        names = list(dict.fromkeys(name for _, name, _ in rows))
        colors = [f"C{names.index(name)}" for _, name, _ in rows]
        bars(
            axes,
            [way["tokens/s"] for _, _, way in rows],
            [f"{size} {name}" for size, name, _ in rows],
            text,
            color=colors,
        )


def planned(axes, found):
    rows = ran(found["plan"])
    axes.set_title("planned beside measured")
    for row in rows.values():
        # Where making the state took more than a step, the allocator's peak is not the step's.
        is_step = row["peak_device"] is not None and row["peak_device"] > row["create_peak_device"]
        measured = row["peak_device"] if is_step else row["compiled_device"]
        peak = "allocator's" if is_step else "compiled"
        shares = [row["planned_peak"] / measured, row["planned_s"] / row["step_s"][0]]
        labels = [f"peak\n({peak})", "time"]
        text = [
            f"{shares[0]:.2f} of {measured / 1e9:.2f} GB",
            f"{shares[1]:.2f} of {row['step_s'][0]:.3f} s",
        ]
        bars(axes, shares, labels, text, color="C2")
        axes.axvline(1, color="0.6", linewidth=1)


def offload(axes, found):
    rows = {row["mode"]: row["step_s"] for row in found["rows"] if row["model"] == "1.5B" and row["status"] == "ran"}
    ratios = {mode: seconds[0] / rows["none"][0] for mode, seconds in rows.items()} if "none" in rows else {}
    torch = ran(found["torch"])
    if "FSDP2" in torch and "FSDP2, offload" in torch:
        ratios["FSDP2's"] = torch["FSDP2, offload"]["step_s"][0] / torch["FSDP2"]["step_s"][0]
    axes.set_title("a step with offload / without")
    if ratios:
        bars(axes, list(ratios.values()), list(ratios), [f"{x:.2f}" for x in ratios.values()], color="C1")
        axes.axvline(1.5, color="0.6", linewidth=1, linestyle="--")


def activations(axes, found):
    rows = ran(found["activations"])
    axes.set_title("layers' inputs: seconds a step, peak")
    if rows:
        peak = lambda row: f", {row['peak_device'] / 1e9:.1f} GB" if row["peak_device"] else ""
        text = [f"{row['step_s'][0]:.3f}{peak(row)}" for row in rows.values()]
        bars(axes, [row["step_s"][0] for row in rows.values()], list(rows), text, color="C4")


def checkpoint(axes, found):
    axes.set_title("a checkpoint: seconds")
    for name, row in ran(found["checkpoint"]).items():
        wanted = {label: one["median"] for label, one in row["seconds"].items()}
        bars(axes, list(wanted.values()), list(wanted), [f"{x:.3f}" for x in wanted.values()], color="C5")
        axes.set_title(f"a checkpoint of {name}: seconds")


def largest(axes, found):
    most = {mode: row["parameters"] for mode, row in found["largest"].items() if row["parameters"]}
    axes.set_title("largest model that trains")
    if most:
        bars(axes, list(most.values()), list(most), [f"{x / 1e9:.2f}B" for x in most.values()], color="C0")
