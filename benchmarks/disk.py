"""Measure how fast the disk store cycles over its chunks, compared with plain reads and writes of the same bytes.

    python benchmarks/disk.py                    2 GB in chunks of 32 MiB
    python benchmarks/disk.py --gb 8 --rounds 3 --directory /somewhere/on/the/disk
    python benchmarks/disk.py --out benchmarks/results/disk.json

Every round does each way once, so that a slow moment of the machine affects all of them. `store` reads every chunk,
changes one number of each array and writes the chunk back. Its reads run ahead and its writes behind, and its time
includes checksums and the copy into the store's buffers. `plain` reads each file of that size in one call, then writes
each in one call, without checksums or updates. Both overwrite files in place, and bypass the page cache where the file
system can. `raw read` and `raw write` are the two halves of `plain`.
"""

import argparse
import contextlib
import datetime
import json
import mmap
import os
import pathlib
import platform
import resource
import shutil
import statistics
import tempfile
import time

import numpy as np

from zerojax.offload.disk import ChunkSpec, DiskStore, buffer_bytes

CHUNK = 32 << 20


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state, in gigabytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=4, help="of the store")
    parser.add_argument("--ahead", type=int, default=3, help="reads issued ahead")
    parser.add_argument("--directory", type=pathlib.Path, help="where to write (default: the temporary one)")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    return parser.parse_args()


def main():
    args = arguments()
    directory = pathlib.Path(tempfile.mkdtemp(dir=args.directory))
    try:
        result = measure(args, directory)
    finally:
        shutil.rmtree(directory)
    size, rows = result["bytes"], result["seconds"]
    print(f"{size / 1e9:.2f} GB in and out, {result['chunks']} chunks, direct I/O: {result['direct']}\n")
    print(f"{'':12s}{'seconds':>10s}{'spread':>16s}{'GB/s':>8s}")
    for name, row in rows.items():
        spread = f"{row['least']:.3f}-{row['most']:.3f}"
        print(f"{name:12s}{row['median']:10.3f}{spread:>16s}{row['GB/s']:8.2f}")
    share = result["store / plain"]
    print(f"\nstore / plain: {share['median']:.2f} ({share['least']:.2f}-{share['most']:.2f}, round by round)")
    print(f"memory: {result['buffer_bytes'] >> 20} MiB of buffers; the process's peak {result['peak_bytes'] >> 20} MiB")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def measure(args, directory):
    count = max(1, round(args.gb * 1e9 / CHUNK))
    elements = CHUNK // 12
    specs = [ChunkSpec(f"layer {i}", (((elements,), np.dtype(np.float32)),) * 3) for i in range(count)]
    with contextlib.closing(DiskStore(directory / "store", specs, threads=args.threads)) as store:
        fill = [np.random.default_rng(0).standard_normal(elements, np.float32)] * 3
        for i in range(count):
            store.write(i, fill)
        store.flush()
        file_bytes = specs[0].bytes
        plain = Plain(directory / "plain", count, file_bytes, direct=store.direct)
        seconds = {name: [] for name in ("store", "plain", "raw read", "raw write")}
        for step in range(args.rounds + 1):
            times = {"store": timed(lambda: cycle(store, count, args.ahead))}
            times["raw read"], times["raw write"] = timed(plain.read), timed(plain.write)
            times["plain"] = times["raw read"] + times["raw write"]
            if step:  # the first round warms up
                for name, spent in times.items():
                    seconds[name].append(spent)
        moved = {"store": 2, "plain": 2, "raw read": 1, "raw write": 1}
        size = count * file_bytes
        return {
            "date": datetime.date.today().isoformat(),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "linux": platform.release().split("-")[0],
            "processor": processor(),
            "cores": os.cpu_count(),
            "bytes": size,
            "chunks": count,
            "direct": store.direct,
            "threads": args.threads,
            "buffer_bytes": buffer_bytes(specs, in_flight=4),
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "rounds": args.rounds,
            "seconds": {
                name: {**spread(times), "GB/s": moved[name] * size / statistics.median(times) / 1e9}
                for name, times in seconds.items()
            },
            "store / plain": spread([p / s for p, s in zip(seconds["plain"], seconds["store"], strict=True)]),
        }


def processor():
    """The processor's model; what `platform` says of it is often nothing."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return models[0] if models else platform.machine()


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cycle(store, count, ahead):
    """One training step's worth: every chunk read, changed and written."""
    reads = [store.read(i) for i in range(min(ahead, count))]
    for i in range(count):
        arrays = reads.pop(0).result()
        if i + ahead < count:
            reads.append(store.read(i + ahead))
        for array in arrays:
            array[:1] += 1
        store.write(i, arrays)
    store.flush()


class Plain:
    """Files read and written by one thread, and nothing else."""

    def __init__(self, directory, count, size, *, direct):
        directory.mkdir()
        self.paths = [directory / str(i) for i in range(count)]
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # as the store's: small pages slow direct I/O
        self.buffer = memoryview(memory)
        self.direct = os.O_DIRECT if direct else 0
        self.buffer[:] = os.urandom(size)
        self.write()

    def read(self):
        for path in self.paths:
            handle = os.open(path, os.O_RDONLY | self.direct)
            assert os.preadv(handle, [self.buffer], 0) == len(self.buffer)
            os.close(handle)

    def write(self):
        for path in self.paths:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | self.direct, 0o644)
            assert os.pwritev(handle, [self.buffer], 0) == len(self.buffer)
            os.close(handle)


if __name__ == "__main__":
    main()
