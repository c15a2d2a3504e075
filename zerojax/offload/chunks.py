"""A chunk of optimizer state as one file, which `safetensors` opens too.

8 bytes   length of the header
header    JSON, padded with spaces; its `__metadata__` says of which run, chunk and step the file is
arrays    "0", "1", …, one after the other, and "pad", since the format leaves no byte without a name

Header and file are multiples of 4096 bytes, as direct I/O requires. The checksum is over the file with its
own eight digits read as zeros; they come first in the header, so their offset is known. It is the CRC-32 of the
sums, modulo 2**64, of each sector's 64-bit words: a changed word, a sector of zeros or a sector of another offset
changes it, and it takes a fifth of the time of the CRC-32 of all bytes, which is slower than a good disk.

References:
    https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from zerojax.offload.buffers import BLOCK

FORMAT, VERSION = "zerojax.offload", 1
STEPS = 10**12
_DIGITS = slice(start := 8 + len('{"__metadata__":{"checksum":"'), start + 8)
_BLANK = b"00000000"
_SECTOR = 512
# The dtypes safetensors has a name for; others are stored as bytes, and the metadata tells their type.
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


class DiskError(RuntimeError):
    """State cannot be offloaded to a folder, or a chunk could not be written."""


class DiskStateError(DiskError):
    """A file of offloaded state is not the one that is required."""

    def __init__(self, path: Path, found: str, required: str):
        """Say which file, what it is and what it should be."""
        super().__init__(
            f"{path} {found}; required is {required}. Restore the run from its last checkpoint, which writes the "
            f"offloaded state anew."
        )


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """The arrays of a chunk.

    Attributes:
        name: For errors and for people who look into the file.
        arrays: Local shape and dtype of each array; dtypes by name, `ml_dtypes`' included.

    Raises:
        ValueError: If a shape or a dtype is invalid.
    """

    name: str
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    def __post_init__(self):
        for i, (shape, dtype) in enumerate(self.arrays):
            where = f"Array {i} of chunk {self.name!r}"
            if any(extent < 0 for extent in shape):
                raise ValueError(f"{where} has the shape {shape}. Give extents of 0 or more.")
            try:
                known = dtype_of(dtype)
            except TypeError as error:
                raise ValueError(f"{where} has the dtype {dtype!r}, unknown to NumPy and ml_dtypes.") from error
            if known.name != dtype or known.hasobject or not known.itemsize:
                raise ValueError(f"{where} has the dtype {dtype!r}. Give the name of one of numbers, as 'float32'.")

    @property
    def segments(self) -> list[Segment]:
        """Where the arrays are in the file."""
        found, start = [], 0
        for shape, name in self.arrays:
            dtype = dtype_of(name)
            found.append(Segment(start, start + math.prod(shape) * dtype.itemsize, tuple(shape), dtype))
            start = found[-1].end
        return found

    def views(self, data: memoryview) -> tuple[np.ndarray, ...]:
        """The arrays in a file's content after the header."""
        return tuple(np.ndarray(s.shape, s.dtype, buffer=data, offset=s.start) for s in self.segments)


class Segment(NamedTuple):
    """An array in a file: its first byte after the header, the end, and what it is."""

    start: int
    end: int
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class Label:
    """Which state a file holds.

    Attributes:
        owner: Fingerprint of the run's layout.
        index: Which chunk.
        count: Of how many.
        step: Of which step.
        spec: Its arrays.
    """

    owner: str
    index: int
    count: int
    step: int
    spec: ChunkSpec

    @property
    def header(self) -> bytes:
        """The file up to its arrays, without the checksum; its length does not depend on the step."""
        table, end = {}, 0
        for i, (start, end, shape, dtype) in enumerate(self.spec.segments):
            name = NAMES.get(dtype.name)
            shape = shape if name else [end - start]
            table[str(i)] = {"dtype": name or "U8", "shape": shape, "data_offsets": [start, end]}
        if pad := -end % BLOCK:
            table["pad"] = {"dtype": "U8", "shape": [pad], "data_offsets": [end, end + pad]}
        metadata = {
            "checksum": _BLANK.decode(),
            "format": f"{FORMAT} {VERSION}",
            "owner": self.owner,
            "chunk": str(self.index),
            "chunks": str(self.count),
            "name": self.spec.name,
            "step": f"{self.step:012d}",
            "arrays": json.dumps(self.spec.arrays),
        }
        text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % BLOCK)
        return len(text).to_bytes(8, "little") + text

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        size = len(self.header) + max((s.end for s in self.spec.segments), default=0)
        return size + -size % BLOCK


def dtype_of(name: str) -> np.dtype:
    """A dtype of NumPy or `ml_dtypes`."""
    return np.dtype(getattr(ml_dtypes, name, name))


def pack(label: Label, arrays: Sequence[np.ndarray], into: memoryview) -> None:
    """Write a chunk's file to a buffer of its size, all but the checksum.

    Raises:
        ValueError: If the arrays are not those of the chunk.
    """
    segments, name = label.spec.segments, label.spec.name
    if len(arrays) != len(segments):
        raise ValueError(f"Chunk {name!r} got {len(arrays)} arrays. Give its {len(segments)}.")
    for i, (array, (*_, shape, dtype)) in enumerate(zip(arrays, segments, strict=True)):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"Array {i} of chunk {name!r} is {array.dtype}{list(array.shape)}. Give one of {dtype}{list(shape)}."
            )
    head = label.header
    into[: len(head)] = head
    data = into[len(head) :]
    for array, view in zip(arrays, label.spec.views(data), strict=True):
        np.copyto(view, array)
    end = segments[-1].end if segments else 0
    data[end:] = bytes(len(data) - end)


def seal(content: memoryview) -> None:
    """Enter the checksum into a file's content, where its digits are blank."""
    content[_DIGITS] = checksum(content)


def unseal(content: memoryview) -> bool:
    """Blank the checksum of a file's content, and tell whether it was right."""
    digits = bytes(content[_DIGITS])
    content[_DIGITS] = _BLANK
    return checksum(content) == digits


def checksum(content: memoryview) -> bytes:
    """The digits of the checksum of a file's content."""
    words = np.frombuffer(content, "<u8").reshape(-1, _SECTOR // 8)
    return b"%08x" % zlib.crc32(words.sum(axis=1, dtype="<u8"))


def identify(path: Path) -> Label:
    """Which state a file holds, all of it read and its checksum compared.

    Raises:
        DiskStateError: If it is missing, not a chunk's file, or damaged.
    """
    required = "a complete chunk of offloaded state"
    try:
        content = memoryview(bytearray(path.read_bytes()))
    except FileNotFoundError as error:
        raise DiskStateError(path, "is missing", required) from error
    except OSError as error:
        raise DiskStateError(path, f"cannot be read: {error.strerror}", required) from error
    length = int.from_bytes(content[:8], "little") if len(content) >= _DIGITS.stop else 0
    if length <= _DIGITS.stop - 8:
        raise DiskStateError(path, f"has {len(content)} bytes that begin like no safetensors file", required)
    label = _label(path, bytes(content[8 : 8 + length]), required)
    if len(content) != label.file_bytes:
        raise DiskStateError(path, f"is torn: it has {len(content)} bytes", f"its full {label.file_bytes}")
    digits = bytes(content[_DIGITS]).decode(errors="replace")
    if not unseal(content):
        raise DiskStateError(path, f"is damaged: its bytes have the checksum {checksum(content).decode()}", digits)
    return label


def _label(path: Path, text: bytes, required: str) -> Label:
    """What a header says.

    Raises:
        DiskStateError: If it is not a chunk's.
    """
    try:
        metadata = json.loads(text)["__metadata__"]
        name, version = metadata["format"].split()
        if name == FORMAT and version != str(VERSION):
            raise DiskStateError(path, f"has version {version} of the format", f"version {VERSION}")
        arrays = tuple((tuple(shape), dtype) for shape, dtype in json.loads(metadata["arrays"]))
        index, count, step = (int(metadata[key]) for key in ("chunk", "chunks", "step"))
        return Label(metadata["owner"], index, count, step, ChunkSpec(metadata["name"], arrays))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DiskStateError(path, "is no chunk of offloaded state, or its header is damaged", required) from error


def require(path: Path, found: Label, required: Label) -> None:
    """Refuse an undamaged file of another state than the run needs.

    Raises:
        DiskStateError: If it is one.
    """
    for text in ("the run {owner!r}", "chunk {index} of {count}", "{spec}", "step {step}"):
        said, wanted = (text.format(**vars(label)) for label in (found, required))
        if said != wanted:
            raise DiskStateError(path, f"is of {said}", wanted)
