"""Measure what a checkpoint costs: how long `save` blocks the loop, and the whole time compared with a plain `cp`.

    python benchmarks/checkpoint.py                         a state of 1 GB on 8 simulated CPU devices
    python benchmarks/checkpoint.py --mb 200 --rounds 3
    python benchmarks/checkpoint.py --platform gpu          on this machine's GPUs

Every round does each thing once, so that a slow moment of the machine affects all of them. `copy` is the least time for
which a save can block: it only copies the state to host memory. `cp` is the least time for a whole save: it copies the
same bytes from files in the page cache, and `sync` flushes them. Simulated devices are in host memory. There, a save
keeps the buffers alive instead of copying them.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import machine


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=1000, help="size of the state, in megabytes")
    parser.add_argument("--platform", default="cpu", choices=["cpu", "gpu"])
    parser.add_argument("--devices", type=int, default=8, help="simulated devices")
    parser.add_argument("--stage", type=int, default=3, choices=range(4))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=pathlib.Path, help="where to write (default: the temporary one)")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    if args.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax
    import orbax.checkpoint

    directory = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    try:
        ways, size = make_ways(args, directory)
        seconds = {name: [] for name in ways}
        for i in range(args.rounds + 1):
            for name, run in ways.items():
                spent = run(i)
                if i:  # the first round warms up
                    seconds[name].append(spent)
    finally:
        shutil.rmtree(directory)
    rows = {name: figures(times, size) for name, times in seconds.items()}
    print(f"{size / 1e9:.2f} GB, stage {args.stage}, {jax.device_count()} × {jax.devices()[0].device_kind}\n")
    print(f"{'':28s}{'seconds':>10s}{'spread':>16s}{'GB/s':>8s}")
    for name, row in rows.items():
        spread = f"{row['least']:.3f}-{row['most']:.3f}"
        print(f"{name:28s}{row['median']:10.3f}{spread:>16s}{row['GB/s']:8.2f}")
    result = {
        **machine.described(),
        "orbax-checkpoint": orbax.checkpoint.__version__,
        "bytes": size,
        "stage": args.stage,
        "rounds": args.rounds,
        "seconds": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def figures(times, size):
    median = statistics.median(times)
    return {"median": median, "least": min(times), "most": max(times), "GB/s": size / median / 1e9}


def make_ways(args, directory):
    """Each thing that is timed, as a function of the round that returns its seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from zerojax import zero_shard
    from zerojax.checkpoint import Checkpointer
    from zerojax.checkpoint.state_leaves import state_leaves

    layers = 8
    rows = max(8, args.mb * 1_000_000 // (3 * layers * 4096 * 4) // 8 * 8)  # parameters and Adam's two moments
    tx = zero_shard(optax.adam(1e-3), stage=args.stage)
    init = lambda key: {
        f"w{i}": jax.random.normal(k, (rows, 4096)) for i, k in enumerate(jax.random.split(key, layers))
    }
    state = tx.create(tx.init_params(init, jax.random.key(0)))
    state = state.replace(opt_state=jax.tree.map(lambda x: jnp.full_like(x, 0.5) if x.ndim else x, state.opt_state))
    jax.block_until_ready(state)
    arrays = [leaf.array for leaf in state_leaves(state).values()]
    size = sum(x.nbytes for x in arrays)
    checkpoints = Checkpointer(directory / "checkpoints", keep=2)
    blocked = {}

    def timed(work):
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def copy(i):
        """One copy of everything in host memory, whatever the platform."""
        fresh = jax.tree.map(jnp.copy, arrays)  # an array keeps its host copy: a second look would cost nothing
        jax.block_until_ready(fresh)
        shards = [s.data for x in fresh for s in x.addressable_shards if s.replica_id == 0]
        for shard in shards:
            shard.copy_to_host_async()
        return timed(lambda: [np.array(shard, copy=True) for shard in shards])

    def save(i):
        def work():
            start = time.perf_counter()
            checkpoints.save(current, step=i)
            blocked[i] = time.perf_counter() - start
            checkpoints.wait()

        current = jax.tree.map(jnp.copy, state)
        jax.block_until_ready(current)
        return timed(work)

    def cp(i):
        target = directory / "copied"
        shutil.rmtree(target, ignore_errors=True)
        source = directory / "checkpoints" / f"step_{checkpoints.latest():08d}"
        return timed(lambda: subprocess.run(f"cp -r {source} {target} && sync -f {target}", shell=True, check=True))

    def restore(i):
        return timed(lambda: jax.block_until_ready(checkpoints.restore(shapes).state))

    shapes = tx.create(jax.eval_shape(init, jax.random.key(0)))
    ways = {
        "copy to host memory": copy,
        "save: all, to the disk": save,
        "save: the loop is blocked": lambda i: blocked[i],
        "cp and sync": cp,
        "verify": lambda i: timed(lambda: checkpoints.verify(checkpoints.latest())),
        "restore, verified": restore,
    }
    return ways, size


if __name__ == "__main__":
    main()
