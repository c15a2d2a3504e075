"""Move a live state into the layout of another transformation, without files: `ZeroTransformation.reshard`.

The state is compared with the wanted one as a checkpoint is, and leaves are converted as they are on restore. Only the
way of the values differs: consecutive small leaves move together, in buckets, and each large leaf in boxes of a bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from zerojax.checkpoint.arrays import ReadRequest, as_keys
from zerojax.checkpoint.errors import no_zero_state
from zerojax.checkpoint.manifest import made_by
from zerojax.checkpoint.matching import Words, matched_leaves, target_layout
from zerojax.checkpoint.records import Manifest, SavedLeaf
from zerojax.checkpoint.resharding import Conversion, convert
from zerojax.checkpoint.restoring import zeros_of
from zerojax.checkpoint.saving import record_of
from zerojax.checkpoint.state_leaves import StateLeaf, state_leaves, with_leaves
from zerojax.comm.explicit import on_auto_mesh
from zerojax.comm.mesh import replicated
from zerojax.comm.processes import Processes
from zerojax.config import Config
from zerojax.display import advance, tracking
from zerojax.layout.chunked import Chunked, is_chunked
from zerojax.layout.leaf import Leaf, replace_at
from zerojax.offload.host import KINDS, to_device
from zerojax.offload.lock import DiskError
from zerojax.placement import pieces
from zerojax.placement.chunking import joined, replaced
from zerojax.placement.unusable import problem_of
from zerojax.streaming.init_state import check_host_room
from zerojax.train.begin import create_like
from zerojax.train.state import ZeroState

WHERE = "The state"
OF_LIVE = Words(
    "the state that to= creates",
    "is given",
    "Give as to= a zero_shard of the same optax transformation, with options that keep the same state.",
    depth=6,
)


def reshard(config: Config, state: ZeroState, to: Any, *, donate: bool) -> ZeroState:
    """Move a state into the layout of the transformation `to`; see `ZeroTransformation.reshard`."""
    if not isinstance(to := getattr(to, "config", to), Config):
        raise TypeError(f"to= takes the transformation that zero_shard returned, not {type(to).__name__}.")
    if not isinstance(state, ZeroState):
        raise no_zero_state("reshard takes", state)
    if problem := problem_of(config.mesh, "state", state):
        raise ValueError(problem)
    pieces.check_processes(config.mesh, to.mesh)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in state.plan.layout.grads]
    like = create_like(to, jax.tree.unflatten(state.plan.layout.treedef, shapes), state.mutable)
    if not state.plan.offloaded:
        check_host_room(to, like.plan)
    move = functools.partial(moved_state, like=like, limit=to.bucket_bytes, donate=donate)
    return on_auto_mesh(to.user_mesh, move, state)


def moved_state(state: ZeroState, like: ZeroState, limit: int, donate: bool) -> ZeroState:
    """Return the state in the layout of `like`, which has shapes. If `donate`, free each array when it is moved."""
    given = state_leaves(state)
    describe = state.plan.describe
    description = None if describe is None else describe.description
    records = tuple(map(record_of, given.values()))
    manifest = Manifest(0, records, files={}, made_by=made_by(1), transformation=description)
    matched, fresh = matched_leaves(manifest, like, where=WHERE, words=OF_LIVE)
    wanted = state_leaves(like)
    open_files([leaf.array for leaf in wanted.values()])
    if donate:  # narrow parameters are made again from the master weights
        free(jax.tree.leaves(state, is_leaf=is_chunked), keep=[leaf.array for leaf in given.values()])
    moved: dict[str, Any] = {}
    moves = [(given[saved.name], saved, leaf) for saved, leaf in matched.pairs]
    # Leaves that shrink come first. Otherwise devices would hold the grown leaves and those that are still to shrink.
    moves.sort(key=lambda move: bytes_on_device(move[2].array) - bytes_on_device(move[0].array))
    with tracking("Resharding the state", sum(one.leaf.bytes for one, _, _ in moves)):
        for bucket in moved_by_bucket(moves, limit, donate):
            jax.block_until_ready(jax.tree.leaves(bucket))
            advance(sum(given[name].leaf.bytes for name in bucket))
            moved |= bucket
            if donate:
                free([given[name].array for name in bucket], keep=list(bucket.values()))
    return with_leaves(like, moved | {name: zeros_of(wanted[name].array) for name in fresh})


def bytes_on_device(x: Any) -> int:
    """Return the bytes of a leaf, or of its shape, on each device that holds it. Offloaded leaves have none."""
    if is_chunked(x) or x.sharding.memory_kind in KINDS:
        return 0
    return x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))


def open_files(nodes: list[Any]) -> None:
    """Open the files of leaves on disk, before anything is freed, because another state may use their folder.

    Raises:
        DiskError: On every process, if one of them cannot open its files. Otherwise the others would wait for it.
    """
    files = {id(node.store.files): node.store.files for node in nodes if is_chunked(node) and node.store is not None}
    if not files:
        return
    problem = ""
    try:
        for one in files.values():
            one.open()
    except DiskError as error:
        problem = str(error)
    answers = enumerate(Processes("reshard").exchange("open the files of the new state", problem))
    if not (failed := [(i, text) for i, text in answers if text]):
        return
    for one in files.values():
        one.abandon()
    raise DiskError("\n".join(f"Process {i}: {text}" for i, text in failed) if jax.process_count() > 1 else problem)


def free(nodes: list[Any], *, keep: list[Any]) -> None:
    """Free the memory of arrays and offloaded leaves, except arrays that are also in `keep`.

    Leaves on disk share one array, the version of their files, which is not freed.
    """
    kept = {id(x) for x in jax.tree.leaves(keep)}
    for x in jax.tree.leaves([node for node in nodes if not is_chunked(node) or node.store is None]):
        if isinstance(x, jax.Array) and id(x) not in kept and not x.is_deleted():
            x.delete()


Move = tuple[StateLeaf, SavedLeaf, StateLeaf]  # a leaf that is given, its record, and the leaf that is wanted


def moved_by_bucket(moves: list[Move], limit: int, donate: bool) -> Iterator[dict[str, Any]]:
    """Yield the moved arrays, or `Chunked` nodes, by name. Each dict has leaves of about `limit` logical bytes.

    Between two dicts, devices hold nothing of the leaves but their shards in the two layouts.
    """
    group: list[tuple[str, jax.Array, Conversion]] = []
    size = 0
    for given, saved, wanted in moves:
        target, node = target_layout(saved, wanted), wanted.array
        array = given.array if is_chunked(given.array) else pieces.on_mesh(given.array)
        source = dataclasses.replace(given.leaf, dtype=array.dtype)
        if saved.is_empty:
            yield {wanted.name: zeros_of(node)}
        elif saved.key is not None:
            yield {wanted.name: moved_keys(array, saved, node)}
        elif is_chunked(array) or is_chunked(node) or source.bytes > limit:
            keep = donate and is_same(given, wanted)
            yield {wanted.name: array if keep else moved_alone(array, source, target, node, limit)}
        else:
            if size + source.bytes > limit:
                yield moved_group(group)
                group, size = [], 0
            group.append((wanted.name, array, Conversion(source, target, node.sharding)))
            size += source.bytes
    yield moved_group(group)


def is_same(given: StateLeaf, wanted: StateLeaf) -> bool:
    """Return whether an array has the wanted layout, type and devices. Leaves on disk must always be copied."""
    x, like = given.array, wanted.array
    nodes = is_chunked(x), is_chunked(like)
    if any(nodes):
        return all(nodes) and x.store is None and like.store is None and parts_of(x) == parts_of(like)
    return (given.leaf, x.dtype, x.sharding) == (wanted.leaf, like.dtype, like.sharding)


def parts_of(node: Chunked) -> tuple:
    """Return what decides how the chunks of an offloaded leaf are stored."""
    return node.leaf, node.chunking, node.sharding


def moved_group(group: list[tuple[str, jax.Array, Conversion]]) -> dict[str, jax.Array]:
    """Move small leaves with one program, or, between meshes, with one program on each."""
    names, arrays, conversions = zip(*group, strict=True) if group else ((), (), ())
    same = all(devices_of(x.sharding) == devices_of(one.sharding) for _, x, one in group)
    if not same:
        whole = [dataclasses.replace(one.source, kind="replicated", dim=None) for one in conversions]
        pairs = zip(arrays, conversions, whole, strict=True)
        gathers = [Conversion(one.source, leaf, replicated(pieces.mesh_of(x))) for x, one, leaf in pairs]
        pairs = zip(convert(arrays, gathers), conversions, strict=True)
        arrays = [pieces.carried(x, one.sharding.mesh) for x, one in pairs]
        conversions = [one._replace(source=leaf) for one, leaf in zip(conversions, whole, strict=True)]
    return dict(zip(names, convert(arrays, conversions), strict=True))


def moved_alone(x: Any, source: Leaf, target: Leaf, node: Any, limit: int) -> Any:
    """Move one leaf in boxes of at most `limit` bytes. Return it as `node` is stored: on device, host or disk.

    A leaf that is flat in only one of the layouts is moved as a whole.
    """
    x = joined(x) if is_chunked(x) else to_device(x)
    sharding = NamedSharding(node.sharding.mesh, node.sharding.spec)
    flats = [leaf.kind == "flat" for leaf in (source, target)]
    if source.bytes <= limit or flats[0] != flats[1]:
        [moved] = moved_group([("", x, Conversion(source, target, sharding))]).values()
    else:
        moved = moved_in_boxes(x, (source.size,) if all(flats) else source.shape, target, sharding, limit)
    if is_chunked(node):
        return replaced(node, moved)
    return jax.device_put(moved, node.sharding) if node.sharding.memory_kind in KINDS else moved


def moved_in_boxes(
    x: jax.Array, shape: tuple[int, ...], target: Leaf, sharding: NamedSharding, limit: int
) -> jax.Array:
    """Move an array on the devices, of this logical shape, box by box."""
    source, mesh = x.sharding, sharding.mesh
    assert isinstance(source, NamedSharding)
    assert isinstance(mesh, Mesh)
    dim, length = pieces.chunked_dim(shape, x.dtype.itemsize, source.spec, limit)
    moved = jnp.zeros(target.storage_shape, target.dtype, device=sharding)
    for start in pieces.starts_of(shape[dim], length):
        starts = [start if d == dim else 0 for d in range(len(shape))]
        box = pieces.take(x, shape, starts, replace_at(shape, dim, length))
        # Wait, so that only one box is in memory.
        moved = jax.block_until_ready(pieces.put(moved, pieces.carried(box, mesh), dim, start))
    return moved


def moved_keys(x: jax.Array, saved: SavedLeaf, node: Any) -> jax.Array:
    """Move an array of PRNG keys."""
    data = jax.random.key_data(x)
    leaf = Leaf(saved.name, tuple(data.shape), data.dtype, (), 1)
    [moved] = moved_group([("", data, Conversion(leaf, leaf, node.sharding))]).values()
    return as_keys(moved, ReadRequest(saved, tuple(data.shape), node.sharding))


def devices_of(sharding: Any) -> tuple:
    """Return the devices of a sharding in the order of its mesh."""
    return tuple(sharding.mesh.devices.flat)
