"""ns a parameter for AdamW on the host: optax as jit compiles it, the library's blocks, torch's fused kernel.

    python benchmarks/host_adam.py                       8 pieces of 8 million parameters
    python benchmarks/host_adam.py --pieces 4 --rounds 5
    pip install torch                                    for the comparison; it is left out otherwise

Every round runs each way once, in turn, so that a slow moment of the machine falls on all
of them; ratios are taken round by round, and their median is what counts. `floor` moves
the 28 bytes a parameter that any AdamW must (it reads the gradient, the parameter and two
moments, and writes all but the first): numpy negates as much in place, on as many threads. `processor` is
the processor time a parameter of all threads, which a busy neighbour disturbs less: beside
one, torch's threads wait for each other, so look at its time on one thread too.
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
import time

THREADS = os.cpu_count() or 1


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--size", type=int, default=1 << 23, help="parameters in a piece")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from zerojax.offload.blocked import loops_become_kernels

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
                    wall[name].append(passed * 1e9 / (args.pieces * args.size))
                    processor[name].append(spent * 1e9 / (args.pieces * args.size))
    rows = {name: figures(name, wall, processor) for name in ways}
    columns = ["median", "processor", "to floor", "to torch", "to torch on one thread"]
    print(f"{'ns a parameter':26s}{'spread':>12s}" + "".join(f"{c:>{len(c) + 3}s}" for c in columns))
    for name, row in rows.items():
        spread = f"{row['least']:.2f}-{row['most']:.2f}"
        print(f"{name:26s}{spread:>12s}" + "".join(f"{row.get(c, math.nan):{len(c) + 3}.2f}" for c in columns))
    result = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "torch": torch_version(),
        "python": platform.python_version(),
        "processor": processor_name(),
        "cores": THREADS,
        "load before": load,
        "loops become kernels": loops_become_kernels(),
        "pieces": [args.pieces, args.size],
        "rounds": args.rounds,
        "ns a parameter": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


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
    """Each way as a function that updates all pieces once and waits for them."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from zerojax.offload.blocked import in_blocks

    tx = optax.adamw(1e-3, weight_decay=0.1)
    draw = np.random.default_rng(0)

    def update(wide, scalars):
        grad, param, mu, nu = wide
        adam, *rest = tx.init(param)
        state = (adam._replace(count=scalars[0], mu=mu, nu=nu), *rest)
        updates, (adam, *_) = tx.update(grad, state, param)
        return [optax.apply_updates(param, updates), adam.mu, adam.nu]

    def blocks(grad, state, count):
        return in_blocks(update, [grad, *state], [count], overwrites=(1, 2, 3))

    whole = jax.jit(lambda grad, state, count: update([grad, *state], [count]), donate_argnums=1)
    blocked = jax.jit(blocks, donate_argnums=1)
    count = jnp.int32(3)
    some = lambda: jnp.asarray(draw.standard_normal(args.size, np.float32))
    grads = [some() for _ in range(args.pieces)]
    states = [[some(), some(), jnp.abs(some())] for _ in range(args.pieces)]

    def one(step, i):
        states[i] = jax.block_until_ready(step(grads[i], states[i], count))

    def in_turn(step):
        return lambda: [one(step, i) for i in range(args.pieces)]

    def side_by_side(step):
        return lambda: list(pool.map(lambda i: one(step, i), range(args.pieces)))

    floor = np.ones(args.size * 7 // 2, np.float32)  # 14 bytes a parameter read, and 14 written
    edges = np.linspace(0, floor.size, THREADS + 1, dtype=int)
    parts = [floor[a:b] for a, b in itertools.pairwise(edges)]

    def negate():
        for _ in range(args.pieces):
            list(pool.map(lambda part: np.negative(part, out=part), parts))

    ways = {
        "floor": negate,
        "optax": in_turn(whole),
        "optax, threads": side_by_side(whole),
        "blocks": in_turn(blocked),
        "blocks, threads": side_by_side(blocked),
    }
    if torch_version() is None:
        print("torch is not installed: its fused AdamW is left out")
    else:
        ways["torch fused, one thread"] = torch_way(args, threads=1)
        ways["torch fused"] = torch_way(args, threads=THREADS)
    return ways


def torch_way(args, threads):
    import torch

    params = [torch.randn(args.size) for _ in range(args.pieces)]
    for param in params:
        param.grad = torch.randn(args.size)
    step = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True).step

    def run():
        torch.set_num_threads(threads)
        step()

    return run


if __name__ == "__main__":
    main()
