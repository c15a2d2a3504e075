"""Measure zerojax on GPUs in ten minutes: one command, one JSON file, one picture.

    python benchmarks/gpu.py                                    all parts, results/gpu.json and results/gpu.png
    python benchmarks/gpu.py --parts speed plan --resume        some parts, added to what the file has
    python benchmarks/gpu.py --parts check speed --budget 120   a piece of two minutes; --resume adds the next
    python benchmarks/gpu.py --dry-run                          tiny models on two simulated CPU devices

If JAX finds no GPU, or with --dry-run, tiny models run on simulated devices. That only tries the script: its figures
mean nothing, and file and picture say so. The parts run in this order while the budget lasts, and the script says which
parts it left out:

check        each stage with every way of offloading against plain optax, on a tiny model; if one differs nothing
             is measured
speed        a GPT of 1.3B parameters, with attention of Pallas and of cuDNN: stage 3, plain jit with optax, and on
             several GPUs jit's own sharding and a model that gathers each layer by hand; round by round in one
             process, after their losses over three steps were found equal
offload      1.5B with optimizer state on the device, offloaded in several ways, and with parameters offloaded too.
             All begin from the same values, and their losses are compared with those without offload
mocked       a program of eight devices on one GPU, whose collectives do nothing: its memory and its time
torch        FSDP2 with its blocks compiled, eager, and with its offload to the CPU (one GPU, if torch is installed)
fp8          stage 3 with Flax's FP8 layers against bfloat16
memory       `train_step(memory=)`: the compiled peak against the allocator's
disk         parameters on disk against in memory
plan         `zerojax.plan`'s peak and least time against the allocator's peak and the step's time
activations  layers' inputs in host memory between the passes, against on the device
checkpoint   how long a save blocks the loop (`checkpoint.py`)
largest      the largest model that trains, with and without offloaded optimizer state

MFU is the model's FLOPs over the device's peak in bfloat16. The FLOPs are 6 per parameter and token, and 12 x layers x
width x length for attention. Recomputation is not counted, and the causal mask is not subtracted. Every configuration
except those of `speed` has its own process, so memory begins empty. `peak` is the allocator's. Making the state may
need more than a step, so `compiled` says what the compiler gives for the step's first program, the larger one. `share`
is the least time in which the link could carry the update's bytes, over the time from complete gradients to the
complete state. The link is measured alone, with both directions at once.
"""

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

import gpu_expected
import gpu_picture
import gpu_text

from zerojax.offload.host import CAP_VARIABLE, available_bytes

HERE = pathlib.Path(__file__).parent
# After the check and the speed, what is known least comes first.
MORE = ("mocked", "torch", "fp8", "memory", "disk", "plan", "activations", "checkpoint", "largest")
PARTS = ("check", "speed", "offload", *MORE)
SIZES = {
    "1.5B": {"base": "gpu", "width": 2048, "layers": 28},
    "8B": {"base": "gpu", "width": 4096, "layers": 39},
}
SMALL = {
    "1.5B": {"base": "tiny", "width": 64, "layers": 2},
    "8B": {"base": "tiny", "width": 96, "layers": 6},
}
MODES = {
    "none": None,
    "device": {"update": "device"},
    "host": {"update": "host"},
    "half": {"update": "device", "fraction": 0.5},
    "params": {"update": "device", "params": "host"},
}
ATTENTION = ("pallas", "cudnn")  # of `yardstick.attention_of`; verdicts are about the last
GPU_MODES = ("none", "device", "host", "params")  # "half" is between
DRY_MODES = ("none", "params")
CACHE = pathlib.Path(tempfile.gettempdir(), "zerojax-gpu-programs")
BUDGET = "left out: the budget was used up; --resume goes on"
SAME_LOSSES = 1e-3  # relative; two ways of offloading were 1e-4 apart on an H100 after six steps in bfloat16
GROWTH = 1.25


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--modes", nargs="*", choices=list(MODES), help="of offload, in this order (default: four; dry: two)"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps, or rounds of ways that are compared")
    parser.add_argument("--rows", type=int, help="sequences of each device where offload is measured (8 on GPUs)")
    parser.add_argument("--budget", type=float, default=600, help="seconds for all; what is left out is said")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one configuration")
    parser.add_argument("--topology", help="what plan compiles for (default: the GPUs that are there)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on two simulated CPU devices")
    parser.add_argument("--resume", action="store_true", help="keep what --out has, and run what it lacks")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "gpu.json")
    return parser.parse_args()


def main():
    args, begin = arguments(), time.monotonic()
    bench = Bench(args)
    bench.probe()
    for part in (part for part in PARTS if part in args.parts):
        getattr(bench, part)()
        if part == "check" and not bench.found["check"].get("ok"):
            sys.exit("The numbers of the check above are wrong, so nothing is measured.")
    print(gpu_text.table(bench.found))
    bench.found["expected"] = gpu_expected.verdicts(bench.found)
    bench.save()
    print(gpu_expected.table(bench.found["expected"]))
    gpu_picture.draw(bench.found, args.out.with_suffix(".png"))
    print(f"took {time.monotonic() - begin:.0f} s, and {processor_seconds():.0f} s of the host's processors")


class Bench:
    """One session: what was found so far, and how much time is left."""

    def __init__(self, args):
        self.args = args
        self.end = time.monotonic() + args.budget
        self.found = {"date": datetime.date.today().isoformat(), "rows": []} | {part: {} for part in ("speed", *MORE)}
        if args.resume and args.out.exists():
            self.found |= json.loads(args.out.read_text())
        self.environment = environment(dry=args.dry_run)
        self.sizes, self.small = SIZES, False

    def save(self):
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.found, indent=2) + "\n")

    def left(self):
        return self.end - time.monotonic()

    def child(self, work, *, limit=None, **given):
        """Run something in a process of its own: what it wrote, whether or not it lived to the end."""
        limit, before = max(1.0, min(limit or self.args.limit, self.left())), processor_seconds()
        with tempfile.TemporaryDirectory() as folder:
            out, log = pathlib.Path(folder, "notes.json"), pathlib.Path(folder, "log")
            command = [sys.executable, str(HERE / "gpu_work.py"), json.dumps({"work": work, **given}), str(out)]
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
        return notes | {"processor_s": processor_seconds() - before}

    def probe(self):
        """What hardware there is; on CPU everything from here on is small."""
        found = self.child("probe", link_bytes={"cpu": 16 << 20, "gpu": 1 << 30})
        if "platform" not in found:
            sys.exit(f"JAX found no device: {found}")
        self.small = found["platform"] == "cpu"
        if self.small:
            self.environment, self.sizes = environment(dry=True), SMALL
        self.environment |= self.cached()
        if self.args.modes is None:
            self.args.modes = list(DRY_MODES if self.small else GPU_MODES)
        self.hardware = found
        self.size, self.named = ("tiny", "tiny") if self.small else ("gpu", "1.3B")
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
        """Compiled programs are kept between the parts, and on GPUs between the pieces of a session.

        A kernel that XLA chose by measuring is chosen once, so programs that are compared run the same kernels.
        """
        self.cache = tempfile.TemporaryDirectory() if self.small else None
        folder = self.cache.name if self.cache else str(CACHE)
        least = {"MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
        kept = {f"JAX_PERSISTENT_CACHE_{name}": value for name, value in least.items()}
        return {"JAX_COMPILATION_CACHE_DIR": folder, **kept}

    def check(self):
        # The tests compare every stage and every way on CPUs. A dry run checks only the kit.
        given = {"stages": [3], "only": ["none", "host/device", "host/host"]}
        given |= {"only": ["host/device half"]} if self.small else {}
        self.found["check"] = found = self.child("check", limit=self.args.budget, **given)
        self.save()
        for row in found.get("rows", ()):
            shown = row.get("error") or ", ".join(f"{k} {row[k]:.2g}" for k in row if k.startswith("to "))
            print(
                f"{'ok  ' if row['ok'] else 'BAD '} stage {row['stage']} {row['precision']} {row['offload']}: {shown}"
            )
        print(f"check: {found.get('status')}, {'all ok' if found.get('ok') else 'NOT all ok'}", flush=True)

    def measured(self, part, name, work, **given):
        """One configuration of a part, unless it ran already or no time is left."""
        if self.found[part].get(name, {}).get("status") == "ran":
            return
        if self.left() < (5 if self.small else 30):
            row = {"status": BUDGET}
        else:
            row = self.child(work, **given)
        self.found[part][name] = row
        self.save()
        print(f"{part}, {name}: {gpu_text.summary(row)}", flush=True)

    def speed(self):
        for kind in ("auto",) if self.small else ATTENTION:
            # The compiler knows nothing of a kernel: on several GPUs, it is in a `shard_map`.
            given = "shard_map" if kind == "pallas" and self.hardware["devices"][1] > 1 else kind
            name = f"{self.named}, {kind}"
            self.measured("speed", name, "speed", size=self.size, rounds=self.args.steps, attention=given)

    def mocked(self):
        # 24 layers and the allocator: an eighth of 1.3B's state takes 2 GB
        given = {"size": self.size, "rounds": 3, "layers": 2 if self.small else 24}
        self.measured("mocked", "eight devices", "mocked", **given)

    def fp8(self):
        layers = 1 if self.small else 24
        self.measured("fp8", self.named, "fp8", size=self.size, rounds=self.args.steps, layers=layers)

    def memory(self):
        given = {"size": self.size, "rounds": self.args.steps, "memory": "64 MB" if self.small else "40 GB"}
        self.measured("memory", given["memory"], "budget", **given)

    def disk(self):
        given = {"size": self.size, "rounds": 1 if self.small else 3, "layers": 2 if self.small else 6}
        self.measured("disk", f"{given['layers']} layers", "disk", **given)

    def plan(self):
        topology = self.args.topology or ("h200:2" if self.small else None)
        self.measured("plan", self.named, "planned", size=self.size, rounds=self.args.steps, topology=topology)

    def offload(self):
        for mode in self.args.modes:
            self.one("1.5B", self.sizes["1.5B"], mode, min(3, self.args.steps))
        ran = {row["mode"]: row for row in self.found["rows"] if (row["model"], row["status"]) == ("1.5B", "ran")}
        for mode, row in ran.items() if "none" in ran else ():
            row["to no offload"] = largest_difference(row["losses"], ran["none"]["losses"])
            agree = "WRONG" if row["to no offload"] > SAME_LOSSES else "ok"
            print(f"{agree}: losses with {mode} differ from those without offload by {row['to no offload']:.2g}")
        self.save()

    def torch(self):
        left_out = None
        if importlib.util.find_spec("torch") is None:
            left_out = "left out: torch is not installed (extra peers)"
        elif not self.small and self.hardware["devices"][1] > 1:
            left_out = "left out: there are several GPUs, which need a process each: peers.py"
        ways = {"FSDP2": "fsdp2", "FSDP2, offload": "fsdp2_offload", "FSDP2, compiled": "fsdp2_compiled"}
        missing = [name for name in ways if self.found["torch"].get(name, {}).get("status") != "ran"]
        if left_out or self.left() < 30:
            self.found["torch"] |= {name: {"status": left_out or BUDGET} for name in missing}
        elif missing:
            # One process: making the weights takes longer than the steps.
            given = {"size": self.size, "rounds": self.args.steps, "ways": [ways[name] for name in missing]}
            row = self.child("torch_steps", **given)
            ran = row.pop("ways_of_torch", {})
            self.found["torch"] |= {name: ran.get(ways[name], row) for name in missing}
        for name in missing:
            print(f"torch, {name}: {gpu_text.summary(self.found['torch'][name])}", flush=True)
        self.save()

    def activations(self):
        ways = {"in host memory": True} if self.small else {"on the device": False, "in host memory": True}
        for name, offload in ways.items():
            given = {"size": self.size, "rounds": self.args.steps, "offload": offload}
            self.measured("activations", name, "activations", **given)

    def checkpoint(self):
        megabytes = 8 if self.small else 4000
        self.measured("checkpoint", f"{megabytes} MB", "blocking", megabytes=megabytes, rounds=2)

    def largest(self):
        for mode in ("none",) if self.small else ("none", "device", "params"):
            if mode in self.args.modes:
                self.grow(mode)

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
        print(gpu_text.line(row), flush=True)
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

    def grow(self, mode):
        """Let the depth of the widest model grow until it does not train, which three steps decide."""
        ran = [r for r in self.found["rows"] if r["mode"] == mode and r["status"] == "ran" and r["model"] == "8B"]
        layers = self.sizes["8B"]["layers"]
        most, why = (ran[0]["parameters"] if ran else None), ""
        tries = 1 if self.small else 20
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


def largest_difference(losses, others):
    """Largest relative difference of losses that belong together."""
    return max(abs(a / b - 1) for a, b in zip(losses, others, strict=True))


def processor_seconds():
    """Seconds of the host's processors that ended processes took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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
    resident, on_host = 12 * (1 - offloaded), 2 if "params" in mode else 0
    device = round(count * (resident - on_host + max(2 + 4, 2 + 2 + 4 * offloaded)) / devices)
    return {"device": device, "host": round((12 * offloaded + on_host) * count)}


if __name__ == "__main__":
    main()
