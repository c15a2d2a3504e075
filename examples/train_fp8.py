"""Train a small model with Flax's FP8 layers at stage 3: parameters are gathered as float8.

    python examples/train_fp8.py                        all GPUs, or 8 simulated devices
    python examples/train_fp8.py --stage 1 --steps 100  another stage

Flax's FP8 layers keep a scale and a history of largest magnitudes for each operand, in the collection
`_overwrite_with_gradient`. The gradients of these variables are their new values. The example trains,
evaluates held-out rows, writes a checkpoint, and continues from it. At the end it prints the types in
which one step gathers parameters. GPUs gather float8. Simulated devices send float8 as float16.
"""

import argparse
import functools
import os
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops

from zerojax import Tuning, collectives, zero_shard
from zerojax.checkpoint import Checkpointer

WIDTH, HIDDEN, ROWS = 128, 512, 256


class Block(nn.Module):
    """A residual feed-forward block whose products take float8 operands."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
        return x + dense(WIDTH)(nn.gelu(dense(HIDDEN)(nn.LayerNorm()(x))))


class Model(nn.Module):
    """Four blocks, each rematerialised in the backward pass."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.remat(Block)()(x)
        return x


def loss(variables, batch):
    """Return the mean squared error."""
    return jnp.mean((Model().apply(variables, batch["x"]) - batch["y"]) ** 2)


def rows(key):
    """Return inputs, and targets that a fixed nonlinear function computes from them."""
    x = jax.random.normal(jax.random.key(key), (ROWS, WIDTH))
    mix = jax.random.normal(jax.random.key(-1), (WIDTH, WIDTH)) / WIDTH**0.5
    return {"x": x, "y": x + jnp.tanh(x @ mix)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps before the checkpoint (default: %(default)s)")
    args = parser.parse_args()
    tx = zero_shard(optax.adamw(1e-3), stage=args.stage, tuning=Tuning(persist_below=2048))
    state = tx.create(tx.init_params(Model().init, jax.random.key(0), jnp.zeros((1, WIDTH))))
    step, evaluate, held_out = tx.train_step(loss), tx.eval_step(loss), rows(10**6)
    print(f"Held out: {evaluate(state.params, held_out):.3f} before training")
    for k in range(args.steps):
        state, _ = step(state, rows(k))
    before = evaluate(state.params, held_out)
    with tempfile.TemporaryDirectory() as folder:
        with Checkpointer(folder) as checkpoints:
            checkpoints.save(state)
        with Checkpointer(folder) as checkpoints:
            state = checkpoints.restore(state).state
    print(f"Held out: {before:.3f} after {args.steps} steps, {evaluate(state.params, held_out):.3f} restored")
    for k in range(args.steps, 2 * args.steps):
        state, _ = step(state, rows(k))
    print(f"Held out: {evaluate(state.params, held_out):.3f} after {2 * args.steps} steps")
    compiled = jax.jit(tx.value_and_grad(loss)).lower(state.params, held_out).compile()
    gathers = [c for c in collectives(compiled) if c.kind == "all-gather"]
    print(f"Gathered as: {', '.join(sorted({c.dtype for c in gathers})) or 'nothing'}")


if __name__ == "__main__":
    main()
