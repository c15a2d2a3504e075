"""Which leaves of the optimizer's state are offloaded, and how they are chunked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import Config, Offload
from zerojax.layout.chunked import Chunking, chunking_of
from zerojax.layout.leaf import Leaf
from zerojax.layout.tree import Layout
from zerojax.optim.elementwise import refused_leaves
from zerojax.optim.guarded import TransformationError
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.partition import Owner, Partition, partition
from zerojax.optim.traced import TracedUpdate, trace_update
from zerojax.placement.storage import cast, shapes

# Chunks in flight: one is fetched, one updated, one written.
IN_FLIGHT = 3


@dataclasses.dataclass(frozen=True)
class StateOffload:
    """What of the state is offloaded, and how its update is partitioned; from shapes alone.

    Attributes:
        config: The wrapped transformation; `config.offload` is not None.
        trained: Layout of the trained parameters.
        grads: One `Leaf` each, for its gradient and its update.
        state: One `Leaf` for each leaf of the state.
        state_def: Structure of the state.
        param_of: For each leaf of the state, the trained parameter it belongs to, or None.
    """

    config: Config
    trained: Layout
    grads: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    state_def: jax.tree_util.PyTreeDef
    param_of: tuple[int | None, ...]

    @functools.cached_property
    def partition(self) -> Partition:
        """Return the partition of the update."""
        return partition(self._trace({}), self.owners, self._chunkable, self._trace)

    @property
    def chunkings(self) -> tuple[Chunking | None, ...]:
        """Return, for each leaf of the state, how it is chunked, or None if it is on the device."""
        found: dict[int, Chunking] = {}
        for group in self.partition.groups:
            found |= {k: group.chunking or Chunking(0, self.state[k].local_shape[:1]) for k in group.state}
        return tuple(map(found.get, range(len(self.state))))

    @functools.cached_property
    def owners(self) -> dict[int, Owner]:
        """Return the offloaded leaves of the state, each with its owner.

        Of what may be offloaded, the device keeps the owners with the largest state that still fit.
        """
        owners, sizes = self._candidates, {}
        for k, owner in owners.items():
            sizes[owner] = sizes.get(owner, 0) + self.state[k].local_bytes
        room, kept = self._room_on_device(sum(sizes.values())), set()
        for owner, size in sorted(sizes.items(), key=lambda item: (-item[1], str(item[0]))):
            if size <= room:
                kept.add(owner)
                room -= size
        return {k: owner for k, owner in owners.items() if owner not in kept}

    @functools.cached_property
    def _candidates(self) -> dict[int, Owner]:
        """Return the leaves of the state that may be offloaded, each with its owner."""
        leaves = zip(self.trained.paths, shapes(self.trained.grads), strict=True)
        # What Adafactor keeps of a scalar, or of an empty leaf, cannot be divided as its parameter is.
        means = [bool(x.shape and x.size) and self._offload.covers(path, x) for path, x in leaves]
        return {
            k: ("state", k) if i is None else i
            for k, (leaf, i) in enumerate(zip(self.state, self.param_of, strict=True))
            if self._is_large(leaf) and (i is None or means[i])
        }

    @property
    def _offload(self) -> Offload:
        assert self.config.offload is not None
        return self.config.offload

    def _is_large(self, leaf: Leaf) -> bool:
        """Return whether a leaf of the state is large enough to be worth a transfer."""
        return (
            leaf.shape != ()
            and leaf.kind != "flat"
            and leaf.size >= self.config.persist_below
            and jnp.issubdtype(leaf.dtype, jnp.inexact)
        )

    def _room_on_device(self, total: int) -> int:
        """Return the bytes per device for state that may be offloaded, of which there are `total`.

        Raises:
            ValueError: If what cannot be offloaded is larger than the budget.
        """
        offload = self._offload
        if offload.fraction != "auto":
            return round(total * (1 - offload.fraction))
        assert offload.budget is not None
        fixed = sum(leaf.local_bytes for leaf in (*self.trained.params, *self.grads))
        fixed += sum(leaf.local_bytes for k, leaf in enumerate(self.state) if k not in self._candidates)
        if fixed + total <= offload.budget:
            return total
        chunks = [0] * len(self.grads)
        for k, owner in self._candidates.items():
            if isinstance(owner, int):
                chunks[owner] += min(self.state[k].local_bytes, offload.chunk_bytes)
        fixed += IN_FLIGHT * max(chunks, default=0)
        if fixed > offload.budget:
            raise ValueError(
                f"Offload(budget={offload.budget}): parameters, gradients, what is too small to be offloaded, and the "
                f"chunks in flight need {fixed} bytes a device already. Give a larger budget, a smaller chunk_bytes, "
                f"stage 3, or more devices."
            )
        return offload.budget - fixed

    @functools.cached_property
    def _chunkable(self) -> dict[int, Chunking]:
        """Return how parameters with offloaded state are chunked, for those whose update is elementwise."""
        itemsizes: dict[int, int] = {}
        for k, i in self.owners.items():
            if isinstance(i, int):
                itemsizes[i] = max(itemsizes.get(i, self.grads[i].dtype.itemsize), self.state[k].dtype.itemsize)
        chunk_bytes = lambda i: self._offload.chunk_bytes * self.grads[i].dtype.itemsize // itemsizes[i]
        chunkings = {i: chunking_of(self.grads[i], chunk_bytes(i)) for i in itemsizes}
        if not chunkings:
            return {}
        params = jax.tree.unflatten(self.trained.treedef, shapes(self.grads))
        inner = wrapped_tx(self.config, self.trained)
        # as `train_step` calls it; any value that is not zero stands for the loss
        tx = optax.GradientTransformation(inner.init, functools.partial(inner.update, value=jnp.float32(1)))
        # the last chunk may be shorter, and a transformation may treat shorter arrays in another way
        first, last = (
            {i: chunking.chunk_shape(self.grads[i], chunking.extents[n]) for i, chunking in chunkings.items()}
            for n in (0, -1)
        )
        refused: set = set()
        try:
            for changed in [first] if first == last else [first, last]:
                refused |= refused_leaves(tx, params, self.grads, self.param_of, changed)
        except TransformationError:  # it needs more arguments, or takes no chunks: leaves are updated as full arrays
            return {}
        return {i: chunking for i, chunking in chunkings.items() if i not in refused}

    def _trace(self, lengths: dict[int, int]) -> TracedUpdate:
        """Trace the update, some parameters and their state being chunks of the lengths given."""
        seen = [
            self._chunkable[i].chunk_shape(leaf, lengths[i]) if i in lengths else update_shape(leaf)
            for i, leaf in enumerate(self.grads)
        ]

        def state_shape(i: int | None, leaf: Leaf) -> tuple[int, ...]:
            return seen[i] if i is not None and leaf.shape == self.grads[i].shape else update_shape(leaf)

        grads = [jax.ShapeDtypeStruct(x, leaf.dtype) for x, leaf in zip(seen, self.grads, strict=True)]
        state = [
            jax.ShapeDtypeStruct(state_shape(i, leaf), leaf.dtype)
            for i, leaf in zip(self.param_of, self.state, strict=True)
        ]
        return trace_update(self._update, grads, state, grads, [jax.ShapeDtypeStruct((), jnp.float32)])

    def _update(self, grads: list, state: list, params: list, extra: list) -> tuple[list, list]:
        """Return parameters, in the types they are stored in, and state after an update."""
        tree: Any = self.trained.treedef
        old = jax.tree.unflatten(tree, params)
        updates, new = wrapped_tx(self.config, self.trained).update(
            jax.tree.unflatten(tree, grads), jax.tree.unflatten(self.state_def, state), old, value=extra[0]
        )
        moved = updates if self.config.has_master_weights else optax.apply_updates(old, updates)
        return cast(jax.tree.leaves(moved), [leaf.dtype for leaf in self.trained.params]), jax.tree.leaves(new)


# Tracing takes seconds for a deep model: once for a plan.
state_offload = functools.lru_cache(maxsize=8)(StateOffload)


def update_shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape in which the update sees a leaf: logical, or flat if it is stored flat."""
    return leaf.storage_shape if leaf.kind == "flat" else leaf.shape
