"""Train a GPT that is larger than the memory of its process, time its steps, and compare a small model in three places.

    python benchmarks/params_on_disk.py                       a GPT under a limit of a quarter of its states
    python benchmarks/params_on_disk.py --layers 23 --width 2304 --chunk-mib 16 --limit 6
    python benchmarks/params_on_disk.py --throughput          the time of a step, of its computation and of its I/O
    python benchmarks/params_on_disk.py --compare             a small GPT in memory, in host memory and on disk,
                                                              unrolled and scanned, in one process and in two

The first form starts a child whose private memory `ulimit -d` (RLIMIT_DATA) bounds from outside. The child initialises
parameters into files, takes three steps on one batch, and prints the losses, its peak of resident memory, and the bytes
that it read and wrote beside those of the formula. With P bytes of parameters, of which E are the embedding's, H the
head's and L the blocks', a step of Adam in float32

    reads   E + 2 L + H   in the passes: the embedding's gradient reads no parameter, and the head is kept in between
            4 P           for the update: parameters, gradients and two moments
    writes  4 P           gradients, and for the update parameters and two moments

At the end the same bytes are read and written one file after the other, which is the time that a step is compared with.

Adam divides each gradient by the gradient's size. So if a gradient is almost zero, rounding can change an update by
the whole learning rate. Therefore `--compare` also trains in memory from initial parameters of which half are changed
by one unit of rounding, and prints these differences too.

`--throughput` trains a small GPT and prints three times. `compute` is the time of a step whose parameters and state are
all in memory. `I/O` is the time in which one thread reads and then writes as many bytes as a step, one file after the
other. `step` is the time of a step on disk. Each round measures all three, so that a slow moment of the machine affects
all of them. The ratios are computed for each round, and the medians over all rounds are printed. There are two batches:
a step on a few tokens waits for the disk, and a step on many tokens waits for matrix products. Processor seconds count
all threads. Other load on the machine changes them less than it changes the times.
"""

import argparse
import functools
import json
import os
import pathlib
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROWS, LENGTH, VOCABULARY = 2, 64, 8192
HEADS = 8
BATCHES = {"few tokens": (1, 16), "many tokens": (16, 128)}  # rows and length


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="default: 24, and 8 with --throughput")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunk-mib", type=int, help="the largest chunk; default: 4, and 16 with --throughput")
    parser.add_argument("--limit", type=float, help="private memory of the child, in gigabytes; default: states / 4")
    parser.add_argument("--host-bytes", help='as for Offload, such as "1 GB"')
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, help="where to write (default: the temporary one)")
    parser.add_argument("--compare", action="store_true", help="train the same small model in three places")
    parser.add_argument("--throughput", action="store_true", help="time a step, its computation and its I/O")
    parser.add_argument("--batch", choices=BATCHES, help="with --throughput: only this batch")
    parser.add_argument("--rounds", type=int, default=5, help="with --throughput")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the results")
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, nargs=2, help=argparse.SUPPRESS)  # its number, and the port
    args = parser.parse_args()
    args.layers = args.layers or (8 if args.throughput else 24)
    args.chunk_bytes = (args.chunk_mib or (16 if args.throughput else 4)) << 20
    return args


def sizes(args):
    """Bytes of embedding, blocks and head in float32."""
    block = 12 * args.width**2
    return 4 * VOCABULARY * args.width, 4 * args.layers * block, 4 * VOCABULARY * args.width


def main():
    args = arguments()
    if args.compare:
        return compare(args)
    if args.child:
        return throughput(args) if args.throughput else train(args)
    if args.throughput:
        return run_child(args)
    return larger_than_memory(args)


def larger_than_memory(args):
    """Train in a child process whose private memory is limited."""
    states = 4 * sum(sizes(args))
    limit = args.limit or states / 4 / 1e9
    print(f"{states / 16e6:.0f} million parameters; parameters, gradients and states {states / 1e9:.2f} GB")
    print(f"limit of private memory {limit:.2f} GB: 1/{states / 1e9 / limit:.1f}", flush=True)
    run_child(args, limit)


def run_child(args, limit=None):
    """Run this program in a child process. `limit` bounds its private memory in gigabytes. Exit with its status."""
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        bound = lambda: limit and resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 1e9),) * 2)
        # Otherwise glibc does not return freed arrays of a few MB to the system. New arrays then need new pages, so use
        # large pages: with small pages, a step spends a fifth of its processor time in page faults.
        environment = os.environ | {
            "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
            "MALLOC_ARENA_MAX": "2",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
        command = [sys.executable, __file__, *sys.argv[1:], "--child", folder]
        sys.exit(subprocess.run(command, env=environment, preexec_fn=bound, check=False).returncode)


def model(layers, width, scanned=False):
    """A GPT as `(init, loss)`; norms have no parameters. If `scanned`, the blocks are stacked."""
    import jax
    import jax.numpy as jnp

    def init(key):
        keys = iter(jax.random.split(key, 4 * layers + 2))
        draw = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
        blocks = [
            {
                "qkv": draw(width, 3 * width),
                "out": draw(width, width),
                "up": draw(width, 4 * width),
                "down": draw(4 * width, width),
            }
            for _ in range(layers)
        ]
        blocks = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks) if scanned else blocks
        return {"embed": draw(VOCABULARY, width), "blocks": blocks, "head": draw(width, VOCABULARY)}

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    @jax.checkpoint
    def block(weights, x):
        rows, length, _ = x.shape
        q, k, v = jnp.split((norm(x) @ weights["qkv"]).reshape(rows, length, HEADS, -1), 3, -1)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v).reshape(rows, length, width)
        x = x + mixed @ weights["out"]
        return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]] * width**0.5
        if scanned:
            x, _ = jax.lax.scan(lambda x, weights: (block(weights, x), None), x, params["blocks"])
        else:
            for weights in params["blocks"]:
                x = block(weights, x)
        logits = norm(x) @ params["head"]
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return init, loss


def tokens(rows=ROWS, seed=1, length=LENGTH):
    import jax

    return jax.random.randint(jax.random.key(seed), (rows, length + 1), 0, VOCABULARY)


def train(args):
    import jax
    import optax

    from zerojax import Offload, zero_shard

    folder = args.child / "states"
    offload = Offload(
        params="disk", optimizer="disk", path=folder, chunk_bytes=args.chunk_bytes, host_bytes=args.host_bytes
    )
    tx = zero_shard(optax.adam(3e-4), stage=3, offload=offload)
    init, loss = model(args.layers, args.width)
    losses = []
    begun = time.perf_counter()
    state = tx.create(tx.init_params(init, jax.random.key(0)))
    print(f"initialised in {time.perf_counter() - begun:.0f} s", flush=True)
    step, batch = tx.train_step(loss), tokens()
    for number in range(args.steps):
        before, begun = moved(state), time.perf_counter()
        state, metrics = step(state, batch)
        value = float(metrics["loss"])
        for files in files_of(state):
            files.flush()
        seconds = time.perf_counter() - begun
        losses.append(value)
        read, written = (b - a for a, b in zip(before, moved(state), strict=True))
        print(
            f"step {number}: loss {value:.4f}, {seconds:.1f} s, read {read / 1e9:.3f} GB, wrote {written / 1e9:.3f} GB",
            flush=True,
        )
    embed, blocks, head = sizes(args)
    total = embed + blocks + head
    wanted = embed + 2 * blocks + head + 4 * total, 4 * total
    print(f"formula: read {wanted[0] / 1e9:.3f} GB, write {wanted[1] / 1e9:.3f} GB")
    print(f"moved / formula: {read / wanted[0]:.4f}, {written / wanted[1]:.4f}")
    print(f"peak of resident memory {resident() / 1e9:.2f} GB", flush=True)
    plain = sequential(plain_files(args.child / "plain", args.chunk_bytes), read, written)
    print(f"sequential reads and writes of the same bytes {plain:.1f} s: {plain / seconds:.2f} of the last step")
    save(
        args,
        parameters=total // 4,
        layers=args.layers,
        width=args.width,
        states_bytes=4 * total,
        private_memory_limit_bytes=resource.getrlimit(resource.RLIMIT_DATA)[0],
        peak_resident_bytes=resident(),
        losses=losses,
        read_bytes=read,
        written_bytes=written,
        formula_bytes=wanted,
        last_step_seconds=seconds,
        sequential_seconds=plain,
    )


def save(args, **found):
    """Write results to the file `--out`, after the date and the versions."""
    import machine

    if args.out:
        args.out.write_text(json.dumps(machine.described() | found, indent=2) + "\n")


def throughput(args):
    found = {name: timed(args, *BATCHES[name]) for name in ([args.batch] if args.batch else BATCHES)}
    save(args, layers=args.layers, width=args.width, chunk_bytes=args.chunk_bytes, rounds=args.rounds, batches=found)


def timed(args, rows, length):
    """Time `compute`, `I/O` and `step` for a batch of `rows` x `length` tokens. Print and return the results."""
    import jax
    import optax

    import zerojax
    from zerojax import Offload, zero_shard

    init, loss = model(args.layers, args.width)
    folder, batch = args.child / f"states_{rows}_{length}", tokens(rows, length=length)
    offload = Offload(params="disk", optimizer="disk", path=folder, chunk_bytes=args.chunk_bytes)
    steps, states = {}, {}
    for name, place in {"compute": None, "step": offload}.items():
        tx = zero_shard(optax.adam(3e-4), stage=3, offload=place)
        steps[name], states[name] = tx.train_step(loss), tx.create(tx.init_params(init, jax.random.key(0)))

    def run(name):
        states[name], metrics = steps[name](states[name], batch)
        jax.block_until_ready((metrics, jax.tree.leaves(states[name])))
        for files in files_of(states[name]):
            files.flush()

    for name in [*steps] * 2:
        run(name)
    before = moved(states["step"])
    run("step")
    bytes_moved = [b - a for a, b in zip(before, moved(states["step"]), strict=True)]
    files = plain_files(args.child / "plain", args.chunk_bytes)
    sides = {
        "compute": functools.partial(run, "compute"),
        "I/O": lambda: sequential(files, *bytes_moved),
        "step": functools.partial(run, "step"),
    }
    seconds, processor = {name: [] for name in sides}, {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            begun, used = time.perf_counter(), time.process_time()
            side()
            seconds[name].append(time.perf_counter() - begun)
            processor[name].append(time.process_time() - used)
    larger = list(map(max, seconds["compute"], seconds["I/O"]))
    ratios = {
        "step / larger": [a / b for a, b in zip(seconds["step"], larger, strict=True)],
        "I/O / step": [a / b for a, b in zip(seconds["I/O"], seconds["step"], strict=True)],
    }
    print(f"{rows * length} tokens, read {bytes_moved[0] / 1e9:.2f} GB, wrote {bytes_moved[1] / 1e9:.2f} GB")
    for name, values in {**seconds, **ratios}.items():
        used = f", {statistics.median(processor[name]):.2f} processor seconds" if name in processor else ""
        print(
            f"  {name:13} {statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f}){used}", flush=True
        )
    zerojax.offload.close(states["step"])
    return {"tokens": rows * length, "bytes": bytes_moved, "seconds": seconds, "processor_seconds": processor} | ratios


def moved(state):
    """Return the bytes read and written since the start."""
    return [sum(found) for found in zip(*(x.moved for x in files_of(state)), strict=True)]


def files_of(state):
    """Return the files of parameters and gradients, and the files of the optimizer state."""
    import jax

    from zerojax.layout.leaf import is_chunked

    nodes = jax.tree.leaves((state.params, state.opt_state), is_leaf=is_chunked)
    return {id(x.leaf_files.state_files): x.leaf_files.state_files for x in nodes if is_chunked(x)}.values()


def resident():
    """Peak of resident memory, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def plain_files(folder, chunk_bytes):
    """Return a buffer of one chunk, and files of the same size in `folder`, which together have about 2 GB."""
    from zerojax.offload import disk

    folder.mkdir(exist_ok=True)
    buffer = disk.aligned_buffer(chunk_bytes)
    buffer[:] = os.urandom(chunk_bytes)
    files = [folder / str(number) for number in range(max(1, (2 << 30) // chunk_bytes))]
    for path in files:
        disk.transfer(path, buffer, write=True, direct=True)
    return buffer, files


def sequential(plain, read, written):
    """Return the seconds to read `read` bytes and then write `written` bytes, one file after the other."""
    from zerojax.offload import disk

    buffer, files = plain
    begun = time.perf_counter()
    for write, size in ((False, read), (True, written)):
        for number in range(-(-size // len(buffer))):
            disk.transfer(files[number % len(files)], buffer, write=write, direct=True)
    return time.perf_counter() - begun


def compare(args):
    devices = 4 if args.process else 8
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    import jax

    if args.process:
        process, port = args.process
        jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
        return compare_on(8, "2 processes", args.directory)
    print("largest difference of 20 losses, and of the last parameters, from those in memory")
    for count in (1, 3, 8):
        compare_on(count, "1 process", args.directory)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    children = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--process", str(i), port]) for i in range(2)
    ]
    sys.exit(max([child.wait() for child in children]))


def compare_on(count, processes, directory):
    """Compare on the first `count` devices, and print the differences."""
    import jax
    import numpy as np

    from zerojax import Offload

    mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
    for form in ("unrolled", "scanned"):
        init, loss = model(2, 64, scanned=form == "scanned")
        start = jax.device_get(init(jax.random.key(0)))
        losses, params = trained(loss, start, mesh, None)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            ways = {
                "rounding": (one_unit(start), None),
                "host": (start, Offload(optimizer="host", params="host", update="device")),
                "disk": (start, Offload(optimizer="disk", params="disk", path=folder)),
            }
            for name, (begin, offload) in ways.items():
                found, ends = trained(loss, begin, mesh, offload)
                apart = max(abs(a - b) for a, b in zip(losses, found, strict=True))
                far = max(map(lambda a, b: float(np.abs(a - b).max()), *map(jax.tree.leaves, (params, ends))))
                if jax.process_index() == 0:
                    print(
                        f"{processes}, {count} devices, {form}, {name}: {apart:.2g}, {far:.2g}; "
                        f"loss {losses[0]:.3f} to {losses[-1]:.3f}",
                        flush=True,
                    )


def trained(loss, start, mesh, offload):
    """Return the losses of 20 steps of AdamW, and the parameters at the end."""
    import jax
    import optax

    from zerojax import zero_shard

    tx = zero_shard(optax.adamw(1e-3), stage=3, mesh=mesh, offload=offload)
    step, state, losses = tx.train_step(loss), tx.create(start), []
    for seed in range(20):
        state, metrics = step(state, tokens(24, seed))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(tx.unshard(state.params))


def one_unit(params):
    """Return the parameters, of which about half are changed to the next larger number."""
    import jax
    import numpy as np

    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.where(random.random(x.shape) < 0.5, np.nextafter(x, np.float32(2)), x), params)


if __name__ == "__main__":
    main()
