"""Offloaded optimizer state on a GPU: tokens/s, memory and share of the link, with and without, at 1.5B, 3B and 8B.

    python benchmarks/gpu_offload.py --out benchmarks/results/gpu_offload.json
    python benchmarks/gpu_offload.py --check --sizes --out ...         correctness only: stages 1-3, every store
    python benchmarks/gpu_offload.py --sizes 8B --resume --out ...     one size more, added to what the file has
    python benchmarks/gpu_offload.py --sizes --largest none device --resume --out ...   the largest that trains

Where JAX finds no GPU, or with --dry-run, tiny models of the same kind run on simulated devices: that tries the
script, and its figures mean nothing.

GPT at stage 3 on all devices, bfloat16 with master weights, adamw, scanned and rematerialised layers. Each
configuration has a process of its own, so memory begins empty; the file is written after each. `share` is the least
time in which the link, measured by itself with both directions at once, could carry the update's bytes, over the
time from complete gradients to the complete state. `peak` is the allocator's; as making the state may need
more than a step, `compiled` has what the compiler says of the step's first program, which is the larger.
"""

import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from zerojax.offload.host import CAP_VARIABLE, available_bytes

HERE = pathlib.Path(__file__).parent
SIZES = {
    "1.5B": {"base": "gpu", "width": 2048, "layers": 28},
    "3B": {"base": "gpu", "width": 3072, "layers": 26},
    "8B": {"base": "gpu", "width": 4096, "layers": 39},
}
SMALL = {
    "1.5B": {"base": "tiny", "width": 64, "layers": 2},
    "3B": {"base": "tiny", "width": 64, "layers": 4},
    "8B": {"base": "tiny", "width": 96, "layers": 6},
}
MODES = {
    "none": None,
    "device": {"update": "device"},
    "host": {"update": "host"},
    "half": {"update": "device", "fraction": 0.5},
}
GROWTH = 1.25


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), help="in this order (all; on CPU 1.5B)")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES), help="in this order")
    parser.add_argument("--largest", nargs="*", default=[], choices=list(MODES), help="then grow 8B until it fails")
    parser.add_argument("--check", action="store_true", help="first compare numbers at each stage, on a tiny model")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, and as many updates by themselves")
    parser.add_argument("--rows", type=int, help="sequences of each device (8 of 1024 tokens on GPUs)")
    parser.add_argument("--budget", type=float, default=480, help="seconds for all; what is left out is said")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one configuration")
    parser.add_argument("--dry-run", "--small", action="store_true", help="tiny models on two simulated CPU devices")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, and run what it lacks")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    bench = Bench(args)
    bench.probe()
    if args.check:
        bench.check()
    for size in args.sizes if args.sizes is not None else ["1.5B"] if bench.small else SIZES:
        for mode in args.modes:
            bench.one(size, bench.sizes[size], mode, args.steps)
    for mode in args.largest:
        bench.largest(mode)
    print(table(bench.found))


class Bench:
    """One session: what was found so far, and how much time is left."""

    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + args.budget
        self.found = {"date": datetime.date.today().isoformat(), "rows": [], "largest": {}}
        if args.resume and args.out and args.out.exists():
            self.found = json.loads(args.out.read_text())
        self.environment = environment(dry=args.dry_run)
        self.sizes, self.small = SIZES, False

    def save(self):
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.found, indent=2) + "\n")

    def left(self):
        return self.end - time.monotonic()

    def child(self, work, *, limit=None, **given):
        """Run something in a process of its own: what it wrote, whether or not it lived to the end."""
        limit = max(1.0, min(limit or self.args.limit, self.left()))
        with tempfile.TemporaryDirectory() as folder:
            out, log = pathlib.Path(folder, "notes.json"), pathlib.Path(folder, "log")
            command = [sys.executable, str(HERE / "offload_work.py"), json.dumps({"work": work, **given}), str(out)]
            with log.open("w") as stream:
                try:
                    code = subprocess.run(
                        command, env=self.environment, stdout=stream, stderr=stream, timeout=limit
                    ).returncode
                    ended = "" if code == 0 else f"killed by signal {-code}" if code < 0 else f"ended with {code}"
                except subprocess.TimeoutExpired:
                    ended = f"stopped after {limit:.0f} s"
            try:
                notes = json.loads(out.read_text())
            except (OSError, ValueError):
                notes = {}
            if ended:
                at = f" while {notes['doing']}" if "doing" in notes else ""
                notes |= {"status": ended + at, "log": log.read_text(errors="replace")[-600:]}
        notes.pop("doing", None)
        return notes

    def probe(self):
        """What hardware there is; on CPU everything from here on is small."""
        found = self.child("probe", link_bytes={"cpu": 16 << 20, "gpu": 1 << 30})
        if "platform" not in found:
            sys.exit(f"JAX found no device: {found}")
        self.small = found["platform"] == "cpu"
        if self.small:
            self.environment, self.sizes = environment(dry=True) | self.cached(), SMALL
        self.hardware = found
        told = {name: self.environment.get(name) for name in SET}
        self.found |= {"dry run": self.small, "machine": found, "environment": told}
        self.save()
        gigabytes = lambda x: "unknown" if x is None else f"{x / 1e9:.0f} GB"
        said = f"{found['devices'][1]} x {found['devices'][0]}, {gigabytes(found['device_limit'])} for each"
        print(f"{said}; {gigabytes(found['host_available'])} of host memory; jax {found['versions']['jax']}")
        for name, speed in found.get("link", {}).items():
            ways = ", ".join(f"{way} {speed[way] / 1e9:.1f}" for way in ("H2D", "D2H", "each of both"))
            print(f"link, {name} of {speed['bytes'] >> 20} MiB: {ways} GB/s", flush=True)
        if "error" in found:
            print(found["error"])

    def cached(self):
        """Compiled programs kept for the session: a dry run is nearly all compilation."""
        self.cache = tempfile.TemporaryDirectory()
        least = {"MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
        kept = {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in least.items()}
        return {"JAX_COMPILATION_CACHE_DIR": self.cache.name, **kept}

    def check(self):
        self.found["check"] = found = self.child("check", limit=self.args.budget)
        self.save()
        print(f"remat_policy: {found.get('remat_policy')}")
        for row in found.get("rows", ()):
            shown = row.get("error") or ", ".join(f"{k} {row[k]:.2g}" for k in row if k.startswith("to "))
            print(
                f"{'ok  ' if row['ok'] else 'BAD '} stage {row['stage']} {row['precision']} {row['offload']}: {shown}"
            )
        print(f"check: {found.get('status')}, {'all ok' if found.get('ok') else 'NOT all ok'}", flush=True)

    def one(self, name, model, mode, steps):
        """Run a configuration, unless it cannot fit or no time is left."""
        for row in self.found["rows"]:
            if row["model"] == name and row["mode"] == mode and row["status"] == "ran":
                return row
        if self.args.rows:
            model = {**model, "rows": self.args.rows}
        count = self.hardware["devices"][1]
        needs = floors(parameters(model), MODES[mode], count)
        row = {"model": name, "mode": mode, "made of": model, "needs at least": needs}
        reason = self.refusal(needs)
        if reason:
            row["status"] = reason
        else:
            bytes_each = (4 << 20) if self.small else 256 << 20
            row |= self.child("train", model=model, mode=MODES[mode], steps=steps, link_bytes=bytes_each)
        rows = [r for r in self.found["rows"] if (r["model"], r["mode"]) != (name, mode)]
        self.found["rows"] = [*rows, row]
        self.save()
        print(line(row), flush=True)
        return row

    def refusal(self, needs):
        """Why a configuration is not tried; empty if it is."""
        gpu = self.hardware["device_limit"]
        if gpu is not None and needs["device"] > gpu:
            return f"skipped: needs at least {needs['device'] / 1e9:.0f} GB of {gpu / 1e9:.0f} on a device"
        # of this moment: what ended gives its memory back
        host = available_bytes()
        if host is not None and needs["host"] > host:
            return f"skipped: needs at least {needs['host'] / 1e9:.0f} GB of {host / 1e9:.0f} in host memory"
        if self.left() < (5 if self.small else 30):
            return "skipped: the budget was used up"
        return ""

    def largest(self, mode):
        """Let the depth of the widest model grow until it does not train, which three steps decide."""
        ran = [r for r in self.found["rows"] if r["mode"] == mode and r["status"] == "ran" and r["model"] == "8B"]
        layers = self.sizes["8B"]["layers"]
        most, why = (ran[0]["parameters"] if ran else None), ""
        tries = 2 if self.small else 20
        layers = round(layers * GROWTH) if ran else layers
        down = False
        while tries and not why:
            tries -= 1
            model = {**self.sizes["8B"], "layers": layers}
            row = self.one(f"8B wide, {layers} layers", model, mode, 1)
            if row["status"] == "ran":
                most = max(most or 0, row["parameters"])
                if down:
                    break
                layers = round(layers * GROWTH)
            elif most is None and layers > 4 and "budget" not in row["status"]:
                down, layers = True, round(layers / GROWTH)
            else:
                why = f"{parameters(model) / 1e9:.2f}B: {row['status']}"
        self.found["largest"][mode] = {"parameters": most, "the next": why or "not tried"}
        self.save()


def environment(*, dry):
    """The environment of the processes; what is set already is left."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), str(HERE), env.get("PYTHONPATH")]))
    for name, value in SET.items():
        env.setdefault(name, value)
    host = available_bytes()
    if host is not None:
        # JAX pins 64 GB at most by itself; a tenth is left to the rest of the process
        env.setdefault(CAP_VARIABLE, str(max(1, host * 9 // 10 >> 30)))
    if dry:
        env["JAX_PLATFORMS"] = "cpu"
        env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
    return env


SET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}


def parameters(model):
    """About how many a model has; vectors are left out."""
    vocabulary = {"gpu": 32768, "tiny": 128}[model["base"]]
    return 12 * model["layers"] * model["width"] ** 2 + vocabulary * model["width"]


def floors(count, mode, devices):
    """Bytes that a device and the host need at least, activations left out.

    Without offload: float32 parameters, gradients and two moments. With it: bfloat16 parameters and their copy,
    or gradients, whichever is more; what stays on the device of 12 bytes of state; while the state is made, the
    shards of the largest leaf, a third of the model.
    """
    if mode is None:
        return {"device": 16 * count // devices, "host": 0}
    offloaded = mode.get("fraction", 1.0)
    resident = 12 * (1 - offloaded)
    device = round(count * (resident + max(2 + 4, 2 + 2 + 4 * offloaded)) / devices)
    return {"device": device, "host": round(12 * offloaded * count)}


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


if __name__ == "__main__":
    main()
