"""Train a small GPT on any number of processes, and continue after one of them died.

    zerojax launch --processes 2 --devices 4 examples/launch/train.py      here, on simulated devices
    sbatch examples/launch/slurm.sh                                        Slurm: one process per host
    kubectl apply -f examples/launch/jobset.yaml                           Kubernetes, with JobSet
    mpirun -n 2 python examples/launch/train.py                            Open MPI

JAX finds out from each of these which processes take part. Every process runs this program on the same data. The run
continues from the last checkpoint on any number of processes, with the same batches in the same order, and reads each
window once per epoch. If a step hangs because a process is gone, this process ends after `--timeout` seconds, so that
the launcher restarts the run.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt import GPT, next_byte_loss
from text import load

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, on_preemption
from zerojax.data import shard_batches

AGAIN = 75  # exit status that asks the launcher to restart; a step that hangs ends with it too


def main() -> int:
    args = options()
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = zero_shard(optax.adamw(3e-3), stage=args.stage, mesh=mesh)
    model = GPT(width=32, layers=2, heads=2)
    state = tx.create(tx.init_params(lambda: model.init(jax.random.key(0), np.zeros((1, args.seq), np.int32))))
    step = tx.train_step(next_byte_loss(model), timeout=args.timeout)
    windows = windows_of(load(args.data).train, args.seq)
    with Checkpointer(args.out, keep=2, every=args.save_every) as checkpoints, on_preemption() as preemption:
        start, history = 0, []
        if checkpoints.latest() is not None:
            state, history, start, *_ = checkpoints.restore(state, data=[], fallback=True)
        say(f"from step {start} on {jax.process_count()} processes, {jax.device_count()} devices")
        batches = shard_batches(batches_from(start, windows, args.batch), tx, rows="global")
        for number in range(start + 1, args.steps + 1):
            state, metrics = step(state, next(batches))
            history.append(float(metrics["loss"]))
            say(f"step {number} loss {history[-1]:.6f}")
            stop = preemption.reached(number)
            checkpoints.save(state, history, step=number, force=stop or number == args.steps)
            if stop:
                say(f"preempted after step {number}")
                return AGAIN
    return 0


def windows_of(text: np.ndarray, length: int) -> np.ndarray:
    """Cut a text into windows of `length` bytes and the byte that follows."""
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length].astype(np.int32)


def batches_from(step: int, windows: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """The batches after a step. Their order depends only on the number of the step, so no position is saved."""
    order = functools.lru_cache(2)(lambda epoch: np.random.default_rng(epoch).permutation(len(windows)))
    for first in itertools.count(step * rows, rows):
        yield windows[[order(n // len(windows))[n % len(windows)] for n in range(first, first + rows)]]


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=8, help="windows per step, over all processes (default: %(default)s)"
    )
    parser.add_argument("--seq", type=int, default=32, help="bytes per window (default: %(default)s)")
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to learn (default: the standard library)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/launch"), help="folder for checkpoints (default: %(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="limit of a step, in seconds (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
