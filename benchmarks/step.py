"""Measure step time and tokens/s of stages 0 to 3 in both views, and of plain jit, replicated or sharded by GSPMD.

    python benchmarks/step.py                  8 simulated CPU devices, scanned model
    python benchmarks/step.py --style unrolled --rounds 9
    python benchmarks/step.py --size gpu       on this machine's GPUs

Every round runs each way once, in turn, so that a slow moment of the machine affects all of them. The ratio of two ways
is taken round by round, and its median counts. Simulated devices share the processor, so the times compare the ways,
and say nothing about a GPU.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import time

import machine


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="cpu", choices=["tiny", "cpu", "125M", "350M", "gpu"])
    parser.add_argument("--style", default="scan", choices=["scan", "unrolled"])
    parser.add_argument("--devices", type=int, default=8, help="simulated devices, for the CPU sizes")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    if args.size in ("tiny", "cpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"

    ways, tokens, batch = make_ways(args)
    seconds = {name: [] for name in ways}
    for name, run in ways.items():  # compile and warm up
        print(f"compiling {name}", flush=True)
        run(batch)
        run(batch)
    for _ in range(args.rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run(batch)
            seconds[name].append(time.perf_counter() - start)
    rows = {name: figures(name, tokens, seconds) for name in seconds}
    print(f"\n{'':16s}{'ms a step':>12s}{'spread':>16s}{'tokens/s':>12s}", *(f"/ {to}" for to in COMPARED))
    for name, row in rows.items():
        spread = f"{1e3 * row['least']:.0f}-{1e3 * row['most']:.0f}"
        ratios = [f"{row[f'to {to}']:{len(to) + 2}.2f}" if f"to {to}" in row else "" for to in COMPARED]
        print(f"{name:16s}{1e3 * row['median']:12.1f}{spread:>16s}{row['tokens/s']:12.0f}", *ratios)
    result = {
        **machine.described(),
        "model": {"size": args.size, "style": args.style},
        "rounds": args.rounds,
        "seconds a step": rows,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


COMPARED = ("replicated", "GSPMD", "gathered", "device view")
TUNED = {"optimization_level": "O1", "xla_gpu_enable_while_loop_double_buffering": True}


def device_view(name):
    return f"{name}, device"


def figures(name, tokens, seconds):
    def ratio(other):
        return statistics.median(a / b for a, b in zip(times, seconds[other], strict=True))

    times = seconds[name]
    median = statistics.median(times)
    beside = {to: to for to in COMPARED} | {"device view": device_view(name)}
    return {
        "median": median,
        "least": min(times),
        "most": max(times),
        "tokens/s": tokens / median,
        **{f"to {to}": ratio(other) for to, other in beside.items() if other in seconds},
    }


def make_ways(args, views=True):
    """Each way as a function of the batch that does one step, waits for it and gives its loss.

    `GSPMD` is as `jit` has it; `gathered` a model that gathers each layer by hand, with what XLA has to hide it.
    """
    import jax
    import optax
    import yardstick
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from zerojax import zero_shard

    count = jax.device_count()
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    mesh = zero_shard(inner, stage=0).config.mesh
    attention, scan = getattr(args, "attention", "auto"), args.style == "scan"
    init, loss, (rows, length) = yardstick.build(args.size, scan=scan, attention=attention, mesh=mesh)
    vocabulary = yardstick.SIZES[args.size].vocabulary
    tokens = jax.random.randint(jax.random.key(1), (rows * count, length), 0, vocabulary)
    batch = jax.device_put(tokens, NamedSharding(mesh, P("data")))

    def zero(stage, view="global"):
        tx = zero_shard(inner, stage=stage, view=view)
        step = tx.train_step(loss)
        state = tx.create(tx.init_params(init, jax.random.key(0)))

        def run(batch):
            nonlocal state
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            return metrics["loss"]

        return run

    def plain(stage, loss=loss, options=None):
        """Parameters and state where `stage` puts them, all communication left to the compiler."""
        tx = zero_shard(inner, stage=stage)
        shapes = jax.eval_shape(init, jax.random.key(0))
        where, plan, whole = tx.shardings(shapes), tx.create(shapes).plan, NamedSharding(mesh, P())
        # plain jit knows no flat leaves: their moments stay whole
        by_leaf = zip(plan.state, jax.tree.leaves(where.opt_state), strict=True)
        moments = jax.tree.unflatten(plan.state_def, [whole if leaf.kind == "flat" else s for leaf, s in by_leaf])
        params = jax.jit(init, out_shardings=where.params)(jax.random.key(0))
        state = jax.jit(inner.init, out_shardings=moments)(params)

        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

        kept = (where.params, moments, whole, whole)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=kept, compiler_options=options)

        def run(batch):
            nonlocal params, state
            params, state, value, norm = jitted(params, state, batch)
            jax.block_until_ready((params, state, value, norm))
            return value

        return run

    ways = {}
    for stage in args.stages:
        ways[f"stage {stage}"] = zero(stage)
        if views:
            ways[device_view(f"stage {stage}")] = zero(stage, "device")
    ways["replicated"] = plain(0)
    if count > 1:
        size = dataclasses.replace(yardstick.SIZES[args.size], attention=yardstick.attention_of(attention, mesh))
        by_hand = yardstick.gathered_by_hand(size, scan, mesh)
        ways |= {"GSPMD": plain(3), "gathered": plain(3, by_hand, TUNED if jax.default_backend() == "gpu" else None)}
    return ways, tokens.size, batch


if __name__ == "__main__":
    main()
