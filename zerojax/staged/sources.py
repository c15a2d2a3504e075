"""Find the chunks of the shard that a segment reads, and divide the gradient of the shard into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp

from zerojax import compat
from zerojax.gather.sharded_param import ShardedParam
from zerojax.layout.leaf import replace_at
from zerojax.offload.chunked import ChunkedLayout, jitted, join_chunks, split_chunks

if TYPE_CHECKING:
    from jaxtyping import Array

ChunkId = tuple[int, int]  # the number of a parameter's (or gradient's) files, and the number of a chunk


@dataclasses.dataclass(frozen=True)
class OnDisk(ChunkedLayout):
    """How one parameter, or its gradient, is kept on disk."""

    index: int  # the number of its files; for a parameter, this is its index among all parameters

    @property
    def pieces(self) -> tuple[ChunkId, ...]:
        return tuple((self.index, n) for n in range(len(self.chunking.extents)))

    def joined(self, chunks: Sequence[Array]) -> Array:
        return jitted(join_chunks, self.sharding, self.leaf, self.chunking)(list(chunks))

    def split(self, stored: Array) -> list[Array]:
        return jitted(split_chunks, self.sharding, self.leaf, self.chunking)(stored)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained parameter on disk, and its gradient on disk."""

    param: OnDisk
    grad: OnDisk


@dataclasses.dataclass(frozen=True, eq=False)
class ShardSource:
    """The origin of a shard that a segment reads."""

    of: OnDisk
    # the row of dim 0 that is read; the shard then has a dim 0 of length 1; None: all chunks are read and joined
    row: int | None = None

    @property
    def pieces(self) -> tuple[ChunkId, ...]:
        return self.of.pieces if self.row is None else ((self.of.index, self.row),)

    def shard(self, chunks: Mapping[ChunkId, Array]) -> Array:
        values = [chunks[piece] for piece in self.pieces]
        return self.of.joined(values) if self.row is None else values[0]

    def grad_chunks(self, grad: Array) -> dict[ChunkId, Array]:
        """Divide the gradient of the shard into gradients of chunks."""
        return dict(zip(self.pieces, self.of.split(grad) if self.row is None else [grad], strict=True))


def source_of(param: ShardedParam, of: OnDisk) -> ShardSource:
    return ShardSource(of, _row_read(param) if of.chunking.is_by_row(of.leaf) else None)


def _row_read(param: ShardedParam) -> int | None:
    """Return the index on dim 0 if the slices of a parameter only select one row, otherwise None."""
    if len(param.slices) != 2 or param.slices[1].primitive.name not in ("squeeze", "reshape"):
        return None
    first, (last,) = param.slices[0], param.slices[1].outvars
    shape = first.invars[0].aval.shape
    if last.aval.shape != shape[1:] or first.outvars[0].aval.shape != replace_at(shape, 0, 1):
        return None
    if first.primitive.name == "slice":
        return first.params["start_indices"][0]
    start = first.invars[1]
    return int(jnp.clip(start.val, 0, shape[0] - 1)) if compat.is_literal(start) else None
