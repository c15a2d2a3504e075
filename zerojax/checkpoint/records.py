"""What a checkpoint consists of: the records that its manifest holds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from zerojax.checkpoint.packing import Extent, Piece
from zerojax.optim.description import Description

ARRAYS = "arrays"


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
    """A leaf as it was saved.

    Attributes:
        name: As errors name it.
        path: Its keys, from the field of the state on.
        shape: Logical shape.
        dtype: Element type, by name.
        kind: Whether its storage is replicated, sharded or flat.
        folder: Its folder under `arrays/`; empty if it has no elements, or is packed.
        key: The implementation of a PRNG key, or None.
        pieces: Where its storage is in files of packed leaves; empty unless it is packed.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    kind: str
    folder: str
    key: str | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return whether it has no elements, and so no files."""
        return not math.prod(self.shape)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """Return the element type of what is stored; for PRNG keys, that of their data."""
        return jnp.dtype(self.dtype if self.key is None else jnp.uint32)

    @property
    def described(self) -> str:
        """Return type and logical shape: `float32[16, 24]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: Its step.
        leaves: Its leaves.
        files: `{path: (bytes, sha256)}` of every file but the manifest and its digest.
        made_by: Versions of the libraries, and how many processes wrote.
        transformation: Describes the optimizer; None in checkpoints of before it was recorded.
    """

    step: int
    leaves: tuple[SavedLeaf, ...]
    files: dict[str, tuple[int, str]]
    made_by: dict[str, Any]
    transformation: Description | None = None

    def leaf_of(self, file: str) -> str:
        """Return the name of the leaf that a file belongs to; empty if none."""
        arrays, _, rest = file.partition("/")
        folder, separator, _ = rest.partition("/")
        names = [leaf.name for leaf in self.leaves if leaf.folder == folder]
        return names[0] if arrays == ARRAYS and separator and names else ""

    def packed(self) -> dict[str, list[Extent]]:
        """Return what is in each file of packed leaves, in order."""
        files: dict[str, list[Extent]] = {}
        for leaf in self.leaves:
            for one in leaf.pieces:
                size = math.prod(one.shape) * leaf.storage_dtype.itemsize
                files.setdefault(one.file, []).append(Extent(leaf.name, one.offset, size, one.sha256))
        return {name: sorted(extents, key=lambda one: one.offset) for name, extents in files.items()}
