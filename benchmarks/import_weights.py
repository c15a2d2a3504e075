"""Measure the peak memory of reading published weights into shards, on 8 simulated devices.

    python benchmarks/import_weights.py                     a Llama of 2 GB in bfloat16
    python benchmarks/import_weights.py --layers 4 --rounds 1 --out results/import_weights.json

Every layout is read in a separate process. `added` is the most that was resident (VmHWM) while reading, minus what was
resident before. Simulated devices are in host memory, so it includes their shards, and pages of the files while they
are mapped. The plain way is measured too: all tensors to host memory, then sharded.
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

ROOT = pathlib.Path(__file__).parent.parent
WAYS = {"import_params, stage 3": 3, "import_params, stage 0, one device": 0, "to host, then shard": None}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, help="for the weights (default: the temporary one)")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument("--read", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    return parser.parse_args()


def config(layers):
    """Of Llama 3.2 1B, with another head."""
    from llama import Config

    return Config(32_768, 2048, 8192, layers, heads=32, kv_heads=8, head=64, epsilon=1e-5, theta=5e5)


def write(folder, layers):
    """Random weights of the published names and shapes; one tensor in memory at a time."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from llama import published, shapes_of

    from zerojax.checkpoint.mapping import resolve
    from zerojax.checkpoint.safetensors import Tensor
    from zerojax.checkpoint.safetensors import write_tensors as write_tensors

    shapes = jax.tree_util.tree_flatten_with_path(shapes_of(config(layers)))[0]
    leaves = [("/".join(key.key for key in path), x.shape) for path, x in shapes]
    resolved, bits = resolve(published(config(layers)), leaves), np.random.default_rng(0)
    tensors = []
    for name in resolved.tensors:
        shape = resolved.shape(name)
        draw = lambda shape=shape: bits.integers(0x3F80, size=shape, dtype=np.uint16).view(jnp.bfloat16)
        tensors.append(Tensor(name, shape, jnp.dtype(jnp.bfloat16), draw))
    write_tensors(folder, tensors, {"format": "pt"}, 500_000_000)
    return sum(tensor.bytes for tensor in tensors)


def read(folder, layers, way):
    """In a fresh process: bytes of the shards, most that was resident beyond what was before, seconds."""
    import jax
    import jax.numpy as jnp
    import optax
    from llama import published, shapes_of

    from zerojax import zero_shard
    from zerojax.checkpoint import import_params

    count = 1 if WAYS[way] == 0 else 8
    mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
    tx = zero_shard(optax.identity(), stage=3 if WAYS[way] is None else WAYS[way], mesh=mesh)
    shapes, mapping = shapes_of(config(layers), jnp.bfloat16), published(config(layers))
    like = tx.shard(shapes)
    jax.block_until_ready([jax.device_put(jnp.ones(8), device) for device in jax.devices()])
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = resident("VmRSS"), time.perf_counter()
    if WAYS[way] is None:
        params = tx.shard(import_params(folder, shapes, mapping=mapping))
    else:
        params = import_params(folder, like, mapping=mapping)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    shards = sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
    return {"shards": shards, "added": resident("VmHWM") - before, "before": before, "seconds": seconds}


def resident(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def main():
    args = arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    sys.path.insert(0, str(ROOT / "examples"))
    if args.read:
        print(json.dumps(read(args.read, args.layers, args.way)))
        return
    rows = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        size = write(pathlib.Path(folder), args.layers)
        for _ in range(args.rounds):
            for way, found in rows.items():
                command = [sys.executable, __file__, "--read", folder, "--layers", str(args.layers), "--way", way]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout))
    result = {**machine.described(), "file_bytes": size, "ways": {}}
    print(f"{size / 1e9:.2f} GB\n\n{'':36s}{'shards GB':>10s}{'added GB':>10s}{'ratio':>8s}{'seconds':>9s}")
    for way, found in rows.items():
        shards, added = found[0]["shards"], max(one["added"] for one in found)
        seconds = statistics.median(one["seconds"] for one in found)
        print(f"{way:36s}{shards / 1e9:10.2f}{added / 1e9:10.2f}{added / shards:8.3f}{seconds:9.1f}")
        before = found[0]["before"]
        result["ways"][way] = {"shards": shards, "added": added, "before": before, "seconds": seconds}
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
