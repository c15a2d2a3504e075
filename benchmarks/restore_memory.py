"""Measure the peak memory of restoring a state of 2 GB, on 8 simulated devices.

    python benchmarks/restore_memory.py                    Adam's state of 167M parameters
    python benchmarks/restore_memory.py --megabytes 500 --rounds 1 --out results/restore_memory.json

Every way restores in a separate process. `added` is the most that was resident (VmHWM) while restoring, minus what was
resident before. Simulated devices are in host memory, so `added` includes what the state keeps: its shards and the
offloaded chunks. The parameters are separate layers, or one stack of all layers, whose leaves are a third of the state.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import machine

MODELS = ("layers", "stack")
WAYS = ("device", "host")
WIDTH, LAYERS = 1024, 12


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, help="for the checkpoints (default: the temporary one)")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument("--run", choices=("save", "restore"), help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def shapes(model, megabytes):
    """Parameters of float32, of which Adam keeps two moments: 12 bytes per element, in two matrices per layer."""
    import jax
    import jax.numpy as jnp

    rows = megabytes * 1_000_000 // (12 * WIDTH * 2 * LAYERS) // 8 * 8
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = lambda *lead: {"up": of(*lead, WIDTH, rows), "down": of(*lead, rows, WIDTH), "norm": of(*lead, WIDTH)}
    return layer(LAYERS) if model == "stack" else {f"layer_{i}": layer() for i in range(LAYERS)}


def transformation(way):
    import optax

    from zerojax import Offload, zero_shard

    offload = Offload(optimizer="host", chunk_bytes=1 << 20, update="device") if way == "host" else None
    return zero_shard(optax.adam(1e-3), stage=3, offload=offload)


def save(folder, args):
    import jax
    import jax.numpy as jnp

    from zerojax.checkpoint import Checkpointer

    given = shapes(args.model, args.megabytes)
    init = lambda: jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), given)
    tx = transformation("device")
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(tx.create(tx.init_params(init)))


def restore(folder, args):
    """In a fresh process: bytes that the state keeps, most that was resident beyond what was before, seconds."""
    import jax
    import jax.numpy as jnp

    from zerojax.checkpoint import Checkpointer

    like = transformation(args.way).create(shapes(args.model, args.megabytes))
    jax.block_until_ready([jax.device_put(jnp.ones(8), device) for device in jax.devices()])
    checkpoints = Checkpointer(folder, read_only=True)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = resident("VmRSS"), time.perf_counter()
    state = jax.block_until_ready(checkpoints.restore(like).state)
    seconds = time.perf_counter() - start
    added, after = resident("VmHWM") - before, resident("VmRSS") - before
    kept = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards)
    first = state.params["up" if args.model == "stack" else "layer_0"]
    assert args.model == "layers" or float(first.ravel()[5]) == 5.0
    return {"kept": kept, "added": added, "after": after, "seconds": seconds}


def resident(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def child(folder, run, model, way, megabytes):
    command = [sys.executable, __file__, "--run", run, "--model", model, "--way", way]
    command += ["--directory", folder, "--megabytes", str(megabytes)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main():
    args = arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    if args.run == "save":
        save(args.directory, args)
        return
    if args.run == "restore":
        print(json.dumps(restore(args.directory, args)))
        return
    result = {**machine.described(), "ways": {}}
    print(f"{'':24s}{'kept GB':>10s}{'added GB':>10s}{'ratio':>8s}{'seconds':>9s}")
    for model in MODELS:
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            child(folder, "save", model, "device", args.megabytes)
            for way in WAYS:
                found = [json.loads(child(folder, "restore", model, way, args.megabytes)) for _ in range(args.rounds)]
                kept, added = found[0]["kept"], max(one["added"] for one in found)
                seconds = statistics.median(one["seconds"] for one in found)
                name = f"{model}, into {'shards' if way == 'device' else 'host memory'}"
                print(f"{name:24s}{kept / 1e9:10.2f}{added / 1e9:10.2f}{added / kept:8.3f}{seconds:9.1f}")
                result["ways"][name] = {"kept": kept, "added": added, "ratio": added / kept, "seconds": seconds}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


main()
