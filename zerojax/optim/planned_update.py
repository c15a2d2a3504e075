"""Find a plan's offloaded state, the cores that owners compute, and the groups of its update, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from zerojax.layout.chunked import Chunking
from zerojax.optim.flat_update import FlatUpdate
from zerojax.optim.offloaded import OffloadedState
from zerojax.optim.owned import OwnedUpdate, owned_update
from zerojax.optim.partition import Dependencies, Partition, groups_of, merged, partition
from zerojax.optim.summary import MatrixUpdates, groups_in_words, matrix_updates
from zerojax.optim.traced import TracedUpdate
from zerojax.optim.transformation import TransformationError


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """Analyses of the `flat` update that a training step runs. Each analysis runs once, when it is first needed."""

    flat: FlatUpdate

    @functools.cached_property
    def offloaded(self) -> OffloadedState:
        return OffloadedState(self.flat.config, self.flat.trained, self.flat.leaves)

    @functools.cached_property
    def traced(self) -> TracedUpdate:
        """Return the traced update. Raise a `TransformationError` if it needs arguments that a step does not give."""
        return self.trace({})

    def trace(self, changed: dict[int, tuple[int, ...]]) -> TracedUpdate:
        """Trace the update. `changed` maps the index of a parameter to the shape that replaces its planned shape."""
        seen = lambda leaf: leaf.storage_shape if leaf.kind == "flat" else leaf.shape
        shapes = lambda leaves: [jax.ShapeDtypeStruct(seen(leaf), leaf.dtype) for leaf in leaves]
        grads, state = shapes(self.flat.leaves.grads), shapes(self.flat.leaves.state)
        return self.flat.tracer(grads, state, grads, {"value": jax.ShapeDtypeStruct((), jnp.float32)})(changed)

    @functools.cached_property
    def _with_offloaded(self) -> list[list[int]]:
        """Return the indices of the results of each group with offloaded state."""
        units, on_disk = self.offloaded.units, self.offloaded.params_on_disk
        if not units and not on_disk:
            return []
        return groups_of(self.traced, units, Dependencies.of(self.traced, units, on_disk), on_disk)

    @functools.cached_property
    def owned(self) -> OwnedUpdate:
        """Return the cores that owners compute, or raise a `TransformationError` as `traced` does."""
        config, grads = self.flat.config, self.flat.leaves.grads
        if config.matrix_updates == "sharded" or all(leaf.kind != "sharded" or leaf.shards == 1 for leaf in grads):
            return OwnedUpdate((), {})
        streamed = {o for outs in self._with_offloaded for o in outs if o < len(grads)}
        return owned_update(config, self.flat.leaves, self.traced, self.trace, streamed)

    @functools.cached_property
    def partition(self) -> Partition:
        """Return the groups of the update. Raise the error of the transformation if it cannot be traced."""
        try:
            groups = merged(self._with_offloaded, self.owned)
        except TransformationError as error:
            raise error.__cause__ or error from None
        return partition(self.traced, self.offloaded, groups, self.trace, self.owned.groups)

    @property
    def chunkings(self) -> tuple[Chunking | None, ...]:
        """Return the chunking of each leaf of the state, or None for a leaf that stays on the device."""
        state, found = self.flat.leaves.state, {}
        for group in self.partition.groups if self.offloaded.units else ():
            found |= {k: group.chunking or Chunking(0, state[k].local_shape[:1]) for k in group.state}
        return tuple(map(found.get, range(len(state))))

    @property
    def groups(self) -> str:
        """Return a description of the update's groups, or an empty string if nothing is offloaded."""
        return groups_in_words(self.partition, self.flat.leaves) if self.offloaded.units else ""

    @property
    def matrices(self) -> MatrixUpdates | None:
        """Return how matrices are updated, or None if the update needs arguments that a step does not give."""
        try:
            return matrix_updates(self.owned, self.flat.leaves.grads)
        except TransformationError:
            return None


# Cached, because tracing takes seconds for a deep model, and a plan and its step ask for the same update.
planned_update = functools.lru_cache(maxsize=8)(PlannedUpdate)
