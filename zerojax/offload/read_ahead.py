"""Read several parts of files at a time, within a limit of bytes."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

THREADS = 8


def read_ahead(read: Callable[..., Any], parts: Sequence[tuple], sizes: Sequence[int], limit: int) -> Iterator[Any]:
    """Yield `read(*part)` of each part, in order. Threads read the next parts while the caller uses one.

    `sizes` has the bytes of each part. The part that the caller uses and all parts that are read ahead have at most
    `limit` bytes, or are one part that is larger.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        reading: collections.deque[tuple[Future, int]] = collections.deque()
        held = 0
        for part, size in zip(parts, sizes, strict=True):
            while reading and held + size > limit:
                future, done = reading.popleft()
                yield future.result()
                del future
                held -= done
            reading.append((pool.submit(read, *part), size))
            held += size
        while reading:
            yield reading.popleft()[0].result()
