"""Cut each device's part of an array into pieces, and join them again; traced under jit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import Config
from zerojax.layout.chunked import Chunked, Chunking
from zerojax.layout.leaf import Leaf
from zerojax.offload.host import moved, on_host
from zerojax.placement.storage import named

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped


def take(
    mesh: Mesh, stored: Shaped[Array, "*storage"], leaf: Leaf, cut: Chunking, start: Int[Array, ""] | int, length: int
) -> Shaped[Array, "*piece"]:
    """The piece of every device's part that begins at `start`."""

    def local(x, start):
        return lax.dynamic_slice_in_dim(x, start, length, cut.dim)

    return locally(mesh, local, leaf, 1)(stored, start)


def put(
    mesh: Mesh,
    stored: Shaped[Array, "*storage"],
    piece: Shaped[Array, "*piece"],
    leaf: Leaf,
    cut: Chunking,
    start: Int[Array, ""] | int,
) -> Shaped[Array, "*storage"]:
    """The array with a piece of every device's part replaced."""

    def local(x, piece, start):
        return lax.dynamic_update_slice_in_dim(x, piece, start, cut.dim)

    return locally(mesh, local, leaf, 2)(stored, piece, start)


def locally(mesh: Mesh, local: Any, leaf: Leaf, arrays: int) -> Any:
    """`local(*arrays, start)` on each device's part."""
    spec = leaf.local_spec
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*[spec] * arrays, PartitionSpec()),
        out_specs=spec,
        axis_names=set(leaf.axes),
        check_vma=False,
    )


def split_chunks(
    mesh: Mesh, stored: Shaped[Array, "*storage"], leaf: Leaf, cut: Chunking
) -> list[Shaped[Array, "*piece"]]:
    """All pieces of an array, in order."""
    if len(cut.extents) == 1:
        return [stored]
    return [take(mesh, stored, leaf, cut, start, length) for start, length in zip(cut.starts, cut.extents, strict=True)]


def join(mesh: Mesh, pieces: Sequence[Shaped[Array, "*piece"]], leaf: Leaf, cut: Chunking) -> Shaped[Array, "*storage"]:
    """The inverse of `split_chunks`."""
    if len(pieces) == 1:
        return pieces[0]

    def local(*pieces_and_start):
        return lax.concatenate(pieces_and_start[:-1], cut.dim)

    return locally(mesh, local, leaf, len(pieces))(*pieces, 0)


def chunked(config: Config, pieces: Sequence[Any], leaf: Leaf, cut: Chunking) -> Chunked:
    """The node of a leaf in host memory."""
    return Chunked(tuple(pieces), leaf, cut, named(config, leaf))


def joined(node: Chunked) -> Shaped[Array, "*storage"]:
    """An offloaded leaf, whole on the devices."""
    pieces = [moved(x, "device") for x in node.pieces] if node.store is None else node.store.load(*node.pieces)
    return joining(node.mesh, node.sharding, node.leaf, node.cut)(pieces)


def apart(x: Shaped[Array, "*storage"], node: Chunked) -> Chunked:
    """An array on the devices in the place of an offloaded leaf; live, or a shape."""
    pieces = cutting(node.mesh, node.sharding, node.leaf, node.cut)(x)
    if node.store is not None:
        return dataclasses.replace(node, pieces=(node.store.save(pieces),))
    where = on_host(node.mesh, node.sharding.spec)
    return dataclasses.replace(node, pieces=tuple(jax.device_put(piece, where) for piece in pieces))


@functools.lru_cache(maxsize=32)
def joining(mesh: Mesh, sharding: NamedSharding, leaf: Leaf, cut: Chunking) -> Any:
    """The program of `joined`."""
    return jax.jit(lambda pieces: join(mesh, pieces, leaf, cut), out_shardings=sharding)


@functools.lru_cache(maxsize=32)
def cutting(mesh: Mesh, sharding: NamedSharding, leaf: Leaf, cut: Chunking) -> Any:
    """The program of `apart`."""
    return jax.jit(lambda x: split_chunks(mesh, x, leaf, cut), out_shardings=sharding)
