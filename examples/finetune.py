"""Fine-tune a pretrained GPT with LoRA: from safetensors to safetensors, and on from where it was killed.

    python examples/finetune.py                             LoRA, stage 3, all GPUs or 8 simulated devices
    python examples/finetune.py --rank 0 --lr 1e-3          all parameters
    python examples/finetune.py --base FOLDER --out FOLDER  safetensors of an earlier run as the base

Nothing is downloaded: without `--base`, a small model first learns the source of Python's standard library. Then it
learns the prose of Python's language reference, as `help()` shows it. The same command goes on from the last
checkpoint, also at another stage or on other devices. docs/finetune.md explains the program.

LoRA (Hu et al. 2021, arXiv 2106.09685) adds a product with two thin matrices to the product with each frozen matrix W:
x W + x A B. B starts at zero, so that training starts from the base model.
"""

import argparse
import csv
import functools
import math
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from gpt import GPT, generator, next_byte_loss
from text import Corpus, even_windows, load, part, pieces, random_windows
from train_gpt import SIMULATED_DEVICES, mesh_of, positive

import zerojax
from zerojax import Precision, zero_shard
from zerojax.checkpoint import Checkpointer, export, import_params, on_preemption

LAYERS, HEADS = 4, 4
HELD_OUT_ROWS = 512
PROMPT = np.frombuffer(b"An assignment ", np.uint8).astype(np.int32)[None]


def main() -> None:
    args = options()
    mesh, model, corpus = mesh_of(args.devices), GPT(args.width, LAYERS, HEADS), prose()
    if args.base is None:
        args.base = args.out / "base"
        make_base(args, mesh, model)

    key = jax.random.key(args.seed)
    init = with_adapters(functools.partial(model.init, key, jnp.zeros((1, args.seq), jnp.int32)), args.rank)
    loss = with_adapters(next_byte_loss(model), args.rank)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.lr, max(1, args.steps // 20), args.steps, args.lr / 20)
    tx = zero_shard(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01, mask=decayed)),
        stage=args.stage,
        mesh=mesh,
        precision=Precision.bf16(keep=lambda path, leaf: "RMSNorm" in path),
        trainable=(lambda path, leaf: "lora" in path) if args.rank else None,
    )
    params = import_params(args.base, tx.init_params(init), partial=lambda path: "lora" in path)
    state = tx.create(params)
    step = tx.train_step(loss, accumulate=args.accumulate, max_skips=10)
    evaluate = tx.eval_step(loss)
    generate = with_adapters(generator(tx, model, 80), args.rank)
    held_out = even_windows(corpus.held_out, rows=HELD_OUT_ROWS, length=args.seq)

    lowest = {"best_fn": lambda metrics: metrics["held_out"], "best_mode": "min"}
    with Checkpointer(args.out / "checkpoints", keep=1, **lowest) as checkpoints, on_preemption() as preemption:
        start = 0
        if checkpoints.latest() is not None:
            restored = checkpoints.restore(state, fallback=True)
            state, start = restored.state, restored.step
        log, stop = Log(args.out, start), False
        print(f"From step {start}: held out {bits(evaluate(state.params, held_out)):.3f} bits per byte", flush=True)
        for i in range(start + 1, args.steps + 1):
            windows = random_windows(corpus.train, rows=args.batch, length=args.seq, seed=args.seed, step=i)
            state, metrics = step(state, windows)
            scalars = {"loss": bits(metrics["loss"]), "grad_norm": metrics["grad_norm"], "learning_rate": rate(i - 1)}
            judged = i % args.eval_every == 0 or i == args.steps
            if judged:
                scalars["held_out"] = bits(evaluate(state.params, held_out))
                sample = bytes(np.asarray(generate(state.params, PROMPT, jax.random.key(i)), np.uint8)[0])
                print(
                    f"step {i}: held out {scalars['held_out']:.3f}, writes {sample.decode(errors='replace')!r}",
                    flush=True,
                )
            log.write(i, scalars)
            stop = preemption.reached(i)
            if judged or stop:
                checkpoints.save(state, step=i, metrics={"held_out": scalars.get("held_out", math.nan)})
            if stop:
                print(f"Stopped after step {i}. The same command goes on from there.")
                return
        if (best_step := checkpoints.best()) is None:
            raise SystemExit("The held-out loss was NaN at every evaluation.")
        best = checkpoints.restore(state, step=best_step)
    print(f"Best: step {best.step}, {bits(evaluate(best.state.params, held_out)):.3f} bits per byte")
    if not (tuned := args.out / f"tuned_{best.step}").exists():
        export(merged(tx.weights(best.state.params, best.state.opt_state), mesh), tuned)
    print(f"Its parameters, with merged adapters: {tuned}")


def with_adapters(call: Callable, rank: int) -> Callable:
    """Run `call`, and add to every dense layer the product with its two thin matrices. With rank 0, only run it.

    The adapters are used where the layer is, inside scan and remat, so that stage 3 still gathers layer by layer.
    """

    def add(layer, inputs, options, context):
        y = layer(*inputs, **options)
        module = context.module
        if not isinstance(module, nn.Dense | nn.DenseGeneral) or context.method_name != "__call__":
            return y
        x = inputs[0].reshape(*y.shape[:2], -1)  # (batch, position, channel): some layers take separate heads
        a = module.param("lora_a", nn.initializers.lecun_normal(), (x.shape[-1], rank))
        b = module.param("lora_b", nn.initializers.zeros, (rank, math.prod(y.shape[2:])))
        return y + (x @ a @ b).reshape(y.shape)

    def adapted(*args):
        with nn.intercept_methods(add):
            return call(*args)

    return adapted if rank else call


@functools.partial(jax.jit, static_argnums=1)
def merged(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Add the product of its adapters to each kernel, and return parameters of the model without adapters."""
    flat: Any = flatten_dict(zerojax.logical(params))
    replicated = jax.NamedSharding(mesh, jax.P())  # on Explicit axes, a product of two sharded matrices is an error
    for *layer, name in list(flat):
        if name == "lora_a":
            kernel = (*layer, "kernel")
            a, b = (jax.device_put(flat[(*layer, x)], replicated) for x in ("lora_a", "lora_b"))
            flat[kernel] += (a @ b).reshape(flat[kernel].shape)  # of all layers of a scan
    return unflatten_dict({path: x for path, x in flat.items() if "lora" not in path[-1]})


def decayed(params: Any) -> Any:
    """Say which parameters have weight decay: matrices, but not the scales of norms. A scan stacks both."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)


FIELDS: list[str] = ["step", "loss", "grad_norm", "learning_rate", "held_out"]


class Log:
    """Scalars of each step, in metrics.csv and, if tensorboardX is installed, for TensorBoard.

    A killed run may have written steps after its last checkpoint. They are taken again, so their rows are removed.
    """

    def __init__(self, folder: Path, start: int):
        self.rows: csv.DictWriter | None = None
        self.board: Any = None
        if jax.process_index():  # of several processes, the first writes
            return
        path, rows = folder / "metrics.csv", []
        if start and path.exists():
            rows = [row for row in csv.DictReader(path.read_text().splitlines()) if int(row["step"]) <= start]
        self.rows = csv.DictWriter(path.open("w", buffering=1), FIELDS)
        self.rows.writeheader()
        self.rows.writerows(rows)
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(str(folder / "board"), purge_step=start + 1)

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        values = {name: float(x) for name, x in scalars.items()}
        if self.rows:
            self.rows.writerow({"step": step, **values})
        if self.board:
            for name, x in values.items():
                self.board.add_scalar(name, x, step)


def bits(nats: Any) -> float:
    return float(nats) / math.log(2)


def make_base(args: argparse.Namespace, mesh: jax.sharding.Mesh, model: GPT) -> None:
    """Train a model on source code, and write it to `args.base`, unless an earlier call has."""
    if args.base.exists():
        return
    print(f"The base model learns source code: {args.base_steps} steps", flush=True)
    tx = zero_shard(optax.adamw(3e-3), stage=args.stage, mesh=mesh)
    init = functools.partial(model.init, jax.random.key(args.seed), jnp.zeros((1, args.seq), jnp.int32))
    state, step, text = tx.create(tx.init_params(init)), tx.train_step(next_byte_loss(model)), load().train
    for i in range(args.base_steps):
        state, _ = step(state, random_windows(text, rows=args.batch, length=args.seq, seed=args.seed, step=i))
    export(state, args.base)


def prose() -> Corpus:
    """Return Python's language reference, with each paragraph once, even if several topics of `help()` quote it."""
    topics = pydoc_data.topics.topics.values()
    paragraphs = {" ".join(p.split()): p for topic in topics for p in topic.split("\n\n")}
    return part(pieces("\n\n".join(paragraphs.values()).encode()))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="safetensors to begin with (default: made here)")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="(default: %(default)s)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument(
        "--devices", type=positive, help=f"number of devices (default: all GPUs, or {SIMULATED_DEVICES} simulated)"
    )
    parser.add_argument("--rank", type=int, default=4, help="of the adapters; 0 trains all (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=100, help="steps of fine-tuning (default: %(default)s)")
    parser.add_argument("--base-steps", type=positive, default=100, help="steps of pretraining (default: %(default)s)")
    parser.add_argument("--eval-every", type=positive, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=32, help="windows per step (default: %(default)s)")
    parser.add_argument("--accumulate", type=positive, default=2, help="microbatches per step (default: %(default)s)")
    parser.add_argument("--seq", type=positive, default=64, help="bytes per window (default: %(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="peak learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and data (default: %(default)s)")
    args = parser.parse_args()
    if args.width % (2 * HEADS):
        parser.error(f"--width {args.width} must be a multiple of twice {HEADS} heads")
    return args


if __name__ == "__main__":
    main()
