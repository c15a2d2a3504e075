"""Records of the leaves and files of a checkpoint, which its manifest lists."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from zerojax.checkpoint.packing import Extent, Piece
from zerojax.optim.description import Description

ARRAYS = "arrays"


def data_file(process: int) -> str:
    return f"data.{process}.json"


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """A leaf as it was saved."""

    name: str  # the name that errors print
    path: tuple[str, ...]  # the leaf's keys, starting with the field of the state
    shape: tuple[int, ...]  # logical shape
    dtype: str  # name of the element type
    kind: str  # layout of the storage: "replicated", "sharded" or "flat"
    folder: str  # name of the leaf's folder in `arrays/`; empty if the leaf has no elements, or is packed
    key: str | None = None  # name of the PRNG implementation, if the leaf holds PRNG keys
    pieces: tuple[Piece, ...] = ()  # where a packed leaf is in the files of packed leaves

    @property
    def is_empty(self) -> bool:
        return not math.prod(self.shape)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Return the element type of the stored bytes; for PRNG keys, the type of their data."""
        return jnp.dtype(self.dtype if self.key is None else jnp.uint32)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.storage_dtype.itemsize

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Return the shape of the stored values without padding, in which a flat leaf has one dim."""
        return (math.prod(self.shape),) if self.kind == "flat" else self.shape

    @property
    def described(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint in `manifest.json`."""

    step: int
    leaves: tuple[SavedLeaf, ...]
    files: dict[str, tuple[int, str]]  # size and sha256 of every file except the manifest and its digest, by path
    made_by: dict[str, Any]  # versions of the libraries, and the number of processes that wrote
    transformation: Description | None = None  # the optimizer's description; None if an early zerojax saved it

    def leaf_of(self, file: str) -> str:
        arrays, _, rest = file.partition("/")
        folder, separator, _ = rest.partition("/")
        names = [leaf.name for leaf in self.leaves if leaf.folder == folder]
        return names[0] if arrays == ARRAYS and separator and names else ""

    def packed(self) -> dict[str, list[Extent]]:
        files: dict[str, list[Extent]] = {}
        for leaf in self.leaves:
            for one in leaf.pieces:
                size = math.prod(one.shape) * leaf.storage_dtype.itemsize
                files.setdefault(one.file, []).append(Extent(leaf.name, one.offset, size, one.sha256))
        return {name: sorted(extents, key=lambda one: one.offset) for name, extents in files.items()}
