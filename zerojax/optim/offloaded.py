"""Decide which leaves of the optimizer's state are offloaded, and which parameters are updated in chunks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from zerojax.config import Config, Offload
from zerojax.layout.chunked import Chunking, chunking_of, row_chunkings_of
from zerojax.layout.tree import Layout
from zerojax.optim.elementwise import refused_leaves
from zerojax.optim.master_weights import wrapped_tx
from zerojax.optim.traced import UpdatedLeaves
from zerojax.optim.transformation import TransformationError
from zerojax.placement.storage import shapes

# The number of chunks on the device at a time: one is fetched, one is updated, and one is written.
IN_FLIGHT = 3
# A unit is a set of state leaves that are offloaded together. The integer i means all state that mirrors trained
# parameter i. ("state", k) means only leaf k.
Unit = int | tuple[str, int]


@dataclasses.dataclass(frozen=True)
class OffloadedState:
    """Choose the offloaded part of the state, from shapes alone."""

    config: Config
    trained: Layout
    leaves: UpdatedLeaves

    @functools.cached_property
    def units(self) -> dict[int, Unit]:
        """Map each offloaded leaf of the state to its unit.

        The device keeps as many units as fit into its share of the state. The largest units are tried first.
        """
        if self.config.offload is None:
            return {}
        units, sizes = self._candidates, {}
        for k, unit in units.items():
            sizes[unit] = sizes.get(unit, 0) + self.leaves.state[k].local_bytes
        room, kept = self._room_on_device(sum(sizes.values())), set()
        for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], str(item[0]))):
            if size <= room:
                kept.add(unit)
                room -= size
        return {k: unit for k, unit in units.items() if unit not in kept}

    @functools.cached_property
    def _candidates(self) -> dict[int, Unit]:
        """Map each leaf of the state that may be offloaded to its unit. Small leaves stay on the device."""
        leaves = zip(self.trained.paths, shapes(self.trained.grads), strict=True)
        # Leave out scalars and empty leaves, because their state in Adafactor cannot be divided like the parameter.
        covered = [bool(x.shape and x.size) and self._offload.covers(path, x) for path, x in leaves]
        return {
            k: ("state", k) if i is None else i
            for k, (leaf, i) in enumerate(zip(self.leaves.state, self.leaves.param_of, strict=True))
            if leaf.shape != () and leaf.kind != "flat" and jnp.issubdtype(leaf.dtype, jnp.inexact)
            if leaf.size >= self.config.persist_below and (i is None or covered[i])
        }

    @functools.cached_property
    def params_on_disk(self) -> frozenset[int]:
        """Return the indices of the trained parameters that are on disk."""
        sharded = (i for i, leaf in enumerate(self.trained.params) if leaf.kind == "sharded")
        return frozenset(sharded if self.config.params_on_disk else ())

    @property
    def place(self) -> str:
        return self._offload.optimizer or "device"

    @property
    def _offload(self) -> Offload:
        assert self.config.offload is not None
        return self.config.offload

    def _room_on_device(self, total: int) -> int:
        """Return how many bytes of state each device keeps, of the `total` bytes per device that may be offloaded.

        Raises:
            ValueError: If the arrays that must stay on the device, and the chunks in flight, exceed the budget.
        """
        offload = self._offload
        if offload.fraction != "auto":
            return round(total * (1 - offload.fraction))
        assert offload.budget is not None
        state, grads = self.leaves.state, self.leaves.grads
        fixed = sum(leaf.local_bytes for leaf in (*self.trained.params, *grads))
        fixed += sum(leaf.local_bytes for k, leaf in enumerate(state) if k not in self._candidates)
        if fixed + total <= offload.budget:
            return total
        chunks = [0] * len(grads)
        for k, unit in self._candidates.items():
            if isinstance(unit, int):
                chunks[unit] += min(state[k].local_bytes, offload.chunk_bytes)
        fixed += IN_FLIGHT * max(chunks, default=0)
        if fixed > offload.budget:
            raise ValueError(
                f"Offload(budget={offload.budget}) is too small: parameters, gradients, state that is too small to be "
                f"offloaded, and the chunks in flight need {fixed} bytes per device. Give a larger budget, a smaller "
                f"chunk_bytes, stage 3, or more devices."
            )
        return offload.budget - fixed

    @functools.cached_property
    def chunkable(self) -> dict[int, Chunking]:
        """Map each parameter that may be updated in chunks, because its update is elementwise, to its chunking."""
        grads, state, param_of = self.leaves
        itemsizes: dict[int, int] = {}
        for k, i in self.units.items():
            if isinstance(i, int):
                itemsizes[i] = max(itemsizes.get(i, grads[i].dtype.itemsize), state[k].dtype.itemsize)
        chunk_bytes = lambda i: self._offload.chunk_bytes * grads[i].dtype.itemsize // itemsizes[i]
        chunkings = {i: chunking_of(grads[i], chunk_bytes(i)) for i in itemsizes}
        by_row = row_chunkings_of(grads, self._offload.chunk_bytes) if self.params_on_disk else {}
        chunkings |= {i: by_row[i] for i in self.params_on_disk}
        if not chunkings:
            return {}
        params = jax.tree.unflatten(self.trained.treedef, shapes(grads))
        inner = wrapped_tx(self.config, self.trained)
        # `train_step` gives the loss as `value`. In this trace, any number except zero can replace the loss.
        tx = optax.GradientTransformation(inner.init, functools.partial(inner.update, value=jnp.float32(1)))
        # The last chunk may be shorter, and a transformation may treat shorter arrays differently.
        first, last = (
            {i: chunking.chunk_shape(grads[i], chunking.extents[n]) for i, chunking in chunkings.items()}
            for n in (0, -1)
        )
        refused: set = set()
        try:
            for changed in [first] if first == last else [first, last]:
                refused |= refused_leaves(tx, params, grads, param_of, changed)
        except TransformationError:  # tx needs more arguments, or refuses chunks: update full arrays
            return {}
        return {i: chunking for i, chunking in chunkings.items() if i not in refused}
