"""Files of safetensors: written leaf by leaf, read slice by slice.

The library writes only arrays that are all in memory at once, so the writing is done here: a
length, a JSON header, the arrays one after the other. The library checks what is read; it maps a
file for as long as it is open, all of which counts as resident, so mapping is done here, too.

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
METADATA = "__metadata__"  # a key of the header, beside the tensors' names


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
        """Return its size."""
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
    header: dict[str, Any] = {METADATA: metadata}
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


class Header(NamedTuple):
    """What a file says of one of its arrays.

    Attributes:
        file: Where the array is.
        dtype: Its type, as safetensors names it.
        shape: Its shape.
        start: Where its bytes begin in the file.
        bytes: Their number.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


class Files:
    """The tensors of a folder or a file of safetensors, mapped into memory one by one."""

    def __init__(self, path: Path):
        """Read the headers.

        Raises:
            FileNotFoundError: If there is no such file or folder, none in it, or not all that the index names.
            ValueError: If a file is damaged, two have the same tensor, or the index names one outside the folder.
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
        missing = [str(folder / name) for name in sorted(names) if not os.path.exists(folder / name)]
        if missing:  # os.path, unlike pathlib, takes a name of any length
            raise FileNotFoundError(f"{', '.join(missing)} is not there, though the index beside it names it.")
        self._headers: dict[str, Header] = {}
        metadata: dict[str, str] = {}
        for name in sorted(names):
            headers, said = read_headers(folder / name)
            if doubled := min(headers.keys() & self._headers.keys(), default=None):
                first = self._headers[doubled].file.name
                raise ValueError(f"{doubled} is in {first} and in {name} of {folder}. Give one of the files alone.")
            self._headers |= headers
            metadata |= said
        self.tied = {
            name: other for name, other in metadata.items() if name not in self._headers and other in self._headers
        }

    def __contains__(self, name: str) -> bool:
        """Return whether there is such a tensor, tied to another or not."""
        return name in self._headers or name in self.tied

    def names(self) -> set[str]:
        """Return the names of all tensors except those that are tied to another."""
        return set(self._headers)

    def header(self, name: str) -> Header:
        """Return what the file says about a tensor."""
        return self._headers[self.tied.get(name, name)]

    def map(self, name: str) -> np.ndarray:
        """Map a tensor into memory as long as it or a view of it is referenced. Only what is looked at is read.

        Raises:
            ValueError: If the file has become shorter.
        """
        one = self.header(name)
        dtype = jnp.dtype(DTYPES[one.dtype])
        if not one.bytes:
            return np.zeros(one.shape, dtype)
        raw = np.memmap(one.file, np.uint8, "r", one.start, (one.bytes,))
        return raw.view(np.ndarray).view(dtype).reshape(one.shape)


def names_in_index(index: Path) -> set[str]:
    """Return the files that an index names. All of them must be in its folder."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        foreign = [name for name in names if name != os.path.basename(name) or name in ("", "..")]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors: {type(error).__name__}: {error}.") from error
    if foreign:
        raise ValueError(f"{index} names {min(foreign)!r}, which is not a file beside it. It is not opened.")
    return names


def read_headers(path: Path) -> tuple[dict[str, Header], dict[str, str]]:
    """Read the header of each tensor of a file, which the library has checked, and the file's metadata."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} is no plain file.")
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise ValueError(f"{path} is no intact file of safetensors: {error}. Export or download it again.") from error
    metadata, tensors = header.pop(METADATA, None) or {}, {}
    for name, one in header.items():
        start, end = one["data_offsets"]
        tensors[name] = Header(path, one["dtype"], tuple(one["shape"]), 8 + length + start, end - start)
    return tensors, metadata
