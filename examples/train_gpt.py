"""Train a byte-level GPT at any ZeRO stage, on text that every machine has.

    python examples/train_gpt.py                           stage 3, all GPUs or 8 simulated devices
    python examples/train_gpt.py --stage 1 --devices 2     another stage, another number of devices
    python examples/train_gpt.py --precision bf16          compute in bfloat16, master weights in float32
    python examples/train_gpt.py --batch 64 --accumulate 4 each device's rows in four microbatches
    python examples/train_gpt.py --tensor-parallel 2       heads and features over 2 of the devices, ZeRO over the rest
    python examples/train_gpt.py --gather int8 --reduce int4  sends parameters and gradients quantised
    python examples/train_gpt.py --offload host            optimizer state in host memory (or: disk)
    python examples/train_gpt.py --data book.txt           your own text
    python examples/train_gpt.py --compiled programs       keep compiled programs: the next start compiles none
    python examples/train_gpt.py --width 512 --layers 8 --steps 5000 --lr 1e-3
    zerojax plan examples/train_gpt.py --topology h200:8 -- --width 4096 --layers 32 --batch 64

The model learns the source of Python's standard library, and is evaluated on held-out files, in
bits per byte. At the end a table compares the bytes per device at every stage with the paper's
formula, two pictures are written to the folder `--out`, and the model generates a few lines.
`python examples/generate.py` generates more.

Checkpoints are written to `--out` too. Stop the run with Ctrl-C, and the same command continues it,
also at another stage or on another number of devices. `--fresh` starts again.
"""

import argparse
import contextlib
import functools
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from gpt import GPT, generator, muon_matrices, next_byte_loss
from memory import stage_memory
from pictures import draw_loss, draw_memory, progress_bar, show_memory
from rich.console import Console
from text import Corpus, even_windows, load, random_windows

from zerojax import Offload, Precision, Wire, ZeroState, ZeroTransformation, cache_compilations, report, zero_shard
from zerojax.checkpoint import Checkpointer, on_preemption

SIMULATED_DEVICES = 8
EVALUATIONS = 5
HELD_OUT_BYTES = 2**16
SAMPLE_BYTES = 150
WAITS = {"host": "in host memory", "disk": "on disk"}
FORMATS = ("int4", "int8", "float8_e4m3fn", "float8_e5m2")
PRECISIONS = {"fp32": Precision.fp32, "bf16": Precision.bf16, "fp16": Precision.fp16}


def main() -> None:
    args = options()
    mesh = mesh_of(args.devices, args.tensor_parallel)
    if args.batch % (parts := mesh.shape["data"] * args.accumulate):
        over = f"{mesh.shape['data']} devices" + f" of {args.accumulate} microbatches each" * (args.accumulate > 1)
        raise SystemExit(f"--batch {args.batch} does not divide over {over}: give a multiple of {parts}.")
    corpus = load(args.data)
    if min(map(len, corpus)) <= args.seq:
        raise SystemExit(f"Too little text: {len(corpus.held_out)} bytes to hold out. Give a longer --data FILE.")
    model, init = model_of(args)
    shard = functools.partial(transformation, args, mesh)
    tx = shard(args.stage)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.compiled:
        cache_compilations(args.compiled)
    state = tx.create(tx.init_params(init))
    if state.plan.offloaded:
        print(f"Optimizer state waits {WAITS[args.offload]}")
    if args.fresh:
        shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
    with Checkpointer(args.out / "checkpoints", keep=2, every=args.save_every) as checkpoints:
        state, curve, start = resume(state, checkpoints)
        state, curve = train(
            tx,
            state,
            next_byte_loss(model),
            corpus,
            args,
            steps=args.steps,
            curve=curve,
            start=start,
            saves=checkpoints,
        )
    if args.steps not in curve.held_out:
        print(f"Stopped after step {max(curve.train)}. The same command goes on from there.")
        return

    shapes = jax.eval_shape(init)
    memory = [stage_memory(shard(stage), shapes, accumulate=args.accumulate) for stage in (0, 1, 2, 3)]
    memory[args.stage].found.update(report(state).bytes)
    show_memory(memory, trained=args.stage, devices=mesh.size, mixed=args.precision != "fp32")
    pictures = f"Pictures: {args.out}/loss.png, memory.png"
    try:
        draw_memory(memory, args.out / "memory.png", devices=mesh.size)
        draw_loss(curve.train, curve.held_out, args.out / "loss.png")
    except ModuleNotFoundError:
        pictures = "No pictures, because matplotlib is not installed"
    print(f"It writes:\n{written(tx, model, state, 'def ', SAMPLE_BYTES)}\n")
    print(f"Held out: {curve.held_out[args.steps]:.3f} bits per byte. {pictures}")


def make_step() -> tuple:
    """Return what `zerojax plan` needs: the step, and the shapes of its state and batch. Nothing is trained."""
    args = options()
    tx = transformation(
        args, mesh_of(args.devices, args.tensor_parallel), args.stage
    )  # first, because it sets the number of simulated devices
    model, init = model_of(args)
    batch = jax.ShapeDtypeStruct((args.batch, args.seq + 1), jnp.int32)
    return tx.train_step(next_byte_loss(model), accumulate=args.accumulate), tx.create(jax.eval_shape(init)), batch


def model_of(args: argparse.Namespace) -> tuple[GPT, Callable]:
    """Return the model, and the function that makes its parameters."""
    model = GPT(args.width, args.layers, args.heads, axis="model" if args.tensor_parallel > 1 else None)
    return model, functools.partial(model.init, jax.random.key(args.seed), jnp.zeros((1, args.seq), jnp.int32))


def optimizer_of(args: argparse.Namespace) -> optax.GradientTransformation:
    """Return the optimizer, which is plain optax."""
    rate = schedule(args.lr, args.steps)
    if args.optimizer == "muon":  # Updates have one size for all shapes, so that Adam's rate and decay fit.
        options = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": muon_matrices}
        return optax.contrib.muon(rate, adam_b2=0.95, weight_decay=0.1, adam_weight_decay=0.1, **options)
    return optax.adamw(rate, b2=0.95, weight_decay=0.1)


def transformation(args: argparse.Namespace, mesh: jax.sharding.Mesh, stage: Literal[0, 1, 2, 3]) -> ZeroTransformation:
    """Return the sharded optimizer of a stage. Stage 0 has nothing to offload."""
    offload = None
    if args.offload and stage:
        offload = Offload(optimizer=args.offload, path=args.out / "state" if args.offload == "disk" else None)
    gather = args.gather if stage == 3 else None  # the table covers every stage, and only stage 3 gathers
    wire = Wire(gather, args.reduce) if gather or (args.reduce and stage) else None
    precision = PRECISIONS[args.precision]()
    return zero_shard(optimizer_of(args), stage=stage, mesh=mesh, precision=precision, offload=offload, wire=wire)


class Curve(NamedTuple):
    """Bits per byte by step."""

    train: dict[int, float]
    held_out: dict[int, float]


def resume(state: ZeroState, checkpoints: Checkpointer) -> tuple[ZeroState, Curve, int]:
    """Return the state to continue from, the curve so far, and the number of steps done."""
    if checkpoints.latest() is None:
        return state, Curve({}, {}), 0
    try:
        found = checkpoints.restore(state, fallback=True)
    except ValueError as error:
        run = checkpoints.directory.parent
        raise SystemExit(
            f"{error}\nThe run in {run} was another. Give its options, another --out, or --fresh."
        ) from error
    print(f"Going on from step {found.step}, found in {checkpoints.directory}")
    return found.state, Curve(**found.data), found.step


def train(
    tx: ZeroTransformation,
    state: ZeroState,
    loss: Callable,
    corpus: Corpus,
    args: argparse.Namespace,
    *,
    steps: int,
    curve: Curve | None = None,
    start: int = 0,
    saves: Checkpointer | None = None,
) -> tuple[ZeroState, Curve]:
    """Take steps, and evaluate the model on held-out text before, after and a few times in between.

    With `saves`, Ctrl-C or SIGTERM ends training after the current step, which is saved.
    """
    step = tx.train_step(loss, accumulate=args.accumulate)
    held_out_loss = tx.eval_step(loss)
    rows = round_up(HELD_OUT_BYTES // args.seq, tx.config.data.workers)
    held_out = even_windows(corpus.held_out, rows=rows, length=args.seq)
    every = max(1, steps // EVALUATIONS)
    curve = curve or Curve({}, {})
    progress, task = progress_bar(steps, tokens_per_step=args.batch * args.seq)

    def judge(i: int, params) -> None:
        curve.held_out[i] = float(held_out_loss(params, held_out)) / math.log(2)
        progress.console.print(f"step {i:5d}   held out {curve.held_out[i]:.3f} bits per byte")

    with progress, on_preemption() if saves else contextlib.nullcontext() as preemption:
        progress.update(task, completed=start)
        if not start:
            judge(0, state.params)
        for i in range(start + 1, steps + 1):
            windows = random_windows(corpus.train, rows=args.batch, length=args.seq, seed=args.seed, step=i)
            state, metrics = step(state, windows)
            curve.train[i] = float(metrics["loss"]) / math.log(2)
            if i % every == 0 or i == steps:
                judge(i, state.params)
            progress.update(task, advance=1, loss=curve.train[i])
            if saves and preemption:
                stop = preemption.reached(i)
                saves.save(state, curve._asdict(), step=i, force=stop or i == steps)
                if stop:
                    break
    return state, curve


def written(tx: ZeroTransformation, model: GPT, state: ZeroState, prompt: str, count: int, **options) -> str:
    """Return the prompt and `count` bytes that the model generates after it."""
    given = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)[None]
    drawn = generator(tx, model, count, **options)(state.params, given, jax.random.key(0))
    return prompt + bytes(np.asarray(drawn, np.uint8)).decode(errors="replace")


def mesh_of(count: int | None, tensor_parallel: int = 1) -> jax.sharding.Mesh:
    """Make a mesh of the first `count` devices, with an axis "model": GPUs if there are any, or simulated ones."""
    jax.config.update("jax_num_cpu_devices", count or SIMULATED_DEVICES)
    devices = jax.devices()[:count]
    if count is not None and len(devices) < count:
        raise SystemExit(f"--devices {count}: there are {len(devices)} {devices[0].device_kind}.")
    Console().print(f"{len(devices)} × {devices[0].device_kind}{' (simulated)' * (devices[0].platform == 'cpu')}")
    if len(devices) % tensor_parallel:
        raise SystemExit(f"--tensor-parallel {tensor_parallel} does not divide {len(devices)} devices.")
    sizes = {"data": len(devices) // tensor_parallel} | ({"model": tensor_parallel} if tensor_parallel > 1 else {})
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices)


def schedule(peak: float, steps: int) -> optax.Schedule:
    """Warm up over a twentieth of the steps, then fall along a cosine."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 20), steps, peak / 20)


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def options(parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Read the options of a run, and the options that `parser` already has."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = parser or argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument(
        "--devices", type=positive, help=f"number of devices (default: all GPUs, or {SIMULATED_DEVICES} simulated)"
    )
    parser.add_argument("--steps", type=positive, default=800, help="(default: %(default)s)")
    parser.add_argument(
        "--batch", type=positive, default=16, help="windows per step, over all devices (default: %(default)s)"
    )
    parser.add_argument("--accumulate", type=positive, default=1, help="microbatches per step (default: %(default)s)")
    parser.add_argument(
        "--precision", default="fp32", choices=PRECISIONS, help="type to compute in (default: %(default)s)"
    )
    for name, of in (("--gather", "stage 3: parameters"), ("--reduce", "gradients")):
        parser.add_argument(name, choices=FORMATS, help=f"format in which {of} are sent (default: exact)")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"), help="(default: %(default)s)")
    parser.add_argument("--offload", choices=("host", "disk"), help="where optimizer state is (default: the device)")
    parser.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="DEVICES",
        help="devices that share heads and features (default: %(default)s)",
    )
    parser.add_argument("--seq", type=positive, default=128, help="bytes per window (default: %(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="(default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and data (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to learn (default: the standard library)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="folder for checkpoints and pictures (default: %(default)s)"
    )
    parser.add_argument(
        "--save-every", type=positive, default=100, metavar="STEPS", help="between checkpoints (default: %(default)s)"
    )
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="keep compiled programs in a folder")
    parser.add_argument("--fresh", action="store_true", help="remove the checkpoints in --out and start again")
    args = parser.parse_args()
    if args.offload and not args.stage:
        parser.error("--offload needs --stage 1, 2 or 3: stage 0 divides nothing")
    if (args.gather and args.stage < 3) or (args.reduce and not args.stage):
        parser.error("--gather needs --stage 3, and --reduce --stage 1, 2 or 3")
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} must be a multiple of twice --heads {args.heads}")
    if args.heads % args.tensor_parallel:
        parser.error(f"--heads {args.heads} must be a multiple of --tensor-parallel {args.tensor_parallel}")
    if args.data and not args.data.is_file():
        parser.error(f"--data {args.data} is not a file")
    return args


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, is {value}")
    return value


if __name__ == "__main__":
    main()
