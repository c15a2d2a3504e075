"""Files of safetensors: written leaf by leaf, read slice by slice.

The library writes only arrays that are all in memory at once, so the writing is done here: a
length, a JSON header, the arrays one after the other. Reading is the library's.

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

NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
INDEX = "model.safetensors.index.json"


class Tensor(NamedTuple):
    """One array to write.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        dtype: Its type.
        fetch: Returns it; called when it is written.
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
        directory: Exists, and is empty.
        tensors: In the order they are written.
        metadata: Goes into every file.
        limit: In bytes; a larger array has a file to itself.

    Returns:
        The names of the files with arrays.
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    count = len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    for name, group in zip(names, groups, strict=True):
        write_file(directory / name, group, metadata)
    if count > 1:
        weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
        total = sum(tensor.bytes for tensor in tensors)
        index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def write_file(path: Path, tensors: Sequence[Tensor], metadata: dict[str, str]) -> None:
    """Write one file, fetching one array at a time."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.bytes
        dtype = NAMES[tensor.dtype.name]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
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
            ValueError: If a file is damaged, or the index names one outside the folder.
        """
        folder, index = path if path.is_dir() else path.parent, path / INDEX
        if path.is_file():
            names = {path.name}
        elif index.is_file():
            names = names_in_index(index)
        else:
            names = {file.name for file in path.glob("*.safetensors")}
        if not names:
            raise FileNotFoundError(f"There are no files of safetensors at {path}.")
        opened = [open_file(folder / name) for name in sorted(names)]
        self._files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        self.tied = {
            name: other
            for file in opened
            for name, other in (file.metadata() or {}).items()
            if name not in self._files and other in self._files
        }

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor, tied to another or not."""
        return name in self._files or name in self.tied

    def names(self) -> set[str]:
        """All names, tied ones included."""
        return set(self._files) | set(self.tied)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slices(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor, without reading the rest."""
        if not index:
            name = self.tied.get(name, name)
            return self._files[name].get_tensor(name)
        tensor = self._slices(name)
        if any(one.start >= one.stop for one in index):  # the library refuses empty slices
            return np.zeros([one.stop - one.start for one in index], jnp.dtype(DTYPES[tensor.get_dtype()]))
        return tensor[index]

    def _slices(self, name: str):
        name = self.tied.get(name, name)
        return self._files[name].get_slice(name)


def names_in_index(index: Path) -> set[str]:
    """The files that an index names, all beside it."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        foreign = [name for name in names if name != os.path.basename(name) or name in ("", "..")]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors: {type(error).__name__}: {error}.") from error
    if foreign:
        raise ValueError(f"{index} names {min(foreign)!r}, which is not a file beside it. It is not opened.")
    return names


def open_file(path: Path) -> Any:
    """A file of safetensors, its header read."""
    from safetensors import SafetensorError, safe_open

    if not os.path.exists(path):  # unlike pathlib's, of a name of any length
        raise FileNotFoundError(f"{path} is not there, though the index beside it names it.")
    if not path.is_file():
        raise ValueError(f"{path} is no plain file.")
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{path} is no intact file of safetensors: {error}. Export or download it again.") from error
