"""Move a live state into the layout of another transformation, without files: `ZeroTransformation.reshard`.

As in a restore, the state is first compared with the wanted state, and each leaf is converted. The values are not read
from files: a leaf is converted on its devices, or copied through host memory to other devices.
"""

import dataclasses
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.checkpoint.arrays import ReadRequest, as_keys, as_stored, place_whole
from zerojax.checkpoint.manifest import Manifest, SavedLeaf, made_by
from zerojax.checkpoint.restoring import as_wanted, match, new_seeds, other_optimizer, read_request
from zerojax.checkpoint.saving import record_of
from zerojax.checkpoint.state_leaves import StateLeaf, convert, state_leaves, with_leaves
from zerojax.comm.mesh import auto_context, on_auto_mesh, replicated
from zerojax.comm.processes import Processes
from zerojax.config import Config
from zerojax.config.data_mesh import entry_axes, spec_entry
from zerojax.layout.leaf import Leaf, is_chunked
from zerojax.layout.tree import check_experts_named
from zerojax.offload.chunked import joined, replaced
from zerojax.offload.folder import DiskError
from zerojax.offload.host import KINDS
from zerojax.optim.description import description_of
from zerojax.optim.sharding_plan import make_plan
from zerojax.placement.problems import problem_of
from zerojax.placement.storage import to_device
from zerojax.streaming.first_state import check_state_room
from zerojax.train.same_run import require_same_run
from zerojax.train.state import ZeroState, begin_run

REMEDY = "Give as to= a zero_shard of the same optax transformation, with options that keep the same state."


def reshard(config: Config, state: ZeroState, to: Any, *, donate: bool) -> ZeroState:
    """Move a state into the layout of the transformation `to`; see `ZeroTransformation.reshard`."""
    if not isinstance(to := getattr(to, "config", to), Config):
        raise TypeError(f"to= takes the transformation that zero_shard returned, not {type(to).__name__}.")
    if not isinstance(state, ZeroState):
        raise TypeError(
            f"reshard takes a ZeroState, as tx.create makes it for tx.train_step, not {type(state).__name__}. Save "
            f"the tree of your own loop with a Checkpointer, and restore it into the new layout."
        )
    if problem := problem_of(config.mesh, "state", state):
        raise ValueError(problem)
    check_processes(config.mesh, to.mesh)
    shapes = [with_experts(to, leaf) for leaf in state.plan.layout.grads]
    params = jax.tree.unflatten(state.plan.layout.treedef, shapes)
    plan = make_plan(to, params)
    require_same_run(to, plan)
    check_experts_named(plan.layout)
    with auto_context(to.user_mesh):
        like = begin_run(to, plan, params, state.mutable)
    if not state.plan.offloaded:
        check_state_room(to, plan)
    move = functools.partial(moved_state, like=like, donate=donate)
    return on_auto_mesh(to.user_mesh, move, state)


def check_processes(old: Mesh, new: Mesh) -> None:
    """Raise a `ValueError` if a process has devices of only one of the meshes, because JAX cannot copy its values."""
    before, after = ({device.process_index for device in mesh.devices.flat} for mesh in (old, new))
    if before != after:
        raise ValueError(
            f"The arrays are on devices of the processes {sorted(before)}, and the new mesh has devices of the "
            f"processes {sorted(after)}. Values can only be moved between meshes that have devices of the same "
            f"processes. Save a checkpoint and restore it."
        )


def with_experts(to: Config, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Return the logical shape of a leaf, sharded only over those of its mesh axes that are expert axes of `to`."""
    entries = [tuple(axis for axis in entry_axes(entry) if axis in to.expert_axis) for entry in leaf.others]
    sharding = NamedSharding(to.mesh, PartitionSpec(*map(spec_entry, entries))) if any(entries) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def moved_state(state: ZeroState, like: ZeroState, *, donate: bool) -> ZeroState:
    """Return the state in the layout of `like`, a state of shapes. If `donate` is true, free each moved array."""
    given, of_like = state_leaves(state), state_leaves(like)
    description = description_of(state.plan.tx, state.plan.trained)
    records = tuple(map(record_of, given.values()))
    manifest = Manifest(0, records, files={}, made_by=made_by(1), transformation=description)
    matched = match(records, of_like, partial=False, where="The state", remedy=REMEDY)
    if warning := other_optimizer(manifest, like.plan, "The state", REMEDY):
        warnings.warn(warning, stacklevel=5)
    open_files([leaf.array for _, leaf in matched.pairs])
    if donate:  # frees narrow parameters, which are made again from the master weights
        free(jax.tree.leaves(state, is_leaf=is_chunked), keep=[given[saved.name].array for saved, _ in matched.pairs])
    moved: dict[str, Any] = {}
    moves = [(given[saved.name], saved, leaf) for saved, leaf in matched.pairs]
    # Leaves that shrink come first. Otherwise devices would hold the grown leaves and those that are still to shrink.
    moves.sort(key=lambda move: bytes_on_device(move[2].array) - bytes_on_device(move[0].array))
    for one, saved, leaf in moves:
        keeps = donate and is_same(one, leaf)
        moved[leaf.name] = one.array if keeps else moved_leaf(one, saved, leaf)
        jax.block_until_ready(jax.tree.leaves(moved[leaf.name]))  # one leaf at a time is in memory in both layouts
        if donate:
            free([one.array], keep=[moved[leaf.name]])
    moved |= {name: new_seeds(one) for name, one in of_like.items() if name not in moved}
    return with_leaves(like, moved)


def bytes_on_device(x: Any) -> int:
    if is_chunked(x):  # chunks that are not in host memory are those of `Offload(device_bytes=)`
        return sum(map(bytes_on_device, x.chunks)) if x.leaf_files is None else 0
    if x.sharding.memory_kind in KINDS:
        return 0
    return x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))


def open_files(nodes: list[Any]) -> None:
    """Open the files of leaves on disk before anything is freed. This fails if another state uses their folder.

    Raises:
        DiskError: If a process cannot open its files. All processes raise this error, so that none waits for another.
    """
    files = dict.fromkeys(x.leaf_files.state_files for x in nodes if is_chunked(x) and x.leaf_files is not None)
    if not files:
        return
    problem = ""
    try:
        for one in files:
            one.open()
    except DiskError as error:
        problem = str(error)
    try:
        Processes("reshard", error=DiskError).agree("open the files of the new state", problem)
    except DiskError:
        for one in files:
            one.abandon()
        raise


def free(nodes: list[Any], *, keep: list[Any]) -> None:
    """Free the memory of arrays and offloaded leaves, except arrays that are also in `keep`.

    Leaves on disk share one array, the version of their files, which is not freed.
    """
    kept = {id(x) for x in jax.tree.leaves(keep)}
    for x in jax.tree.leaves([node for node in nodes if not is_chunked(node) or node.leaf_files is None]):
        if isinstance(x, jax.Array) and id(x) not in kept and not x.is_deleted():
            x.delete()


def is_same(given: StateLeaf, wanted: StateLeaf) -> bool:
    """Return whether `given` is already stored as `wanted` is. False for leaves on disk, which are always copied."""
    x, like = given.array, wanted.array
    if is_chunked(x) and is_chunked(like):
        parts = lambda node: (node.leaf, node.chunking, node.sharding)
        return x.leaf_files is None and like.leaf_files is None and parts(x) == parts(like)
    if is_chunked(x) or is_chunked(like):
        return False
    return (given.leaf, x.dtype, x.sharding) == (wanted.leaf, like.dtype, like.sharding)


def moved_leaf(given: StateLeaf, saved: SavedLeaf, wanted: StateLeaf) -> Any:
    """Move the leaf `given`, whose record is `saved`, to the place where `wanted` is: the devices, the host or disk."""
    node = wanted.array
    if saved.is_empty:
        return jnp.zeros(node.shape, node.dtype, device=node.sharding)
    x = joined(given.array) if is_chunked(given.array) else given.array
    request = read_request(saved, wanted)._replace(sharding=NamedSharding(node.sharding.mesh, node.sharding.spec))
    if saved.key is None and devices_of(getattr(x, "sharding", None)) == devices_of(request.sharding):
        moved = convert(x, dataclasses.replace(given.leaf, dtype=x.dtype), request.leaf, request.sharding)
    else:
        moved = moved_through_host(x, request)
    moved = as_wanted(moved, request, wanted)
    if is_chunked(node):
        return replaced(node, moved)
    return jax.device_put(moved, node.sharding) if node.sharding.memory_kind in KINDS else moved


def moved_through_host(x: jax.Array, request: ReadRequest) -> jax.Array:
    """Move one leaf through host memory. If it spans processes, replicate it first, so each host has all values."""
    saved = request.saved
    x = x if saved.key is None else jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        whole = replicated(x.sharding.mesh)  # pyright: ignore[reportAttributeAccessIssue]
        x = jax.jit(to_device, out_shardings=whole)(x).addressable_data(0)
    values = np.asarray(x)[tuple(map(slice, saved.data_shape))]
    moved = place_whole(as_stored(values, request.leaf), request.sharding)
    return moved if saved.key is None else as_keys(moved, request)


def devices_of(sharding: Any) -> tuple:
    mesh = getattr(sharding, "mesh", None)
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
