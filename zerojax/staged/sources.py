"""Make the shard that a segment gathers from a parameter's chunks, and divide the shard's gradient into chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zerojax import compat
from zerojax.comm.mesh import constrain
from zerojax.gather.sharded_param import ShardedParam
from zerojax.layout.leaf import replace_at
from zerojax.offload.chunked import ChunkedLayout, concrete_mesh, jitted, join_chunks, split_chunks

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
    """The origin of a shard that a segment gathers."""

    of: OnDisk
    # the row of dim 0 that is read; the shard then has a dim 0 of length 1; None: all chunks are read and joined
    row: int | None = None
    # the parameter with the slices that are applied to the joined chunks; None: there are no slices
    param: ShardedParam | None = None

    @property
    def pieces(self) -> tuple[ChunkId, ...]:
        return self.of.pieces if self.row is None else ((self.of.index, self.row),)

    def shard(self, chunks: Mapping[ChunkId, Array], env: Mapping) -> Array:
        """Make the shard from its chunks. `env` maps the variables that the slices read to their values."""
        values = [chunks[piece] for piece in self.pieces]
        if self.row is not None:
            return values[0]
        stored = self.of.joined(values)
        return stored if self.param is None else self._sliced(stored, [env[v] for v in self.param.operands])

    def grad_chunks(self, grad: Array, env: Mapping) -> dict[ChunkId, Array]:
        """Divide the gradient of the shard into gradients of chunks. `env` is as for `shard`."""
        if self.row is not None:
            return {self.pieces[0]: grad}
        if self.param is not None:
            grad = self._root_grad(grad, [env[v] for v in self.param.operands])
        return dict(zip(self.pieces, self.of.split(grad), strict=True))

    @functools.cached_property
    def _sliced(self) -> Any:
        """Return the program that slices the joined chunks."""
        param = self.param
        assert param is not None

        def run(stored, operands):
            return param.sliced({param.root: stored, **dict(zip(param.operands, operands, strict=True))})

        return jax.jit(run)

    @functools.cached_property
    def _root_grad(self) -> Any:
        """Return the program that turns the gradient of the slice into the gradient of the joined chunks."""
        param, leaf = self.param, self.of.leaf
        assert param is not None

        def run(grad, operands):
            like = jax.ShapeDtypeStruct(leaf.storage_shape, grad.dtype)
            env = {param.root: like, **dict(zip(param.operands, operands, strict=True))}
            return constrain(concrete_mesh(self.of.sharding), param.root_grad(grad, env, leaf.storage_shape), leaf)

        return jax.jit(run)


def source_of(param: ShardedParam, of: OnDisk) -> ShardSource:
    if not param.slices:
        return ShardSource(of)
    row = _row_read(param) if of.chunking.is_by_row(of.leaf) else None
    return ShardSource(of, param=param) if row is None else ShardSource(of, row)


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
