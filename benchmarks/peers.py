"""Train one GPT with zerojax and with its peers, with the same tokens, weights and AdamW: step time and memory.

    python benchmarks/peers.py --out benchmarks/results/peers.json      4 workers, minutes
    python benchmarks/peers.py --size tiny --rounds 2                   to see it run
    python benchmarks/peers.py --ways zerojax replicated --styles scan
    python benchmarks/peers.py --size gpu --workers 8                   GPUs: NCCL, bfloat16. NEVER RUN so far.

In JAX: `zerojax` at stage 3 in global view, `zerojax-device` in device view, `replicated` plain `jax.jit`, `gspmd` with
parameters sharded by `in_shardings` alone, and `gspmd-tuned`, a model that gathers each layer by hand. In torch (extra
`peers`): `ddp`, `fsdp2`, and `deepspeed` at ZeRO-3. A way that cannot start is left out by name. All rematerialise
blocks. JAX unrolls the layers or scans over them (`--styles`); torch is compared with both.

First, all train for some steps from the same weights, and nothing is timed unless their losses agree. Then each takes
some steps in turn, round by round, while the others wait. Ratios are taken within a round, and their median counts.

A way's *overhead* is its time over that of its own framework's replicated step: `replicated` of the same style, or
`ddp`. Compare overheads and not times: on a CPU, torch's workers are processes of one thread that talk over sockets,
and JAX's are simulated devices of one process that share its threads. *CPU overhead* is the same ratio of processor
seconds. It measures added work, and other load on the machine disturbs it less. Only zerojax's step also computes the
gradient's norm, as it does for every user.

A step's time is from the first worker's start to the last one's end. Memory is that of a worker: the most that was
resident during the steps beyond the imported framework, and for JAX what its compiled program needs.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
JAX_WAYS = ("zerojax", "zerojax-device", "replicated", "gspmd", "gspmd-tuned")
TORCH_WAYS = {"ddp": "torch", "fsdp2": "torch", "deepspeed": "deepspeed"}
OWN = {"zerojax": "replicated", "zerojax-device": "replicated", "gspmd": "replicated", "gspmd-tuned": "replicated"}
OWN |= {"fsdp2": "ddp", "deepspeed": "ddp"}
# Relative, of a loss. Sums of float32 in other orders come to 1.3e-6 here within ten steps; the smallest mistake that
# is easily made, torch's epsilon of LayerNorm, its exact gelu or a forgotten weight decay, to 1.5e-5 or more. The
# GPUs' bfloat16 has three digits.
TOLERANCE, HALF_TOLERANCE = 5e-6, 1e-2
IDLE = 0.03  # CPU seconds a second that a waiting way may take: more of it would be taken from the others


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="cpu", choices=["tiny", "cpu", "gpu"])
    parser.add_argument("--workers", type=int, default=4, help="simulated devices, processes, or GPUs")
    parser.add_argument("--ways", nargs="+", choices=[*JAX_WAYS, *TORCH_WAYS], help="all that can start, else")
    parser.add_argument("--styles", nargs="+", default=["unrolled", "scan"], choices=["unrolled", "scan"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of each way in a round")
    parser.add_argument("--parity", type=int, default=10, help="steps whose losses must agree")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument("--markdown", action="store_true", help="print the page's table, too")
    parser.add_argument("--picture", type=pathlib.Path, help="draw them into this file")
    return parser.parse_args()


class CannotStart(Exception):
    """A way that cannot be measured here, and why."""


class Way:
    """The processes of one way: one for JAX, one a worker for torch."""

    def __init__(self, name, style, args, folder):
        self.name, jax = name, name in JAX_WAYS
        self.taken = self.idle = self.waited = 0  # steps; CPU seconds between turns, and how long those lasted
        self.last = None
        asked = {"framework": "jax" if jax else "torch", "way": name, "style": style, "size": args.size}
        asked |= {"workers": args.workers, "weights": str(folder / "weights.npz"), "shape": shape_of(args.size)}
        self.log = folder / f"{name}-{style}.log"
        common = os.environ | environment(args, jax, folder)
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.processes = []
            for rank in range(1 if jax else args.workers):
                command = [sys.executable, HERE / "peer_worker.py", json.dumps(asked | {"rank": rank})]
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(subprocess.Popen(command, env=common | own, **pipes))
        self.answers()

    def answers(self):
        """One of each process."""
        found = []
        for process in self.processes:
            line = process.stdout.readline()
            answer = json.loads(line) if line else {"error": f"ended with status {process.wait()}"}
            if "error" in answer:
                self.kill()
                tail = "\n".join(self.log.read_text().splitlines()[-12:])
                raise CannotStart(f"{self.name}: {answer['error']}\n{tail}")
            found.append(answer)
        return found

    def tell(self, **order):
        for process in self.processes:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return self.answers()

    def turn(self, steps):
        """Seconds a step, of the clock and of all its processors; the mean loss of each step."""
        found = self.tell(do="turn", first=self.taken, steps=steps)
        self.taken += steps
        if self.last:
            self.idle += sum(now["cpu start"] - then["cpu end"] for now, then in zip(found, self.last, strict=True))
            self.waited += min(now["start"] for now in found) - max(then["end"] for then in self.last)
        self.last = found
        seconds = max(answer["end"] for answer in found) - min(answer["start"] for answer in found)
        busy = sum(answer["cpu end"] - answer["cpu start"] for answer in found)
        losses = [statistics.mean(each) for each in zip(*(a["losses"] for a in found), strict=True)]
        return seconds / steps, busy / steps, losses

    def memory(self, workers):
        """MiB of a worker."""
        found = self.tell(do="memory")
        grown = sum(answer["peak resident"] - answer["before the model"] for answer in found) / workers
        device = [answer["device peak"] for answer in found if answer["device peak"]]
        row = {"resident": grown, "framework": sum(answer["before the model"] for answer in found) / workers}
        row |= {"compiled": found[0]["compiled peak"], "GPU": max(device, default=None)}
        return {name: round(bytes_ / 2**20, 1) for name, bytes_ in row.items() if bytes_ is not None}

    def end(self):
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps({"do": "end"}) + "\n")
                process.stdin.flush()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        self.kill()

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


def shape_of(size):
    """The yardstick's numbers for torch, which knows no JAX types."""
    import yardstick

    size = yardstick.SIZES[size]
    names = ("width", "head", "layers", "tokens", "rows", "vocabulary")
    return {name: getattr(size, name) for name in names} | {"gpu": size is yardstick.SIZES["gpu"]}


def environment(args, jax, folder):
    """Of a way's processes."""
    if jax and args.size == "gpu":
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if jax:
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.workers}"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    found |= {"WORLD_SIZE": str(args.workers), "LOCAL_WORLD_SIZE": str(args.workers), "LOCAL_SIZE": str(args.workers)}
    # DeepSpeed builds an extension with ninja, which is beside the interpreter.
    found |= {"PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])}
    return found | ({} if args.size == "gpu" else {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})


def started(names, style, args, folder, left_out):
    """The ways that start; one that was asked for by name must."""
    ways = {}
    try:
        for name in names:
            print(f"starting {name} ({style})", flush=True)
            try:
                if name in TORCH_WAYS and importlib.util.find_spec(TORCH_WAYS[name]) is None:
                    raise CannotStart(f"{name}: {TORCH_WAYS[name]} is not installed (the extra `peers`)")
                ways[name] = Way(name, style, args, folder)
            except CannotStart as error:
                if args.ways:
                    raise
                left_out[name] = str(error).splitlines()[0]
                print(f"left out, {error}", flush=True)
    except BaseException:
        end(ways)
        raise
    return ways


def end(ways):
    for way in ways.values():
        way.end()


def train_alike(ways, curves, args):
    """Losses of the first steps, and how far the farthest is from the first; refused where they do not agree."""
    for name, way in ways.items():
        if name not in curves:
            print(f"  {args.parity} steps of {name}", end=": ", flush=True)
            curves[name] = way.turn(args.parity)[-1]
            print(*(f"{loss:.5f}" for loss in curves[name]), flush=True)
    first = curves["replicated" if "replicated" in ways else next(iter(ways))]
    # a NaN is no maximum to Python, and no loss that agrees
    each = {name: [abs(a / b - 1) for a, b in zip(curves[name], first, strict=True)] for name in ways}
    apart = {name: max(found) if all(map(math.isfinite, found)) else math.inf for name, found in each.items()}
    allowed = HALF_TOLERANCE if args.size == "gpu" else TOLERANCE
    differing = {name: found for name, found in apart.items() if found > allowed}
    if differing:
        raise SystemExit(f"Losses differ by more than {allowed:.0e}, relative: {differing}. Nothing was timed.")
    return apart


def measured(ways, args):
    """Return the seconds per step, for each way and round: elapsed time, and time of the processors."""
    for way in ways.values():
        way.turn(1)
        way.counts_anew = all(answer["forgotten"] for answer in way.tell(do="forget peak"))
        way.last, way.idle, way.waited = None, 0, 0
    seconds, busy, order = {name: [] for name in ways}, {name: [] for name in ways}, list(ways)
    for number in range(args.rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            took = ways[name].turn(args.steps)
            seconds[name].append(took[0])
            busy[name].append(took[1])
    return seconds, busy


def spread_of(figures):
    return {"median": statistics.median(figures), "least": min(figures), "most": max(figures)}


def rows_of(ways, seconds, busy, apart, args):
    """By way: time, ratios, memory, and what it took of the CPU while others ran."""

    def ratio(name, other, seconds=seconds):
        if other not in seconds:
            return None
        return spread_of([a / b for a, b in zip(seconds[name], seconds[other], strict=True)])

    rows = {}
    for name, way in ways.items():
        row = {"seconds": spread_of(seconds[name]), "CPU seconds": spread_of(busy[name])}
        row |= {"overhead": ratio(name, OWN.get(name)), "CPU overhead": ratio(name, OWN.get(name), busy)}
        row |= {"to replicated": ratio(name, "replicated")}
        row |= {"to fsdp2": ratio(name, "fsdp2"), "MiB a worker": way.memory(args.workers)}
        row |= {"loss apart": apart[name], "busy while idle": way.idle / way.waited if way.waited else 0}
        rows[name] = {key: value for key, value in row.items() if value is not None}
        if row["busy while idle"] > IDLE:
            print(f"{name} took {row['busy while idle']:.0%} of a core while others ran: their times are too long")
        if not way.counts_anew:
            print(f"{name}: this system counts peaks since the start alone, so its memory has compiling in it")
    return rows


def table(rows, style):
    columns = ("overhead", "to replicated", "to fsdp2", "CPU overhead")
    head = f"\n{style:16s}{'ms a step':>10s}{'spread':>14s}" + "".join(f"{name:>15s}" for name in columns)
    print(head + f"{'MiB a worker':>14s}{'compiled':>10s}{'loss apart':>12s}")
    for name, row in rows.items():
        spread = f"{1e3 * row['seconds']['least']:.0f}-{1e3 * row['seconds']['most']:.0f}"
        ratios = "".join(f"{row[key]['median']:15.2f}" if key in row else " " * 15 for key in columns)
        memory = row["MiB a worker"]
        compiled = f"{memory['compiled']:10.0f}" if "compiled" in memory else " " * 10
        line = f"{name:16s}{1e3 * row['seconds']['median']:10.0f}{spread:>14s}{ratios}{memory['resident']:14.0f}"
        print(f"{line}{compiled}{row['loss apart']:12.1e}")


def markdown(results):
    """The table of docs/peers.md: of each style ms a step, overhead (least and most of rounds), of CPU seconds, MiB."""
    names = dict.fromkeys(name for rows in results.values() for name in rows)
    print("\n| | " + " | ".join(f"ms, {style} | overhead | of CPU | MiB" for style in results) + " |")
    print("|---|" + "---|" * 4 * len(results))
    for name in names:
        cells = [f"`{name}`"]
        for rows in results.values():
            row, over = rows[name], rows[name].get("overhead")
            ratio = f"{over['median']:.2f} ({over['least']:.2f}–{over['most']:.2f})" if over else ""
            busy = f"{row['CPU overhead']['median']:.2f}" if over else ""
            cells += [f"{1e3 * row['seconds']['median']:.0f}", ratio, busy, f"{row['MiB a worker']['resident']:.0f}"]
        print("| " + " | ".join(cells) + " |")


def versions():
    from importlib import metadata

    import machine

    found = machine.described()
    del found["devices"]  # those of this process, which trains nothing
    for name in ("torch", "deepspeed"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def main():
    args = arguments()
    try:
        compare(args)
    except CannotStart as error:
        raise SystemExit(error) from None


def compare(args):
    wanted = args.ways or [*JAX_WAYS, *TORCH_WAYS]
    if args.size != "gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    left_out, results = {}, {}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, contextlib.ExitStack() as stack:
        folder = pathlib.Path(folder)
        subprocess.run([sys.executable, HERE / "peer_jax.py", args.size, folder / "weights.npz"], check=True)
        torch = started([n for n in wanted if n in TORCH_WAYS], "unrolled", args, folder, left_out)
        stack.callback(end, torch)
        curves = {}
        for style in args.styles:
            jax = started([n for n in wanted if n in JAX_WAYS], style, args, folder, left_out)
            try:
                curves = {name: curve for name, curve in curves.items() if name in torch}
                ways = jax | torch
                apart = train_alike(ways, curves, args)
                results[style] = rows_of(ways, *measured(ways, args), apart, args)
            finally:
                end(jax)
            table(results[style], style)
    if args.markdown:
        markdown(results)
    for why in left_out.values():
        print(f"left out: {why}")
    if args.out:
        run = {"size": args.size, "workers": args.workers, "rounds": args.rounds, "steps a round": args.steps}
        run |= {"losses": curves, "left out": left_out}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(versions() | run | {"ways": results}, indent=2) + "\n")
    if args.picture:
        draw(results, args.picture)


COLORS = {"unrolled": "#4477aa", "scan": "#ee9944"}


def draw(results, path):
    """Step time, overhead over the framework's own replicated step, and memory, by way and style."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for rows in results.values() for name in rows))
    figure = Figure(figsize=(12, 0.6 + 0.55 * len(names)), layout="constrained")
    time, over, memory = figure.subplots(1, 3, sharey=True)
    height = 0.8 / len(results)
    for i, (style, rows) in enumerate(results.items()):
        for axes, of, scale in ((time, "seconds", 1e3), (over, "overhead", 1)):
            at = [k + (i + 0.5) * height - 0.4 for k, name in enumerate(names) if of in rows[name]]
            found = [rows[name][of] for name in names if of in rows[name]]
            middle = [scale * row["median"] for row in found]
            spread = [[scale * abs(row["median"] - row[end]) for row in found] for end in ("least", "most")]
            axes.barh(at, middle, 0.9 * height, color=COLORS[style], label=style)
            axes.errorbar(middle, at, xerr=spread, fmt="none", ecolor="#444444", elinewidth=1)
        at = [k + (i + 0.5) * height - 0.4 for k in range(len(names))]
        memory.barh(at, [rows[n]["MiB a worker"]["resident"] for n in names], 0.9 * height, color=COLORS[style])
    over.axvline(1, color="#444444", linewidth=1)
    time.set(yticks=range(len(names)), yticklabels=names, xlabel="ms a step: median, least and most")
    time.invert_yaxis()
    time.legend(frameon=False, title="JAX's layers")
    over.set(xlabel="over the framework's own replicated step")
    memory.set(xlabel="MiB a worker, resident during the steps")
    for axes in (time, over, memory):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
