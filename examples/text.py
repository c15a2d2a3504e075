"""Load real text that every machine has: the source of Python's standard library, as bytes.

Whole files are held out, so that the model has seen no part of a held-out file.
"""

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

HOLD_OUT_EVERY = 16
MAX_BYTES = 16 * 2**20
# Tests and tables repeat themselves, and installed packages differ between machines.
SKIPPED = {"encodings", "dist-packages", "pydoc_data", "site-packages", "test", "tests"}


class Corpus(NamedTuple):
    """Bytes to train on, and bytes of other files to evaluate on."""

    train: np.ndarray
    held_out: np.ndarray


def load(path: Path | None = None) -> Corpus:
    """Read `path`, or the standard library's source, and hold one part in sixteen out."""
    return part(standard_library() if path is None else pieces(path.read_bytes()))


def part(documents: list[bytes]) -> Corpus:
    """Hold one document in sixteen out."""
    held_out = documents[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    train = [d for i, d in enumerate(documents) if (i + 1) % HOLD_OUT_EVERY]
    return Corpus(joined(train), joined(held_out))


def standard_library() -> list[bytes]:
    """Read every source file of the standard library, in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts))
    return [p.read_bytes() for p in paths]


def pieces(text: bytes, count: int = 8 * HOLD_OUT_EVERY) -> list[bytes]:
    """Cut one file into equal pieces, so that part of it can be held out."""
    size = -(-len(text) // count)
    return [text[i : i + size] for i in range(0, len(text), size)]


def joined(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(documents)[:MAX_BYTES], np.uint8)


def random_windows(text: np.ndarray, *, rows: int, length: int, seed: int, step: int) -> np.ndarray:
    """Draw windows of `length + 1` bytes, a pure function of `(seed, step)`: a resumed run sees the same data."""
    starts = np.random.default_rng((seed, step)).integers(len(text) - length, size=rows)
    return windows_at(text, starts, length)


def even_windows(text: np.ndarray, *, rows: int, length: int) -> np.ndarray:
    """Take windows of `length + 1` bytes spread evenly over `text`."""
    return windows_at(text, np.linspace(0, len(text) - length - 1, rows).astype(int), length)


def windows_at(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
