"""From a parameter's chunks on disk to the shard that a segment gathers, and from its gradient back to chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zerojax import compat
from zerojax.comm.mesh import constrain
from zerojax.gather.sharded_param import ShardedParam
from zerojax.layout.chunked import Chunking
from zerojax.layout.leaf import Leaf, replace_at
from zerojax.placement.chunking import joining, splitting

if TYPE_CHECKING:
    from jaxtyping import Array

Piece = tuple[int, int]  # a parameter, by its index among all, and the number of a chunk


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """How one parameter is kept on disk.

    Attributes:
        index: Its index among all parameters.
        leaf: Its layout.
        chunking: How it is divided into chunks.
        sharding: Its sharding.
    """

    index: int
    leaf: Leaf
    chunking: Chunking
    sharding: NamedSharding

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return all its chunks."""
        return tuple((self.index, n) for n in range(len(self.chunking.extents)))

    @property
    def is_by_row(self) -> bool:
        """Return whether each chunk is one row of dim 0."""
        return len(self.leaf.shape) > 1 and self.chunking == Chunking(0, (1,) * self.leaf.shape[0])

    @property
    def mesh(self) -> Mesh:
        """Return the mesh."""
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        return mesh

    def joined(self, chunks: Sequence[Array]) -> Array:
        """Return the chunks as one array, in storage shape."""
        return joining(self.mesh, self.sharding, self.leaf, self.chunking)(list(chunks))

    def split(self, stored: Array) -> list[Array]:
        """Return the chunks of an array that is laid out like the parameter."""
        return splitting(self.mesh, self.sharding, self.leaf, self.chunking)(stored)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Where the shard comes from that a segment gathers.

    Attributes:
        of: The parameter.
        row: The only row of dim 0 that is read, with a dim 0 of one; None: all chunks are read, and joined.
        param: Its slices are applied to the joined shard; None: there are none.
    """

    of: OnDisk
    row: int | None = None
    param: ShardedParam | None = None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the chunks to read."""
        return self.of.pieces if self.row is None else ((self.of.index, self.row),)

    def shard(self, chunks: Mapping[Piece, Array], env: Mapping) -> Array:
        """Return the shard, given its chunks and what its slices read."""
        values = [chunks[piece] for piece in self.pieces]
        if self.row is not None:
            return values[0]
        stored = self.of.joined(values)
        return stored if self.param is None else self._sliced(stored, [env[v] for v in self.param.operands])

    def grad_chunks(self, grad: Array, env: Mapping) -> dict[Piece, Array]:
        """Return the gradient of the shard as gradients of chunks."""
        if self.row is not None:
            return {self.pieces[0]: grad}
        if self.param is not None:
            grad = self._root_grad(grad, [env[v] for v in self.param.operands])
        return dict(zip(self.pieces, self.of.split(grad), strict=True))

    @functools.cached_property
    def _sliced(self) -> Any:
        """Return the program that slices a shard."""
        param = self.param
        assert param is not None

        def run(stored, operands):
            return param.sliced({param.root: stored, **dict(zip(param.operands, operands, strict=True))})

        return jax.jit(run)

    @functools.cached_property
    def _root_grad(self) -> Any:
        """Return the program from the gradient of a sliced shard to that of the shard."""
        param, leaf = self.param, self.of.leaf
        assert param is not None

        def run(grad, operands):
            like = jax.ShapeDtypeStruct(leaf.storage_shape, grad.dtype)
            env = {param.root: like, **dict(zip(param.operands, operands, strict=True))}
            return constrain(self.of.mesh, param.root_grad(grad, env, leaf.storage_shape), leaf)

        return jax.jit(run)


def source_of(param: ShardedParam, of: OnDisk) -> Source:
    """Return where the shard of a segment's parameter comes from."""
    if not param.slices:
        return Source(of)
    row = _row_read(param) if of.is_by_row else None
    return Source(of, param=param) if row is None else Source(of, row)


def _row_read(param: ShardedParam) -> int | None:
    """Return the row of dim 0 that the slices of a parameter read, if they do nothing else."""
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
