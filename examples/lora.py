"""Fine-tune a byte-level GPT with LoRA: only small adapters have gradients and optimizer state.

    python examples/lora.py                            stage 3, all GPUs or 8 simulated devices
    python examples/lora.py --stage 1 --rank 16        another stage, other adapters

A base model first learns the source of Python's standard library. Then it is frozen, and adapters
learn the prose of Python's language reference, as `help()` shows it. At the end the program prints
the bits per byte of held-out prose, before and after. It also compares the optimizer's bytes per
device, for training the adapters and for training everything.

LoRA (Hu et al. 2021, arXiv 2106.09685) adds a product with two thin matrices to the product with each
frozen matrix W: x W + x A B. B starts at zero, so that training starts from the base model.
"""

import argparse
import functools
import math
import pydoc_data.topics
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from gpt import GPT, next_byte_loss
from text import Corpus, load, part, pieces
from train_gpt import SIMULATED_DEVICES, mesh_of, positive, schedule, train

from zerojax import ZeroState, report, zero_shard

LAYERS, HEADS = 4, 4


def main() -> None:
    args = options()
    mesh = mesh_of(args.devices)
    if args.batch % mesh.size:
        raise SystemExit(f"--batch {args.batch} does not divide over {mesh.size} devices: give a multiple of them.")
    model = GPT(args.width, LAYERS, HEADS)
    init = functools.partial(model.init, jax.random.key(args.seed), jnp.zeros((1, args.seq), jnp.int32))

    print(f"The base model learns source code: {args.base_steps} steps")
    tx = zero_shard(optax.adamw(schedule(3e-3, args.base_steps)), stage=args.stage, mesh=mesh)
    base = tx.create(tx.init_params(init))
    base, _ = train(tx, base, next_byte_loss(model), load(), args, steps=args.base_steps)

    print(f"Its adapters learn prose: {args.steps} steps")
    tx = zero_shard(
        optax.adamw(schedule(args.lr, args.steps)),
        stage=args.stage,
        mesh=mesh,
        trainable=lambda path, leaf: "lora" in path,
    )
    adapted = tx.create(graft(base.params, tx.init_params(with_adapters(init, args.rank))))
    loss = with_adapters(next_byte_loss(model), args.rank)
    adapted, curve = train(tx, adapted, loss, prose(), args, steps=args.steps)
    summarize(base, adapted, curve.held_out, args.steps, devices=mesh.size)


def with_adapters(call: Callable, rank: int) -> Callable:
    """Run `call`, and add to every dense layer the product with its two thin matrices.

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

    return adapted


def graft(base: Any, fresh: Any) -> Any:
    """Replace the parameters of `fresh` that `base` has by those of `base`. All keep their shardings."""
    return unflatten_dict(flatten_dict(fresh) | flatten_dict(base))


def prose() -> Corpus:
    """Return Python's language reference, with each paragraph once, even if several topics of `help()` quote it."""
    topics = pydoc_data.topics.topics.values()
    paragraphs = {" ".join(p.split()): p for topic in topics for p in topic.split("\n\n")}
    return part(pieces("\n\n".join(paragraphs.values()).encode()))


def summarize(base: ZeroState, adapted: ZeroState, held_out: dict[int, float], steps: int, *, devices: int) -> None:
    """Print the losses before and after, and the sizes of what was trained."""
    trained, count = (
        sum(leaf.size for leaf in layout.params) for layout in (adapted.plan.trained, adapted.plan.layout)
    )
    found, everything = (report(state).bytes["opt_state"] / 1e3 for state in (adapted, base))
    print(f"Held out, prose: {held_out[0]:.3f} bits per byte before, {held_out[steps]:.3f} after")
    print(f"Trained: {trained:,} of {count:,} parameters ({trained / count:.1%})")
    print(
        f"Optimizer state on each of {devices} devices: {found:,.1f} kB, where training all takes {everything:,.1f} kB"
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument(
        "--devices", type=positive, help=f"number of devices (default: all GPUs, or {SIMULATED_DEVICES} simulated)"
    )
    parser.add_argument("--rank", type=positive, default=4, help="rank of the adapters (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=100, help="steps of fine-tuning (default: %(default)s)")
    parser.add_argument("--base-steps", type=positive, default=200, help="steps of pretraining (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="windows per step (default: %(default)s)")
    parser.add_argument("--seq", type=positive, default=64, help="bytes per window (default: %(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="(default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-2, help="peak learning rate (default: %(default)s)")
    parser.set_defaults(accumulate=1, seed=0)
    args = parser.parse_args()
    if args.width % (2 * HEADS):
        parser.error(f"--width {args.width} must be a multiple of twice {HEADS} heads")
    return args


if __name__ == "__main__":
    main()
