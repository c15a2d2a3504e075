"""A chunk of optimizer state as one file, which `safetensors` opens too.

8 bytes   length of the header
header    JSON, padded with spaces; its `__metadata__` says whose the chunk is, which, and of which step
arrays    "0", "1", …, each from a multiple of 64 bytes on; the gaps are named "0.pad", "1.pad", …, since the
          format leaves no byte without a name

Header and file are multiples of 4096 bytes, as direct I/O wants them. The checksum is taken over the whole file,
its own eight digits read as zeros; they are the first thing in the header, so their place is known. It is the
CRC-32 of the sums, modulo 2**64, of each sector's 64-bit words: a changed word, a sector of zeros or of another
place changes it, and it takes a fifth of the time of the CRC-32 of all bytes, which is slower than a good disk.

References:
    https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zerojax.offload.buffers import BLOCK

FORMAT, VERSION = "zerojax.offload", 1
ALIGNMENT = 64
STEPS = 10**12
_DIGITS = slice(start := 8 + len('{"__metadata__":{"checksum":"'), start + 8)
_BLANK = b"00000000"
_SECTOR = 512
_LONGEST_HEADER = 100_000_000  # where safetensors draws the line
# What safetensors has a name for; the rest lies there as bytes, and the metadata tells its type.
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
    """The disk tier cannot be set up, or a chunk could not be written."""


class DiskStateError(DiskError):
    """A file of the disk tier is not what the run needs."""

    def __init__(self, path: Path, found: str, required: str):
        """Say which file, what it is and what it should be."""
        super().__init__(
            f"{path} {found}; required is {required}. Restore the run from its last checkpoint, which writes the "
            f"disk tier anew."
        )


@dataclasses.dataclass(frozen=True)
class ChunkSpec:
    """What a chunk consists of.

    Attributes:
        name: For errors and for people who look into the file.
        arrays: Local shape and dtype of each array; dtypes by name, `ml_dtypes`' included.

    Raises:
        ValueError: If a shape or a dtype is none.
    """

    name: str
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    def __post_init__(self):
        for i, (shape, dtype) in enumerate(self.arrays):
            where = f"Array {i} of chunk {self.name!r}"
            if any(extent < 0 for extent in shape):
                raise ValueError(f"{where} has the shape {shape}. Give extents of 0 or more.")
            try:
                known = np.dtype(getattr(ml_dtypes, dtype, dtype))
            except TypeError as error:
                raise ValueError(f"{where} has the dtype {dtype!r}, unknown to NumPy and ml_dtypes.") from error
            if known.name != dtype or known.hasobject or not known.itemsize:
                raise ValueError(f"{where} has the dtype {dtype!r}. Give the name of one of numbers, as 'float32'.")


@dataclasses.dataclass(frozen=True)
class Label:
    """Which state a file holds.

    Attributes:
        owner: Fingerprint of the run's layout.
        index: Which chunk.
        count: Of how many.
        step: Whose state.
        spec: Its arrays.
    """

    owner: str
    index: int
    count: int
    step: int
    spec: ChunkSpec


class Place(NamedTuple):
    """Where an array lies: from `start` to `end`, and to `padded` with what fills the gap; bytes after the header."""

    start: int
    end: int
    padded: int
    shape: tuple[int, ...]
    dtype: np.dtype


def places(spec: ChunkSpec) -> list[Place]:
    """Where the arrays of a chunk lie."""
    found, at = [], 0
    for i, (shape, name) in enumerate(spec.arrays):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        end = at + math.prod(shape) * dtype.itemsize
        alignment = ALIGNMENT if i + 1 < len(spec.arrays) else BLOCK
        found.append(Place(at, end, end + -end % alignment, tuple(shape), dtype))
        at = found[-1].padded
    return found


def header(label: Label) -> bytes:
    """The beginning of a file, up to its arrays, the checksum blank; as long for one step as for another."""
    table = {}
    for i, (start, end, padded, shape, dtype) in enumerate(places(label.spec)):
        known = dtype.name in NAMES
        table[str(i)] = _entry(NAMES[dtype.name] if known else "U8", shape if known else [end - start], start, end)
        if padded > end:
            table[f"{i}.pad"] = _entry("U8", [padded - end], end, padded)
    metadata = {
        "checksum": _BLANK.decode(),
        "format": f"{FORMAT} {VERSION}",
        "owner": label.owner,
        "chunk": str(label.index),
        "chunks": str(label.count),
        "name": label.spec.name,
        "step": f"{label.step:012d}",
        "arrays": json.dumps(label.spec.arrays),
    }
    text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % BLOCK)
    return struct.pack("<Q", len(text)) + text


def _entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def file_bytes(label: Label) -> int:
    """Size of a file, in bytes."""
    return len(header(label)) + max((place.padded for place in places(label.spec)), default=0)


def pack(label: Label, arrays: Sequence[np.ndarray], into: memoryview) -> None:
    """Lay a chunk's file out in a buffer of its size, all but the checksum.

    Raises:
        ValueError: If the arrays are not those of the chunk.
    """
    wanted = places(label.spec)
    if len(arrays) != len(wanted):
        raise ValueError(f"Chunk {label.spec.name!r} got {len(arrays)} arrays. Give its {len(wanted)}.")
    for i, (array, place) in enumerate(zip(arrays, wanted, strict=True)):
        if array.shape != place.shape or array.dtype != place.dtype:
            raise ValueError(
                f"Array {i} of chunk {label.spec.name!r} is {array.dtype}{list(array.shape)}. Give one of "
                f"{place.dtype}{list(place.shape)}."
            )
    head = header(label)
    into[: len(head)] = head
    data = into[len(head) :]
    for array, place, view in zip(arrays, wanted, views(label.spec, data), strict=True):
        np.copyto(view, array)
        data[place.end : place.padded] = bytes(place.padded - place.end)


def views(spec: ChunkSpec, data: memoryview) -> tuple[np.ndarray, ...]:
    """The arrays that lie in a buffer, which starts where the header ends."""
    return tuple(np.ndarray(place.shape, place.dtype, buffer=data, offset=place.start) for place in places(spec))


def seal(content: memoryview) -> None:
    """Enter the checksum into a file's content, whose place for it is blank."""
    content[_DIGITS] = b"%08x" % _checksum(content)


def unseal(content: memoryview) -> bool:
    """Blank the checksum of a file's content, and tell whether it was right."""
    digits = bytes(content[_DIGITS])
    content[_DIGITS] = _BLANK
    return b"%08x" % _checksum(content) == digits


def _checksum(sectors: memoryview | bytes, before: int = 0) -> int:
    """The checksum of whole sectors, which go on from those whose checksum is `before`."""
    words = np.frombuffer(sectors, "<u8").reshape(-1, _SECTOR // 8)
    return zlib.crc32(words.sum(axis=1, dtype="<u8"), before)


def identify(path: Path) -> Label:
    """Which state a file holds, all of it read and its checksum compared.

    Raises:
        DiskStateError: If it is missing, none of ours, or damaged.
    """
    required = "a whole chunk of the disk tier"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_DIGITS.stop)
            length = struct.unpack("<Q", start[:8])[0] if len(start) == _DIGITS.stop else 0
            if not _DIGITS.stop - 8 < length <= _LONGEST_HEADER:
                raise DiskStateError(path, f"has {size} bytes that begin like no safetensors file", required)
            text = start[8:] + file.read(8 + length - len(start))
            label = _label(path, text, required)
            if size != (whole := file_bytes(label)):
                raise DiskStateError(path, f"is torn: it has {size} bytes", f"its whole {whole}")
            if 8 + len(text) != len(header(label)):
                raise DiskStateError(path, f"is damaged: its header has {len(text)} bytes", f"{len(header(label)) - 8}")
            checksum = _checksum(start[: _DIGITS.start] + _BLANK + text[_DIGITS.stop - 8 :])
            while piece := file.read(1 << 20):
                checksum = _checksum(piece, checksum)
    except FileNotFoundError as error:
        raise DiskStateError(path, "is missing", required) from error
    except OSError as error:
        raise DiskStateError(path, f"cannot be read: {error.strerror}", required) from error
    digits = start[_DIGITS].decode(errors="replace")
    if f"{checksum:08x}" != digits:
        raise DiskStateError(path, f"is damaged: its bytes have the checksum {checksum:08x}", digits)
    return label


def _label(path: Path, text: bytes, required: str) -> Label:
    """What a header says.

    Raises:
        DiskStateError: If it is none of ours.
    """
    try:
        metadata = json.loads(text)["__metadata__"]
        name, version = metadata["format"].split()
        if name == FORMAT and version != str(VERSION):
            raise DiskStateError(path, f"has version {version} of the format", f"version {VERSION}")
        arrays = tuple((tuple(shape), dtype) for shape, dtype in json.loads(metadata["arrays"]))
        spec = ChunkSpec(metadata["name"], arrays)
        index, count, step = (int(metadata[key]) for key in ("chunk", "chunks", "step"))
        return Label(metadata["owner"], index, count, step, spec)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DiskStateError(path, "is no file of the disk tier, or its header is damaged", required) from error


def require(path: Path, found: Label, required: Label) -> None:
    """Refuse a whole file that holds another state than the run needs.

    Raises:
        DiskStateError: If it does.
    """
    if found.owner != required.owner:
        raise DiskStateError(path, f"belongs to the run {found.owner!r}", f"one of {required.owner!r}")
    if (found.index, found.count) != (required.index, required.count):
        raise DiskStateError(
            path,
            f"is chunk {found.index} of {found.count}",
            f"chunk {required.index} of {required.count}",
        )
    if found.spec != required.spec:
        raise DiskStateError(path, f"holds {found.spec}", str(required.spec))
    if found.step != required.step:
        raise DiskStateError(path, f"holds the state of step {found.step}", f"that of step {required.step}")
