"""Measure what small leaves cost in a checkpoint: files and seconds, packed and with one folder each.

    python benchmarks/small_leaves.py                            AdamW over 500 leaves, on 8 simulated CPU devices
    python benchmarks/small_leaves.py --cases 100x4096 100x262144  other numbers of leaves, and their bytes
    python benchmarks/small_leaves.py --platform gpu             on this machine's GPUs

AdamW has two moments per leaf, so a checkpoint has three times as many leaves. Every round does each thing once, so
that a slow moment of the machine affects all of them. `orbax alone` is orbax's StandardCheckpointer with its defaults.
It packs leaves too (OCDBT), without digests and `fsync`, and finishes in the background what it can.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time

import machine


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["500x1536"], help="leaves x bytes of each")
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
    import orbax.checkpoint

    result = {
        **machine.described(),
        "orbax-checkpoint": orbax.checkpoint.__version__,
        "stage": args.stage,
        "rounds": args.rounds,
        "cases": {case: measured(args, *map(int, case.split("x"))) for case in args.cases},
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def measured(args, leaves, size):
    """One case: files, and seconds of each thing that a way does."""
    directory = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    try:
        ways = make_ways(args, directory, leaves, size)
        seconds, files = {name: {} for name in ways}, {}
        for i in range(args.rounds + 1):
            for name, run in ways.items():
                files[name], spent = run(i)
                for what, time_spent in spent.items() if i else ():  # the first round warms up
                    seconds[name].setdefault(what, []).append(time_spent)
    finally:
        shutil.rmtree(directory)
    print(f"{leaves} leaves of {size} bytes\n{'':40s}{'files':>8s}{'seconds':>10s}{'spread':>16s}")
    rows = {}
    for name, times in seconds.items():
        rows[name] = {"files": files[name], "seconds": {what: figures(one) for what, one in times.items()}}
        for what, row in rows[name]["seconds"].items():
            spread = f"{row['least']:.3f}-{row['most']:.3f}"
            print(f"{name + ': ' + what:40s}{files[name]:8d}{row['median']:10.3f}{spread:>16s}", flush=True)
    return rows


def figures(times):
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def make_ways(args, directory, leaves, size):
    """Each way, as a function of the round that returns its files, and the seconds of each thing it does."""
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp

    from zerojax import zero_shard
    from zerojax.checkpoint import Checkpointer, saving
    from zerojax.checkpoint.state_leaves import state_leaves

    tx = zero_shard(optax.adamw(1e-3), stage=args.stage)
    shapes = {f"w{i}": jax.ShapeDtypeStruct((8, size // 32), np.float32) for i in range(leaves)}
    like = tx.create(shapes)
    fill = lambda x: jax.device_put(np.full(x.shape, 0.5, x.dtype), x.sharding)
    state = jax.block_until_ready(jax.tree.map(fill, like))
    tree = {name: one.array for name, one in state_leaves(state).items()}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

    def files_in(path):
        return sum(one.is_file() for one in path.rglob("*"))

    def with_limit(name, limit):
        checkpoints = Checkpointer(directory / name, keep=1)

        def run(i):
            saving.SMALL_BYTES = limit
            times = [time.perf_counter()]
            checkpoints.save(state, step=i)
            times.append(time.perf_counter())
            checkpoints.wait()
            times.append(time.perf_counter())
            jax.block_until_ready(checkpoints.restore(like).state)
            times.append(time.perf_counter())
            spent = {"save: the loop is blocked": times[1] - times[0], "save: all, to the disk": times[2] - times[0]}
            spent["restore, verified"] = times[3] - times[2]
            return files_in(directory / name / f"step_{i:08d}"), spent

        return run

    def orbax_alone(i):
        path = directory / "orbax" / str(i)
        times = [time.perf_counter()]
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)
            times.append(time.perf_counter())
            checkpointer.wait_until_finished()
            times.append(time.perf_counter())
            jax.block_until_ready(checkpointer.restore(path, abstract))
            times.append(time.perf_counter())
        spent = {"save: the loop is blocked": times[1] - times[0], "save: all": times[2] - times[0]}
        files = files_in(path)
        shutil.rmtree(path)
        return files, spent | {"restore": times[3] - times[2]}

    return {
        "packed": with_limit("packed", 1 << 20),
        "a folder per leaf": with_limit("folders", 0),
        "orbax alone": orbax_alone,
    }


if __name__ == "__main__":
    main()
