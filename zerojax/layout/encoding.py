"""Describe an encoded leaf of the optimizer state: one integer array, with blocks along the last dim.

A block has a code per element. 8-bit formats also have a scale per block, and stochastic rounding a seed per block. The
last dim of an encoded leaf is never sharded or divided into chunks, so the blocks do not depend on the number of
devices. Other mesh axes may divide it between two blocks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

Format = Literal["int8", "float8", "bfloat16", "seeds"]
# The primitives that widen, encode and round arrays block by block. Rows may be sharded, or divided into chunks.
BY_BLOCK = frozenset({"widen_blocks", "narrow_blocks", "round_blocks"})
LEAST_DIM = 64  # least number of elements of the last dim, and of the largest other dim, of an encoded leaf
HEADER_WORD = 4  # bytes of a scale, and bytes of a seed
CODES = {"int8": np.uint8, "float8": np.uint8, "bfloat16": np.uint16, "seeds": np.uint32}


def is_encodable(shape: tuple[int, ...], persist_below: int) -> bool:
    """Return whether the state of a parameter with this logical shape may be encoded. The mesh has no effect on it."""
    return math.prod(shape) >= persist_below and min(shape[-1:], default=0) >= LEAST_DIM <= max(shape[:-1], default=0)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The format of an encoded array, and the shape and type of the wide array that it represents.

    Attributes:
        shape: Logical shape of the wide array.
        dtype: Name of the wide array's type.
        format: How elements are coded. With `"seeds"`, a block has a seed and no codes.
        block: Largest number of elements per block.
        rounding: How an element is rounded to its code. With `"nearest"`, blocks have no seeds.
    """

    shape: tuple[int, ...]
    dtype: str
    format: Format
    block: int
    rounding: Literal["stochastic", "nearest"]

    @property
    def blocks(self) -> int:
        """Return the number of blocks per row."""
        return -(-self.shape[-1] // self.block)

    @property
    def width(self) -> int:
        """Return the number of elements per block. The last block of a row may have unused elements."""
        return -(-self.shape[-1] // self.blocks)

    @property
    def unused(self) -> int:
        """Return the number of unused elements of the last block of a row."""
        return self.blocks * self.width - self.shape[-1]

    @property
    def is_scaled(self) -> bool:
        return self.format in ("int8", "float8")

    @property
    def has_seeds(self) -> bool:
        return self.rounding == "stochastic" or self.format == "seeds"

    @property
    def code_dtype(self) -> np.dtype:
        """Return the type of the encoded array."""
        return np.dtype(CODES[self.format])

    @property
    def codes(self) -> int:
        """Return the number of codes per block."""
        return 0 if self.format == "seeds" else self.width

    @property
    def words(self) -> int:
        """Return the length of a block in the encoded array, which holds the codes, then the scale, then the seed."""
        return self.codes + (self.is_scaled + self.has_seeds) * HEADER_WORD // self.code_dtype.itemsize

    @property
    def encoded_shape(self) -> tuple[int, ...]:
        """Return the logical shape of the encoded array."""
        return (*self.shape[:-1], self.blocks * self.words)

    def __str__(self) -> str:
        what = "seeds for" if self.format == "seeds" else f"{self.format} of"
        return f"{what} {self.dtype}{list(self.shape)} in blocks of {self.width}"
