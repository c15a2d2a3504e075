"""Compare two ways to read layers from files on CPU: callbacks in one program, and one program per layer.

    python benchmarks/io_callback.py

The forward pass of a stack of matrices reads each matrix from a separate file. `ordered` and `unordered` are one
compiled program, in which `jax.experimental.io_callback` reads each matrix. `stages` calls one small program per
matrix, while a thread reads the next matrix. These three ways use direct I/O. `memory` reads no file. Every round
measures each way once. For each way, the program prints the median and the range of the seconds of all rounds, and the
median of the processor seconds of all threads.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from zerojax.offload import disk


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    shape = jax.ShapeDtypeStruct((args.width, args.width), jnp.float32)
    with tempfile.TemporaryDirectory() as name:
        paths = [pathlib.Path(name, str(i)) for i in range(args.layers)]
        matrix = np.random.default_rng(0).normal(size=shape.shape).astype(np.float32) / args.width**0.5
        buffer = disk.aligned_buffer(matrix.nbytes)
        buffer[:] = matrix.tobytes()
        for path in paths:
            disk.transfer(path, buffer, write=True, direct=True)
        ways, x = ways_of(paths, shape, jnp.asarray(matrix)), jnp.ones((args.rows, args.width))
        results = {way: run(x).block_until_ready() for way, run in ways.items()}
        assert all(bool((y == results["memory"]).all()) for y in results.values())
        times = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, run in ways.items():
                begun, used = time.perf_counter(), time.process_time()
                run(x).block_until_ready()
                times[way].append((time.perf_counter() - begun, time.process_time() - used))
    for way, found in times.items():
        seconds, used = zip(*found, strict=True)
        spread = f"({min(seconds):.3f} to {max(seconds):.3f})"
        print(f"{way:10} {statistics.median(seconds):.3f} s {spread}, {statistics.median(used):.3f} processor seconds")


def ways_of(paths, shape, matrix):
    """Return the functions that compute the stack's result, by the name of the way."""

    def read(number):
        buffer = disk.aligned_buffer(shape.size * 4)
        disk.transfer(paths[int(number)], buffer, write=False, direct=True)
        return np.frombuffer(buffer, np.float32).reshape(shape.shape)

    def layer(x, w):
        return jnp.tanh(x @ w)

    def with_callbacks(ordered):
        def run(x):
            for number in range(len(paths)):
                x = layer(x, io_callback(read, shape, number, ordered=ordered))
            return x

        return jax.jit(run)

    stage, pool = jax.jit(layer), ThreadPoolExecutor(1)

    def stages(x):
        reading = [pool.submit(read, number) for number in range(2)]
        for number in range(len(paths)):
            if number + 2 < len(paths):
                reading.append(pool.submit(read, number + 2))
            x = stage(x, jax.device_put(reading.pop(0).result()))
        return x

    def memory(x):
        for _ in paths:
            x = stage(x, matrix)
        return x

    return {"ordered": with_callbacks(True), "unordered": with_callbacks(False), "stages": stages, "memory": memory}


if __name__ == "__main__":
    main()
