"""Which leaves of the optimizer's state are offloaded, and how they are cut into pieces."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import Config, Offload
from zerojax.layout.chunked import Chunking, chunking_of
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.elementwise import refused_leaves
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.partition import Split, Traced, split, trace
from zerojax.placement.storage import cast, shapes

# Chunks under way at once: one comes in, one is updated, one goes out.
IN_FLIGHT = 3


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """How the offloaded part of a state is held and updated.

    Attributes:
        chunkings: For each leaf of the state, how it is cut into pieces; None: it is on the device.
        split: The update in parts.
    """

    chunkings: tuple[Chunking | None, ...]
    split: Split


@functools.lru_cache(maxsize=8)
def offloaded(
    config: Config,
    trained: Layout,
    parts: tuple[Leaf, ...],
    state: tuple[Leaf, ...],
    state_def: jax.tree_util.PyTreeDef,
    owners: tuple[int | None, ...],
) -> Offloaded:
    """Choose what is offloaded, and cut the update accordingly.

    Args:
        config: The wrapped transformation; `config.offload` is not None.
        trained: Layout of the trained parameters.
        parts: One `Leaf` each, for its gradient and its update.
        state: One `Leaf` for each leaf of the state.
        state_def: Structure of the state.
        owners: What `owners_of` found.
    """
    offload = config.offload
    assert offload is not None
    far = chosen(config, offload, trained, parts, state, owners)
    chunkings = chunkable(config, offload, trained, parts, state, owners, far)
    shape = lambda x, leaf: jax.ShapeDtypeStruct(x, leaf.dtype)

    def traced(lengths: dict[int, int]) -> Traced:
        seen = [chunkings[i].chunk_shape(p, lengths[i]) if i in lengths else viewed(p) for i, p in enumerate(parts)]
        held = [
            seen[i] if i is not None and leaf.shape == parts[i].shape else viewed(leaf)
            for i, leaf in zip(owners, state, strict=True)
        ]
        grads = [shape(x, part) for x, part in zip(seen, parts, strict=True)]
        return trace(
            functools.partial(advanced, config, trained, state_def),
            grads,
            [shape(x, leaf) for x, leaf in zip(held, state, strict=True)],
            grads,
            [jax.ShapeDtypeStruct((), jnp.float32)],
        )

    found = split(traced({}), far, chunkings, traced)
    held: list[Chunking | None] = [None] * len(state)
    for task in found.tasks:
        for k in task.state:
            held[k] = task.chunking or Chunking(0, state[k].local_shape[:1])
    return Offloaded(tuple(held), found)


def viewed(leaf: Leaf) -> tuple[int, ...]:
    """The shape in which the update sees a leaf: logical, or flat as it is stored."""
    return leaf.storage_shape if leaf.kind == "flat" else leaf.shape


def advanced(config: Config, trained: Layout, state_def, grads: list, state: list, params: list, extra: list):
    """The parameters, as they are stored, and the state after an update; views in and out."""
    tree = trained.treedef
    old = jax.tree.unflatten(tree, params)
    updates, new = wrapped_tx(config, trained).update(
        jax.tree.unflatten(tree, grads), jax.tree.unflatten(state_def, state), old, value=extra[0]
    )
    moved = updates if config.has_master_weights else optax.apply_updates(old, updates)
    return cast(jax.tree.leaves(moved), [leaf.dtype for leaf in trained.params]), jax.tree.leaves(new)


def chosen(
    config: Config,
    offload: Offload,
    trained: Layout,
    parts: Sequence[Leaf],
    state: Sequence[Leaf],
    owners: Sequence[int | None],
) -> dict[int, int | None]:
    """The leaves of the state that are offloaded, each with the parameter it belongs to, or None.

    Of what may be offloaded, the device keeps the parameters with most state that still fit.
    """
    paths = trained.paths
    means = [offload.covers(path, x) for path, x in zip(paths, shapes(trained.grads), strict=True)]
    far = {
        k: owner
        for k, (leaf, owner) in enumerate(zip(state, owners, strict=True))
        if is_large(config, leaf) and (owner is None or means[owner])
    }
    sizes: dict[Any, int] = {}
    for k, owner in far.items():
        key = ("state", k) if owner is None else owner
        sizes[key] = sizes.get(key, 0) + state[k].local_bytes
    room = room_on_device(config, offload, trained, parts, state, far, sum(sizes.values()))
    kept = set()
    for key, size in sorted(sizes.items(), key=lambda item: (-item[1], str(item[0]))):
        if size <= room:
            kept.add(key)
            room -= size
    return {k: owner for k, owner in far.items() if (("state", k) if owner is None else owner) not in kept}


def is_large(config: Config, leaf: Leaf) -> bool:
    """Whether a leaf of the state is worth a journey."""
    return (
        leaf.shape != ()
        and leaf.kind != "flat"
        and leaf.size >= config.persist_below
        and jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def room_on_device(
    config: Config,
    offload: Offload,
    trained: Layout,
    parts: Sequence[Leaf],
    state: Sequence[Leaf],
    far: dict[int, int | None],
    total: int,
) -> int:
    """Bytes a device has for state that might be offloaded.

    Raises:
        ValueError: If what cannot be offloaded is larger than the budget.
    """
    if offload.fraction != "auto":
        return round(total * (1 - offload.fraction))
    assert offload.budget is not None
    fixed = sum(leaf.local_bytes for leaf in (*trained.params, *parts))
    fixed += sum(leaf.local_bytes for k, leaf in enumerate(state) if k not in far)
    if fixed + total <= offload.budget:
        return total
    owned = [[state[k] for k, owner in far.items() if owner == i] for i in range(len(parts))]
    fixed += IN_FLIGHT * max((sum(min(x.local_bytes, offload.chunk_bytes) for x in own) for own in owned), default=0)
    if fixed > offload.budget:
        raise ValueError(
            f"Offload(budget={offload.budget}): parameters, gradients, what is too small to be offloaded, and the "
            f"chunks under way need {fixed} bytes a device already. Give a larger budget, a smaller chunk_bytes, "
            f"stage 3, or more devices."
        )
    return offload.budget - fixed


def chunkable(
    config: Config,
    offload: Offload,
    trained: Layout,
    parts: tuple[Leaf, ...],
    state: Sequence[Leaf],
    owners: Sequence[int | None],
    far: dict[int, int | None],
) -> dict[int, Chunking]:
    """How parameters with offloaded state are cut, those that are updated element by element."""
    chunkings = {}
    for i in {owner for owner in far.values() if owner is not None}:
        widest = max((state[k].dtype.itemsize for k, owner in far.items() if owner == i), default=4)
        found = chunking_of(
            parts[i], offload.chunk_bytes * parts[i].dtype.itemsize // max(widest, parts[i].dtype.itemsize)
        )
        chunkings[i] = found
    if not chunkings:
        return {}
    params, inner = jax.tree.unflatten(trained.treedef, shapes(parts)), wrapped_tx(config, trained)
    # as `train_step` calls it; any value that is not zero stands for the loss
    tx = optax.GradientTransformation(inner.init, functools.partial(inner.update, value=jnp.float32(1)))
    # the last piece may be shorter, and a transformation may treat shorter arrays in another way
    sizes = [{i: found.chunk_shape(parts[i], found.extents[n]) for i, found in chunkings.items()} for n in (0, -1)]
    try:
        differing = sizes if sizes[0] != sizes[1] else sizes[:1]
        refused = set().union(*(refused_leaves(tx, params, parts, tuple(owners), changed) for changed in differing))
    except Exception:  # it needs more arguments, or does not take the pieces: the leaves travel whole
        return {}
    return {i: found for i, found in chunkings.items() if i not in refused}
