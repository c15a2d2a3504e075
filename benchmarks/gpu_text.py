"""What `gpu.py` prints of its figures."""


def summary(row):
    """What was found of a configuration, on one line."""
    if row["status"] != "ran":
        return row["status"] + (f" ({row['error'].splitlines()[0]})" if "error" in row else "")
    if "ways" in row:
        share = lambda way: "" if way["MFU"] is None else f", MFU {way['MFU']:.1%}"
        return "; ".join(f"{name} {way['tokens/s']:,.0f} tokens/s{share(way)}" for name, way in row["ways"].items())
    if "seconds" in row:
        return f"a save blocks {row['seconds']['save: the loop is blocked']['median']:.3f} s"
    peak = "" if row.get("peak_device") is None else f", peak {row['peak_device'] / 1e9:.2f} GB"
    planned = f", planned {row['planned_s']:.3f} s, {row['planned_peak'] / 1e9:.2f} GB" if "planned_s" in row else ""
    return f"{row['step_s'][0]:.3f} s a step{peak}{planned}"


def line(row):
    """One configuration on one line."""
    gigabytes = lambda key: f"{row[key] / 1e9:8.2f}" if row.get(key) is not None else f"{'-':>8s}"
    speed = f"{row['tokens/s']:9.0f}" if "tokens/s" in row else f"{'-':>9s}"
    seconds = "{:.3f} ({:.3f}-{:.3f})".format(*row["step_s"]) if "step_s" in row else "-"
    update = f"{row['update_s'][0]:7.3f}" if "update_s" in row else f"{'-':>7s}"
    reached = f"{row['achieved each way'] / 1e9:6.1f}" if "achieved each way" in row else f"{'-':>6s}"
    share = f"{row['share of link']:6.2f}" if "share of link" in row else f"{'-':>6s}"
    memory = " ".join(gigabytes(k) for k in ("peak_device", "compiled_device", "state_host", "peak_rss"))
    end = "" if row["status"] == "ran" else f"  {row['status']}"
    return f"{row['model']:20s} {row['mode']:7s} {speed}  {seconds:22s} {memory} {update} {reached} {share}{end}"


def table(found):
    """All that was found."""
    heads = " ".join(f"{head:>8s}" for head in ("peak GB", "compiled", "host GB", "RSS GB"))
    head = f"\n{'model':20s} {'mode':7s} {'tokens/s':>9s}  {'s a step (spread)':22s} {heads}  update   GB/s  share"
    largest = [
        f"largest, {mode}: {(x['parameters'] or 0) / 1e9:.2f}B trains; {x['the next']}"
        for mode, x in found["largest"].items()
    ]
    return "\n".join([head, *map(line, found["rows"]), *largest])
