"""Measure what `import zerojax` costs beyond `import jax, optax`.

    python benchmarks/importing.py [ROUNDS]

Each round starts two fresh interpreters in turn, one with zerojax and one without.
"""

import statistics
import subprocess
import sys
import time

WAYS = {"jax, optax": "import jax, optax", "zerojax too": "import jax, optax, zerojax"}


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
for code in WAYS.values():
    seconds(code)  # compiles bytecode, warms the file cache
times = [[seconds(code) for code in WAYS.values()] for _ in range(rounds)]
for name, column in zip(WAYS, zip(*times, strict=True), strict=True):
    print(f"{name:12s} {statistics.median(column):.3f} s  ({min(column):.3f}-{max(column):.3f})")
extra = [with_it - without for without, with_it in times]
print(f"{'extra':12s} {statistics.median(extra):.3f} s  ({min(extra):.3f}-{max(extra):.3f})")
