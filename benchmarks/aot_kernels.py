"""List the kernels that one compiled program launches beyond another: what a way of training adds to the model.

`aot_gpt.py --kernels` compares ways of computing the yardstick's gradient. Two kernels are the same work if they have
the same matrix products, or none and the same bytes within 1%. It does not matter whether they run in a loop or outside
of it. Kernels are paired in that order, and the remaining ones are listed by the operation that they come from.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from zerojax.comm.collectives import LABEL
from zerojax.gpus.devices import Device
from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels
from zerojax.names import SHARDS

SAME_BYTES = 0.01  # two kernels without products are the same work if their bytes differ by at most this share
LEAST_MS = 0.01  # what takes less is one line, "everything else"
LEAST_IN_TABLE = 0.03
MEANINGLESS = frozenset("GPT Block eval_jaxpr body while local shard_map closed_call checkpoint remat2".split())
RECOMPUTED = "rematted_computation"
BUCKETS = {"gather": "buckets of gathers", "reduce_scatter": "buckets of reductions"}


class Work(NamedTuple):
    """Equal executions of a kernel.

    Attributes:
        name: The operation that the kernel comes from, as `operation` names it.
        times: Executions in one run of the program.
        products: FLOPs of matrix products in one execution, by type.
        traffic: Bytes read and written in one execution.
        seconds: Least time of one execution.
    """

    name: str
    times: int
    products: tuple[tuple[str, int], ...]
    traffic: int
    seconds: float


def launched(text: str, device: Device) -> list[Work]:
    """Return the kernels of a compiled program, from its HLO text."""
    module = read(text)
    names = {i.name: i.op_name for c in module.computations.values() for i in c.instructions}
    return [
        Work(
            operation(names[kernel.name]) or f"unnamed {re.sub(r'[.0-9]+$', '', kernel.name)}",
            kernel.times,
            tuple(sorted(kernel.operations.items())),
            kernel.traffic,
            kernel.seconds(device),
        )
        for kernel in kernels(module)
    ]


def operation(op_name: str) -> str:
    """Return a short name of a JAX operation, equal in all layers and ways: pass, module and primitive.

    >>> operation("jit(loss)/transpose(jvp(GPT))/while/body/jvp(checkpoint)/rematted_computation/blocks/o/dot_general")
    'recomputed o/dot_general'
    """
    primitive = op_name.rpartition("/")[2].rstrip(")")
    if label := LABEL.search(op_name):
        return f"{BUCKETS.get(label[1], label[1])}, {primitive}"
    if SHARDS in op_name:
        return f"shards, {primitive}"
    parts = [part for part in op_name.split("/") if re.fullmatch(r"[A-Za-z][\w.]*", part)]
    kept = [part for part in parts if part not in MEANINGLESS and not re.match(r"block(s|_\d+)$", part)]
    if not kept:
        return ""
    when = "recomputed" if RECOMPUTED in kept else "backward" if "transpose(" in op_name else "forward"
    return f"{when} {'/'.join(part for part in kept if part != RECOMPUTED)}"


def beyond(ours: Iterable[Work], theirs: Iterable[Work]) -> list[Work]:
    """Return the kernels of `ours` that have no equal in `theirs`. Kernels of buckets are the last that are paired."""
    left: dict[tuple, list[list]] = {}
    for work in theirs:
        left.setdefault(work.products, []).append([work.traffic, work.times])
    found = []
    for work in sorted(ours, key=lambda work: (work.name.startswith("buckets"), work.traffic)):
        times = work.times
        for equal in left.get(work.products, ()):
            if work.products or abs(equal[0] - work.traffic) <= SAME_BYTES * work.traffic:
                paired = min(times, equal[1])
                times, equal[1] = times - paired, equal[1] - paired
        if times:
            found.append(work._replace(times=times))
    return found


def by_operation(found: Iterable[Work]) -> list[dict]:
    """Return the executions, bytes and time of each operation, those that take longest first."""
    times, traffic, seconds = Counter[str](), Counter[str](), defaultdict[str, float](float)
    for work in found:
        times[work.name] += work.times
        traffic[work.name] += work.times * work.traffic
        seconds[work.name] += work.times * work.seconds
    name = lambda key: key if 1e3 * seconds[key] >= LEAST_MS else "everything else"
    rows: dict[str, list] = {}
    for key in sorted(seconds, key=lambda key: -seconds[key]):
        row = rows.setdefault(name(key), [0, 0, 0.0])
        rows[name(key)] = [row[0] + times[key], row[1] + traffic[key], row[2] + seconds[key]]
    return [
        {"kernels": key, "times": count, "MiB": round(size / 2**20, 1), "ms": round(1e3 * spent, 3)}
        for key, (count, size, spent) in rows.items()
    ]


def compare(texts: dict[str, str], device: Device) -> dict:
    """Return the milliseconds of each way's kernels, and what the first way has beyond each other way.

    Args:
        texts: The HLO text of each way.
        device: The GPU, with the rates that count.
    """
    works = {way: launched(text, device) for way, text in texts.items()}
    ours, *others = works
    milliseconds = lambda found: round(1e3 * sum(work.times * work.seconds for work in found), 2)
    return {
        "ms": {way: milliseconds(found) for way, found in works.items()},
        "beyond": {way: by_operation(beyond(works[ours], works[way])) for way in others},
        "missing": {way: by_operation(beyond(works[way], works[ours])) for way in others},
    }


def table(styles: dict[str, dict]) -> str:
    """Return a Markdown table of what `compare` found in each style, beside the model that is gathered by hand."""
    listed = {
        style: {row["kernels"]: row for row in found["beyond"]["gathered"] if row["ms"] >= LEAST_IN_TABLE}
        for style, found in styles.items()
    }
    names = {
        name: sum(rows.get(name, {"ms": 0})["ms"] for rows in listed.values()) for of in listed.values() for name in of
    }
    rows = [[name, *(of.get(name) for of in listed.values())] for name in sorted(names, key=lambda name: -names[name])]
    sums = {"all, with smaller ones": "beyond", "all kernels that only the model gathered by hand launches": "missing"}
    rows += [[name, *(in_all(found[key]["gathered"]) for found in styles.values())] for name, key in sums.items()]
    cells = lambda row: f"{row['MiB']:.0f} | {row['ms']:.2f}" if row else " | "
    lines = [
        f"| kernels | {' | '.join(f'{style}: MiB | ms' for style in styles)} |",
        "|---" * (1 + 2 * len(styles)) + "|",
    ]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(cells, found))} |" for name, *found in rows)])


def totals(styles: dict[str, dict]) -> str:
    """Return a Markdown table of the milliseconds of all kernels, for each style and way."""
    ways = list(next(iter(styles.values()))["ms"])
    lines = [f"| | {' | '.join(f'`{way}`' for way in ways)} |", "|---" * (1 + len(ways)) + "|"]
    return "\n".join(
        [*lines, *(f"| {style} | {' | '.join(map(str, found['ms'].values()))} |" for style, found in styles.items())]
    )


def in_all(rows: list[dict]) -> dict:
    """Return the sums over rows of `by_operation`."""
    return {name: sum(row[name] for row in rows) for name in ("MiB", "ms")}
