"""Read parts of a large leaf from its files, which are uncompressed zarr: a file per shard, in row-major order.

TensorStore reads every file as a whole, even for a small part of it. So a leaf that is read in chunks would be read
many times, and host memory would hold a whole shard in addition to each chunk.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

# Bytes that are read at once.
BLOCK_BYTES = 4 << 20


class ZarrFiles(NamedTuple):
    """The files of one leaf. `chunks` is the shape of the part that each file has."""

    folder: Path
    chunks: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, folder: Path, dtype: np.dtype) -> ZarrFiles:
        """Read the shape of a file's part. `verifying.py` has checked the form and the size of all files."""
        return cls(folder, tuple(json.loads((folder / ".zarray").read_text())["chunks"]), dtype)

    def read(self, box: tuple[slice, ...], out: np.ndarray) -> None:
        """Read a box into an array of its shape. Every slice of `box` has a start and an end."""
        chunks = self.chunks
        if not box:  # zarr stores a scalar as a vector
            box, chunks, out = (slice(0, 1),), (1,), out.reshape(1)
        for cell in cells(box, chunks):
            origin = [i * n for i, n in zip(cell, chunks, strict=True)]
            edges = zip(box, origin, chunks, strict=True)
            inside = [(max(one.start, at), min(one.stop, at + n)) for one, at, n in edges]
            part = out[tuple(slice(a - one.start, b - one.start) for (a, b), one in zip(inside, box, strict=True))]
            local = [(a - at, b - at) for (a, b), at in zip(inside, origin, strict=True)]
            with (self.folder / ".".join(map(str, cell))).open("rb") as file:
                copy_rows(file, 0, chunks, local, part)


def cells(box: tuple[slice, ...], chunks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield from itertools.product(
        *(range(one.start // n, -(-one.stop // n)) for one, n in zip(box, chunks, strict=True))
    )


def copy_rows(
    file: IO[bytes], offset: int, shape: tuple[int, ...], box: list[tuple[int, int]], out: np.ndarray
) -> None:
    """Copy a box of an array that begins at `offset` of a file. `box` has a start and an end for each dim."""
    row_bytes, (start, stop) = math.prod(shape[1:]) * out.itemsize, box[0]
    if row_bytes > BLOCK_BYTES and len(shape) > 1:
        for i in range(start, stop):
            copy_rows(file, offset + i * row_bytes, shape[1:], box[1:], out[i - start])
        return
    rows = max(1, BLOCK_BYTES // row_bytes)
    for i in range(start, stop, rows):
        count = min(rows, stop - i)
        file.seek(offset + i * row_bytes)
        content = file.read(count * row_bytes)
        if len(content) < count * row_bytes:
            raise EOFError("a file is shorter than its shard")
        block = np.frombuffer(content, out.dtype).reshape(count, *shape[1:])
        out[i - start : i - start + count] = block[(slice(None), *(slice(*span) for span in box[1:]))]
