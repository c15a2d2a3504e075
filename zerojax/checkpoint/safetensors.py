"""Files of safetensors: written leaf by leaf, read part by part.

The library writes only what is in memory all at once, so the writing is done here: a length,
a JSON header, the arrays one after the other. It reads slices, and does so here.

References:
    https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.offload.chunks import NAMES

DTYPES = {name: dtype for dtype, name in NAMES.items()}
INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """One array to write.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        dtype: Its type.
        fetch: Gives it; called once, when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(directory: Path, tensors: Sequence[Tensor], metadata: dict[str, str], limit: int) -> list[str]:
    """Write files of at most `limit` bytes of arrays, with an index if there are several.

    Args:
        directory: There, and empty.
        tensors: In the order they are written.
        metadata: Goes into every file.
        limit: In bytes; an array that is larger has a file of its own.

    Returns:
        The names of the files with arrays.
    """
    parts = divided(tensors, limit)
    names = [
        f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        for i in range(len(parts))
    ]
    for name, part in zip(names, parts, strict=True):
        write_file(directory / name, part, metadata)
    if len(parts) > 1:
        where = {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part}
        total = sum(tensor.bytes for tensor in tensors)
        index = {"metadata": {"total_size": total, **metadata}, "weight_map": where}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def divided(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Consecutive tensors, as many together as the limit allows."""
    parts: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if parts[-1] and size + tensor.bytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.bytes
    return parts


def write_file(path: Path, tensors: Sequence[Tensor], metadata: dict[str, str]) -> None:
    """Write one file, fetching one array at a time."""
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.bytes]
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at += tensor.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            array = np.asarray(tensor.fetch(), order="C")
            assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype), tensor.name
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


class Files:
    """The tensors of a folder or a file of safetensors, read slice by slice."""

    def __init__(self, path: Path):
        """Read the headers.

        Raises:
            FileNotFoundError: If there is no such file or folder, or none in it.
        """
        from safetensors import safe_open

        folder, index = path if path.is_dir() else path.parent, path / INDEX
        if path.is_file():
            names = {path.name}
        elif index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        else:
            names = {file.name for file in path.glob("*.safetensors")}
        if not names:
            raise FileNotFoundError(f"There are no files of safetensors at {path}.")
        opened = [safe_open(folder / name, framework="numpy") for name in sorted(names)]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        metadata = [file.metadata() or {} for file in opened]
        self.tied = {
            name: other
            for found in metadata
            for name, other in found.items()
            if name not in self._files and other in self._files
        }

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor, be it tied to another."""
        return name in self._files or name in self.tied

    def names(self) -> set[str]:
        """All names, tied ones included."""
        return set(self._files) | set(self.tied)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._at(name).get_shape())

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, without reading the rest."""
        found = self._at(name)
        if not index:
            return self._files[self.tied.get(name, name)].get_tensor(self.tied.get(name, name))
        if any(one.start >= one.stop for one in index):  # the library refuses empty slices
            return np.zeros([one.stop - one.start for one in index], jnp.dtype(DTYPES[found.get_dtype()]))
        return found[index]

    def _at(self, name: str):
        name = self.tied.get(name, name)
        return self._files[name].get_slice(name)
