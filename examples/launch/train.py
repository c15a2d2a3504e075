"""Train a small GPT on any number of processes, and continue after one of them died.

    python examples/launch/local.py --processes 2 --devices 4      here, on simulated devices
    sbatch examples/launch/slurm.sh                                Slurm: one process per host
    kubectl apply -f examples/launch/jobset.yaml                   Kubernetes, with JobSet
    mpirun -n 2 python examples/launch/train.py                    Open MPI

JAX asks Slurm, Open MPI or Kubernetes which processes take part; `local.py` says so in the environment. Every process
runs this program on the same data, and keeps its own rows. The run continues from the last checkpoint on any number of
devices, with the same batches in the same order. If a step hangs because a process is gone, this process ends after
`--timeout` seconds, so that the launcher restarts the run.
"""

import argparse
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt import GPT, next_byte_loss
from text import load, random_windows

from zerojax import zero_shard
from zerojax.checkpoint import Checkpointer, on_preemption
from zerojax.data import shard_batches

AGAIN = 75  # exit status that asks the launcher to restart; a step that hangs ends with it too


def main() -> int:
    args = options()
    begin()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = zero_shard(optax.adamw(3e-3), stage=args.stage, mesh=mesh)
    model = GPT(width=32, layers=2, heads=2)
    state = tx.create(tx.init_params(lambda: model.init(jax.random.key(0), np.zeros((1, args.seq), np.int32))))
    step = tx.train_step(next_byte_loss(model), timeout=args.timeout)
    corpus = load(args.data)
    with Checkpointer(args.out, keep=2, every=args.save_every) as checkpoints, on_preemption() as preemption:
        start, history = 0, []
        if checkpoints.latest() is not None:
            state, history, start, *_ = checkpoints.restore(state, fallback=True)
        say(f"from step {start} on {jax.process_count()} processes, {jax.device_count()} devices")
        numbers = range(start + 1, args.steps + 1)
        windows = (random_windows(corpus.train, rows=args.batch, length=args.seq, seed=0, step=i) for i in numbers)
        for number, batch in zip(numbers, shard_batches(map(own_rows, windows), tx, rows="process"), strict=True):
            state, metrics = step(state, batch)
            history.append(float(metrics["loss"]))
            say(f"step {number} loss {history[-1]:.6f}")
            stop = preemption.reached(number)
            checkpoints.save(state, history, step=number, force=stop or number == args.steps)
            if stop:
                say(f"preempted after step {number}")
                return AGAIN
    return 0


def begin() -> None:
    """Join the other processes, if a launcher started several."""
    if "ZEROJAX_PROCESSES" in os.environ:  # of local.py
        count, index = int(os.environ["ZEROJAX_PROCESSES"]), int(os.environ["ZEROJAX_PROCESS"])
        if count > 1:
            jax.distributed.initialize(os.environ["ZEROJAX_COORDINATOR"], count, index)
    elif any(name in os.environ for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")):
        jax.distributed.initialize()


def own_rows(rows: np.ndarray) -> np.ndarray:
    """The rows of this process' devices: a loader would read no others."""
    share = len(rows) // jax.process_count()
    return rows[jax.process_index() * share :][:share]


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
