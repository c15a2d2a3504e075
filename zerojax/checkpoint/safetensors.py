"""Write safetensors files one tensor at a time, and read them one slice at a time.

The safetensors library can do neither. To write, it needs all arrays in memory at once, so this module writes the
format itself: a length, a JSON header, and the arrays one after the other. To read, the library maps a whole file,
which then counts as resident memory, so this module maps single tensors. The library still checks all headers.

References:
    https://github.com/huggingface/safetensors, section "Format".
"""

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# The name of each type in a file.
NAMES = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
NAMES |= {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
NAMES |= {f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"  # the header's key for metadata; all other keys are names of tensors


class Tensor(NamedTuple):
    """An array to write. `fetch` returns the array's values, and is called only when the array is written."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], np.ndarray]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(directory: Path, tensors: Sequence[Tensor], metadata: dict[str, str], limit: int) -> list[str]:
    """Write arrays into an empty folder, and return the names of the files.

    Each file has the metadata, and at most `limit` bytes of arrays, or a single larger array. If there are several
    files, an index is written, too.
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
    """The header of one array: its file, its type as safetensors names it, its shape, and the place of its bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int

    def map(self) -> np.ndarray:
        """Return the memory-mapped array. Only elements that are used are read from the file."""
        dtype = jnp.dtype(DTYPES[self.dtype])
        if not self.bytes:
            return np.zeros(self.shape, dtype)
        raw = np.memmap(self.file, np.uint8, "r", self.start, (self.bytes,))
        return raw.view(np.ndarray).view(dtype).reshape(self.shape)


def read_headers(path: Path) -> dict[str, Header]:
    """Return the headers of all tensors in a file, or in the files of a folder, by the tensor's name.

    Raises:
        FileNotFoundError: If there is no file, or a file that the index names is missing.
        ValueError: If a file is damaged, a tensor is in two files, or the index names a file outside the folder.
    """
    folder, index = path if path.is_dir() else path.parent, path / INDEX
    if path.is_file():
        names = {path.name}
    elif index.is_file():
        names = names_in_index(index)
    else:
        names = {file.name for file in path.glob("*.safetensors")}
    if not names:
        raise FileNotFoundError(
            f"There are no files of safetensors at {path}. Give a folder that has them, such as one that export "
            f"wrote, or one file."
        )
    missing = [str(folder / name) for name in sorted(names) if not os.path.exists(folder / name)]
    if missing:  # found by os.path.exists, because pathlib raises an error for a name that is too long
        raise FileNotFoundError(
            f"{', '.join(missing)} is not there, though the index beside it names it. Export or download it again."
        )
    headers: dict[str, Header] = {}
    for name in sorted(names):
        found = headers_of_file(folder / name)
        if doubled := min(found.keys() & headers.keys(), default=None):
            first = headers[doubled].file.name
            raise ValueError(f"{doubled} is in {first} and in {name} of {folder}. Give only one of the files.")
        headers |= found
    return headers


def names_in_index(index: Path) -> set[str]:
    """Return the file names in an index. Raise a `ValueError` if one is a path, not a file name."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        foreign = [name for name in names if name != os.path.basename(name) or name in ("", "..")]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors: {type(error).__name__}: {error}.") from error
    if foreign:
        raise ValueError(f"{index} names {min(foreign)!r}, which is not a file beside it. It is not opened.")
    return names


def headers_of_file(path: Path) -> dict[str, Header]:
    """Return the header of each tensor of a file, after the library has checked them."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} is no plain file.")
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except SafetensorError as error:
        raise ValueError(f"{path} is no intact file of safetensors: {error}. Export or download it again.") from error
    header.pop(METADATA, None)
    tensors = {}
    for name, one in header.items():
        start, end = one["data_offsets"]
        tensors[name] = Header(path, one["dtype"], tuple(one["shape"]), 8 + length + start, end - start)
    return tensors
