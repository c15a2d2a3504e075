"""Cut each device's part of an array into pieces, and join them again; traced under jit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..comm.mesh import replicated
from ..config import Config
from ..layout.chunked import Chunked, Cut, is_chunked
from ..layout.leaf import Leaf
from ..offload.host import moved, on_host
from .storage import named

if TYPE_CHECKING:
    from jaxtyping import Array, Int, PyTree, Shaped

    from .update import UpdatePlan


ON_DISK = (
    "The optimizer state is on disk, which a jitted program cannot reach. Make it with tx.create(params), and update "
    "it with the step of tx.train_step, both called as they are, outside of jax.jit."
)


def take(
    mesh: Mesh, stored: Shaped[Array, "*storage"], leaf: Leaf, cut: Cut, start: Int[Array, ""] | int, length: int
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
    cut: Cut,
    start: Int[Array, ""] | int,
) -> Shaped[Array, "*storage"]:
    """The array with a piece of every device's part replaced."""

    def local(x, piece, start):
        return lax.dynamic_update_slice_in_dim(x, piece, start, cut.dim)

    return locally(mesh, local, leaf, 2)(stored, piece, start)


def locally(mesh: Mesh, local: Any, leaf: Leaf, arrays: int) -> Any:
    """`local(*arrays, start)` on each device's part."""
    spec = leaf.manual_spec
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(*[spec] * arrays, PartitionSpec()),
        out_specs=spec,
        axis_names={leaf.axis},
        check_vma=False,
    )


def cut_up(mesh: Mesh, stored: Shaped[Array, "*storage"], leaf: Leaf, cut: Cut) -> list[Shaped[Array, "*piece"]]:
    """All pieces of an array, in order."""
    if len(cut.extents) == 1:
        return [stored]
    return [take(mesh, stored, leaf, cut, start, length) for start, length in zip(cut.starts, cut.extents, strict=True)]


def join(mesh: Mesh, pieces: Sequence[Shaped[Array, "*piece"]], leaf: Leaf, cut: Cut) -> Shaped[Array, "*storage"]:
    """The inverse of `cut_up`."""
    if len(pieces) == 1:
        return pieces[0]

    def local(*pieces_and_start):
        return lax.concatenate(pieces_and_start[:-1], cut.dim)

    return locally(mesh, local, leaf, len(pieces))(*pieces, 0)


def chunked(config: Config, pieces: Sequence[Any], leaf: Leaf, cut: Cut) -> Chunked:
    """The node of a leaf in host memory."""
    return Chunked(tuple(pieces), leaf, cut, named(config, leaf))


def fetched(config: Config, plan: UpdatePlan, state: PyTree) -> PyTree:
    """The state with everything that waits in host memory joined on the device; all of it at once.

    Raises:
        TypeError: If a part is on disk, which a traced program cannot read.
    """

    def one(x, leaf: Leaf):
        if not is_chunked(x):
            return x
        if x.store is not None:
            raise TypeError(ON_DISK)
        pieces = [jax.device_put(piece, named(config, leaf)) for piece in x.pieces]
        return join(config.mesh, pieces, leaf, x.cut)

    leaves = jax.tree.leaves(state, is_leaf=is_chunked)
    return jax.tree.unflatten(plan.state_def, [one(x, leaf) for x, leaf in zip(leaves, plan.state, strict=True)])


def stowed(config: Config, plan: UpdatePlan, state: PyTree) -> PyTree:
    """The inverse of `fetched`."""

    def one(x, leaf: Leaf, cut: Cut | None):
        if cut is None:
            return x
        if config.offload is not None and config.offload.optimizer == "disk":
            raise TypeError(ON_DISK)
        where = on_host(config.mesh, leaf.spec)
        return chunked(config, [jax.device_put(piece, where) for piece in cut_up(config.mesh, x, leaf, cut)], leaf, cut)

    leaves = jax.tree.leaves(state)
    held = [one(x, leaf, cut) for x, leaf, cut in zip(leaves, plan.state, plan.cuts, strict=True)]
    return jax.tree.unflatten(plan.state_def, held)


def state_shardings(config: Config, plan: UpdatePlan) -> PyTree:
    """Where the state lies: a tree of `NamedSharding`, in `Chunked` nodes where it is offloaded."""

    def one(leaf: Leaf, cut: Cut | None):
        if cut is None:
            return named(config, leaf)
        on_disk = config.offload is not None and config.offload.optimizer == "disk"
        pieces = [replicated(config.mesh)] if on_disk else [on_host(config.mesh, leaf.spec)] * len(cut.extents)
        return chunked(config, pieces, leaf, cut)

    return jax.tree.unflatten(plan.state_def, [one(x, cut) for x, cut in zip(plan.state, plan.cuts, strict=True)])


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
def joining(mesh: Mesh, sharding: NamedSharding, leaf: Leaf, cut: Cut) -> Any:
    """The program of `joined`."""
    return jax.jit(lambda pieces: join(mesh, pieces, leaf, cut), out_shardings=sharding)


@functools.lru_cache(maxsize=32)
def cutting(mesh: Mesh, sharding: NamedSharding, leaf: Leaf, cut: Cut) -> Any:
    """The program of `apart`."""
    return jax.jit(lambda x: cut_up(mesh, x, leaf, cut), out_shardings=sharding)
