"""Measure the seconds to trace and compile a step and a gradient, compared with plain jit and replicated parameters.

    python benchmarks/compile.py                     12, 48, 96 and 192 layers, with and without remat
    python benchmarks/compile.py --layers 12 --rounds 1 --ways plain "stage 3"
    python benchmarks/compile.py --model small --layers 64 --remat no      dense layers of width 32
    python benchmarks/compile.py --layers 24 --remat yes --topology h200:8     for absent GPUs (extra `aot`)
    python benchmarks/compile.py --layers 24 --remat yes --styles unrolled scan --ways gradient      with all rivals

Each round does each way once, in turn, after JAX's caches were cleared. Tracing includes lowering. "rows / trace" is
the share of tracing in which zerojax follows the rows of the batch through the program. "processor s" is the processor
time of both, in all threads. The model is the tiny yardstick on 8 devices; only the number of layers grows. "alone" is
the plain program on one device. The rivals are those of `aot_gpt.py`. They have remat, and `pipelined` needs jax 0.12.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import statistics
import time

import machine

WAYS = ["alone gradient", "plain gradient", "stage 3 gradient"]
WAYS += ["alone step", "plain step", "stage 1 step", "stage 3 step"]
RIVALS = {f"{name} gradient": name for name in ("gspmd", "gathered", "rules", "pipelined")}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48, 96, 192])
    parser.add_argument("--remat", nargs="+", default=["yes", "no"], choices=["yes", "no"])
    parser.add_argument("--styles", nargs="+", default=["unrolled"], choices=["unrolled", "scan"])
    parser.add_argument("--ways", nargs="+", default=WAYS, help="words that the ways have in their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--model", default="tiny", choices=["tiny", "small"])
    parser.add_argument("--topology", help="absent GPUs to compile for, such as h200:8, instead of simulated devices")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"

    known = [*WAYS, *RIVALS] if (args.model, args.remat) == ("tiny", ["yes"]) else WAYS
    wanted = [way for way in known if any(word in way for word in args.ways)]
    rows = []
    for style, layers, remat in itertools.product(args.styles, args.layers, args.remat):
        chosen = model(args.model, layers, remat == "yes", style)
        programs = {way: make(way, chosen, args.topology, layers, style) for way in wanted}
        seconds: dict = {way: [] for way in wanted}
        for _, way in itertools.product(range(args.rounds), wanted):
            seconds[way].append(timed(programs[way]))
        print(f"\n{layers} layers, {style}, {'remat' if remat == 'yes' else 'no remat'}")
        for way in wanted:
            rows.append({"layers": layers, "style": style, "remat": remat, "way": way, **figures(way, seconds)})
            said = [
                f"{key} {value:.3f}" if key.startswith("rows") else f"{key} {value:.2f}"
                for key, value in rows[-1].items()
                if isinstance(value, float)
            ]
            print(f"  {way:18s}" + "   ".join(said), flush=True)
    if args.out:
        result = {
            **machine.described(),
            "rounds": args.rounds,
            "model": args.model,
            "topology": args.topology or f"{args.devices} simulated devices",
            "seconds": rows,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def timed(program):
    """`(seconds to trace and lower, to compile, of processors, to follow rows)`, nothing of it from a cache."""
    import jax

    jax.clear_caches()
    function, operands = program
    with following() as spent:
        start, processors = time.perf_counter(), time.process_time()
        lowered = function.lower(*operands)
        traced = time.perf_counter()
    lowered.compile()
    return traced - start, time.perf_counter() - traced, time.process_time() - processors, sum(spent)


@contextlib.contextmanager
def following():
    """Yield a list that gets the seconds of each outermost call of `zerojax.dims.Follower`."""
    from zerojax.dims import Follower

    spent, inside = [], []

    def measured(method):
        def call(*args):
            if inside:
                return method(*args)
            inside.append(True)
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                inside.pop()
                spent.append(time.perf_counter() - start)

        return call

    names = ("row_dims", "results", "with_implied")
    methods = {name: getattr(Follower, name) for name in names}
    for name, method in methods.items():
        setattr(Follower, name, measured(method))
    try:
        yield spent
    finally:
        for name, method in methods.items():
            setattr(Follower, name, method)


def figures(way, seconds):
    kind = way.split()[-1]
    names = "trace", "compile", "processor"
    parts = list(zip(*seconds[way], strict=True))[:3]
    found = {f"{name} s": statistics.median(part) for name, part in zip(names, parts, strict=True)}
    if way.startswith("stage"):
        found["rows / trace"] = statistics.median(rows / trace for trace, *_, rows in seconds[way])
    if (plain := f"plain {kind}") in seconds:
        pairs = list(zip(seconds[way], seconds[plain], strict=True))
        for i, name in enumerate(names):
            found[f"{name} / plain"] = statistics.median(own[i] / other[i] for own, other in pairs)
        both = [sum(own[:2]) / sum(other[:2]) for own, other in pairs]
        found |= {"both / plain": statistics.median(both), "least": min(both), "most": max(both)}
    return found


def model(name, layers, remat, style):
    """`(init, loss, shape of a device's rows, dtype of the rows)` of a model."""
    import jax
    import jax.numpy as jnp
    import yardstick

    if name == "tiny":
        init, loss, rows = yardstick.build("tiny", scan=style == "scan", remat=remat, layers=layers)
        return init, loss, rows, "int32"

    def dense(x, p):
        return jnp.tanh(x @ p["w"] + p["b"])

    def loss(params, x):
        for p in params:
            x = (jax.checkpoint(dense) if remat else dense)(x, p)
        return jnp.mean(x**2)

    return lambda key: [{"w": jnp.ones((32, 32)), "b": jnp.ones(32)} for _ in range(layers)], loss, (2, 32), "float32"


def make(way, model, topology, layers, style):
    """A jitted function and the shapes it takes."""
    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from zerojax import Tuning, zero_shard
    from zerojax.gpus.devices import absent_mesh

    init, loss, (rows, length), dtype = model
    shapes = jax.eval_shape(init, jax.random.key(0))
    kind, stage = way.split()[-1], 3 if "3" in way else 1
    given = absent_mesh(topology) if topology else None
    tx = zero_shard(optax.adamw(3e-4), stage=stage, tuning=Tuning(persist_below=1000), mesh=given)
    mesh = tx.config.mesh
    if way in RIVALS:
        import aot_gpt

        options = {"size": "tiny", "layers": layers, "tuning": {"persist_below": 1000}}
        program, _, args = aot_gpt.program_of(style, RIVALS[way], mesh, **options)
        return program, args
    if way.startswith("alone"):
        mesh = Mesh(mesh.devices.reshape(-1)[:1], "data")
    shape = (rows * tx.config.mesh.size, length)
    batch = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data")))
    if not way.startswith("stage"):
        whole = lambda tree: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())), tree
        )
        inner = optax.adamw(3e-4)

        def step(params, state, batch):
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

        if kind == "gradient":
            return jax.jit(jax.value_and_grad(loss)), (whole(shapes), batch)
        state = whole(jax.eval_shape(inner.init, shapes))
        return jax.jit(step, donate_argnums=(0, 1)), (whole(shapes), state, batch)
    if kind == "gradient":
        return jax.jit(tx.value_and_grad(loss)), (tx.shard(shapes), batch)
    return tx.train_step(loss), (tx.create(shapes), batch)


if __name__ == "__main__":
    main()
