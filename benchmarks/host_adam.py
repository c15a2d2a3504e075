"""Measure ns per parameter for AdamW on the host: optax under jit, a streamed step's program, and torch's fused kernel.

    python benchmarks/host_adam.py                       8 chunks of 8 million parameters
    python benchmarks/host_adam.py --chunks 4 --rounds 15 --processes 6
    pip install torch                                    for the comparison; it is left out otherwise

Every round runs each variant once, so that a slow moment of the machine affects all of them. Ratios are taken within a
round, and their median counts. They also depend on the addresses that a process gets, so several processes give the
median of their medians, the least and the most.

`floor` moves the 28 bytes per parameter that any AdamW must move: it reads the gradient, the parameter and two moments,
and writes all but the gradient. Numpy negates as many bytes in place, on as many threads. `processor` is the processor
time per parameter, over all threads. Other load on the machine disturbs it less. Under load torch's threads wait for
each other, so look at its time on one thread too.
"""

import argparse
import concurrent.futures
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

THREADS = os.cpu_count() or 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--size", type=int, default=1 << 23, help="parameters in a chunk")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=1, help="one after the other")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    if args.processes == 1:
        found = measured(args)
        rows = found["ns a parameter"]
        show(rows, "spread", {name: f"{row['least']:.2f}-{row['most']:.2f}" for name, row in rows.items()})
    else:
        found = of_processes([one_process(args) for _ in range(args.processes)])
        spreads = {name: "{:.2f}-{:.2f}".format(*ends) for name, ends in found.get("spread of to torch", {}).items()}
        show(found["ns a parameter"], "to torch", spreads)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=2) + "\n")


def show(rows, title, spreads):
    columns = ["median", "processor", "to floor", "to torch", "to torch on one thread"]
    print(f"{'ns a parameter':26s}{title:>12s}" + "".join(f"{c:>{len(c) + 3}s}" for c in columns))
    for name, row in rows.items():
        figures = "".join(f"{row.get(c, math.nan):{len(c) + 3}.2f}" for c in columns)
        print(f"{name:26s}{spreads.get(name, ''):>12s}{figures}")


def one_process(args):
    """The figures of a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "figures.json")
        given = {"--chunks": args.chunks, "--size": args.size, "--rounds": args.rounds, "--out": out}
        command = [sys.executable, __file__, *(str(x) for pair in given.items() for x in pair)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, flush=True)
        return json.loads(out.read_text())


def of_processes(runs):
    """The median of each figure, and the spread of the ratio to torch."""
    rows = [run["ns a parameter"] for run in runs]
    found = dict(runs[-1], processes=len(runs))
    found["ns a parameter"] = {
        name: {figure: statistics.median(row[name][figure] for row in rows) for figure in rows[0][name]}
        for name in rows[0]
    }
    if found["torch"]:
        ratios = {name: [row[name]["to torch"] for row in rows] for name in rows[0]}
        found["spread of to torch"] = {name: (min(values), max(values)) for name, values in ratios.items()}
    return found


def measured(args):
    """The figures of this process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from zerojax.offload.blocked import LOOPS_BECOME_KERNELS

    load = os.getloadavg()[0]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        ways = make_ways(args, pool)
        wall = {name: [] for name in ways}
        processor = {name: [] for name in ways}
        for i in range(args.rounds + 2):
            for name, run in ways.items():
                start, spent = time.perf_counter(), time.process_time()
                run()
                spent, passed = time.process_time() - spent, time.perf_counter() - start
                if i >= 2:  # the first rounds compile and touch the memory
                    wall[name].append(passed * 1e9 / (args.chunks * args.size))
                    processor[name].append(spent * 1e9 / (args.chunks * args.size))
    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "torch": torch_version(),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": THREADS,
        "load before": load,
        "loops become kernels": LOOPS_BECOME_KERNELS,
        "chunks": [args.chunks, args.size],
        "rounds": args.rounds,
        "ns a parameter": {name: figures(name, wall, processor) for name in ways},
    }


def figures(name, wall, processor):
    def ratio(table, other):
        return statistics.median(a / b for a, b in zip(table[name], table[other], strict=True))

    row = {
        "median": statistics.median(wall[name]),
        "least": min(wall[name]),
        "most": max(wall[name]),
        "processor": statistics.median(processor[name]),
        "to floor": ratio(wall, "floor"),
    }
    if "torch fused" in wall:
        row |= {
            "to torch": ratio(wall, "torch fused"),
            "to torch on one thread": ratio(wall, "torch fused, one thread"),
            "processor to torch on one thread": ratio(processor, "torch fused, one thread"),
        }
    return row


def torch_version():
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__


def processor_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def make_ways(args, pool):
    """Each variant as a function that updates all chunks once, and blocks until that is done."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    tx = optax.adamw(1e-3, weight_decay=0.1)
    draw = np.random.default_rng(0)

    def update(grad, state, count):
        param, mu, nu = state
        adam, *rest = tx.init(param)
        updates, (adam, *_) = tx.update(grad, (adam._replace(count=count, mu=mu, nu=nu), *rest), param)
        return optax.apply_updates(param, updates), adam.mu, adam.nu

    jitted, count = jax.jit(update, donate_argnums=1), jnp.int32(3)
    some = lambda: jnp.asarray(draw.standard_normal(args.size, np.float32))
    grads = [some() for _ in range(args.chunks)]
    states = [[some(), some(), jnp.abs(some())] for _ in range(args.chunks)]
    streamed, inputs = streamed_program(args, tx, grads, states)

    def optax_once(i):
        states[i] = jax.block_until_ready(jitted(grads[i], states[i], count))

    def zerojax_once(i):
        params, grads, state, *others = inputs[i]
        params, state = jax.block_until_ready(streamed(params, grads, state, *others))
        inputs[i] = params, grads, state, *others

    def one_by_one(once):
        return lambda: [once(i) for i in range(args.chunks)]

    def in_parallel(once):
        return lambda: list(pool.map(once, range(args.chunks)))

    floor = np.ones(args.size * 7 // 2, np.float32)  # 14 bytes a parameter read, and 14 written
    edges = np.linspace(0, floor.size, THREADS + 1, dtype=int)
    slices = [floor[a:b] for a, b in itertools.pairwise(edges)]

    def negate():
        for _ in range(args.chunks):
            list(pool.map(lambda x: np.negative(x, out=x), slices))

    ways = {
        "floor": negate,
        "optax": one_by_one(optax_once),
        "optax, threads": in_parallel(optax_once),
        "zerojax": one_by_one(zerojax_once),
        "zerojax, threads": in_parallel(zerojax_once),
    }
    if torch_version() is None:
        print("torch is not installed: its fused AdamW is left out")
    else:
        ways["torch fused, one thread"] = torch_way(args, threads=1)
        ways["torch fused"] = torch_way(args, threads=THREADS)
    return ways


def streamed_program(args, tx, grads, states):
    """What a streamed step runs on the host, from as many threads as there are cores, and its operands for each chunk.

    Scalars such as the bias corrections are among them: they are computed once a step, with the gradients.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from zerojax import Offload, zero_shard
    from zerojax.optim.traced import SHARED
    from zerojax.streaming.chunk_programs import update_on_host
    from zerojax.streaming.stream import StreamedUpdate

    offload = Offload(optimizer="host", update="host", chunk_bytes=grads[0].nbytes)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    zero = zero_shard(tx, stage=3, mesh=mesh, offload=offload)
    plan = zero.create([jax.ShapeDtypeStruct((args.size,), jnp.float32)]).plan
    streamed = StreamedUpdate(zero.config, plan)
    (group,) = streamed.partition.groups
    ((_, length),) = group.chunks
    host = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec), memory_kind="pinned_host")
    of_leaf = lambda x: jax.device_put(x + 0, host("data"))  # moved from the device, as gradients are
    types = streamed.partition.shared_shapes
    shared = [jax.device_put(np.full(types[i].shape, 0.3, types[i].dtype), host()) for i in group.reads(SHARED)]
    chunks = zip(grads, states, strict=True)
    given = [([of_leaf(p)], [of_leaf(g)], [of_leaf(mu), of_leaf(nu)], shared, []) for g, (p, mu, nu) in chunks]
    return update_on_host(zero.config, streamed.key(0, length)), given


def torch_way(args, threads):
    import torch

    params = [torch.randn(args.size) for _ in range(args.chunks)]
    for param in params:
        param.grad = torch.randn(args.size)
    step = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True).step

    def run():
        torch.set_num_threads(threads)
        step()

    return run


if __name__ == "__main__":
    main()
