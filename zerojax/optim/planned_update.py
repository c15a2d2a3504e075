"""The update of a plan, from shapes alone: what is offloaded, what owners compute, and its groups."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from zerojax.config import Config
from zerojax.layout.chunked import Chunking
from zerojax.layout.tree import Layout
from zerojax.optim.flat_update import FlatUpdate, UpdatedLeaves, update_shape
from zerojax.optim.offloaded import OffloadedState
from zerojax.optim.owned import OwnedUpdate, owned_update
from zerojax.optim.partition import Dependencies, Partition, groups_of, merged, partition
from zerojax.optim.summary import MatrixUpdates, groups_in_words, matrix_updates
from zerojax.optim.traced import TracedUpdate
from zerojax.optim.transformation import TransformationError


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """Analyses of the update that a training step runs. Each is done once, when it is first asked for.

    Attributes:
        config: The wrapped transformation.
        trained: Layout of the trained parameters.
        leaves: Layouts of what is read and replaced.
        state_def: Structure of the state.
    """

    config: Config
    trained: Layout
    leaves: UpdatedLeaves
    state_def: jax.tree_util.PyTreeDef

    @functools.cached_property
    def offloaded(self) -> OffloadedState:
        """Return what of the state is offloaded."""
        return OffloadedState(self.config, self.trained, self.leaves)

    @functools.cached_property
    def traced(self) -> TracedUpdate:
        """Return the update, with parameters as results.

        Raises:
            TransformationError: If it needs more arguments than a step gives.
        """
        return self.trace({})

    def trace(self, changed: dict[int, tuple[int, ...]]) -> TracedUpdate:
        """Trace the update with other shapes of some parameters."""
        shapes = lambda leaves: [jax.ShapeDtypeStruct(update_shape(leaf), leaf.dtype) for leaf in leaves]
        grads, state = shapes(self.leaves.grads), shapes(self.leaves.state)
        extra = {"value": jax.ShapeDtypeStruct((), jnp.float32)}
        flat = FlatUpdate(self.config, self.trained, self.leaves, self.state_def, applies=True)
        return flat.tracer(grads, state, grads, extra)(changed)

    @functools.cached_property
    def _groups(self) -> list[list[int]]:
        """Return the results that are computed together with offloaded state, group by group."""
        units = self.offloaded.units
        return groups_of(self.traced, units, Dependencies.of(self.traced, units)) if units else []

    @functools.cached_property
    def owned(self) -> OwnedUpdate:
        """Return what owners compute.

        Raises:
            TransformationError: If the update needs more arguments than a step gives.
        """
        grads = self.leaves.grads
        if self.config.matrix_updates == "sharded" or all(leaf.kind != "sharded" or leaf.shards == 1 for leaf in grads):
            return OwnedUpdate((), {})
        streamed = {o for outs in self._groups for o in outs if o < len(grads)}
        return owned_update(self.config, self.leaves, self.traced, self.trace, streamed)

    @functools.cached_property
    def partition(self) -> Partition:
        """Return the groups of the update.

        Raises:
            Exception: The transformation's own, if it cannot be traced as a step calls it.
        """
        try:
            groups = merged(self._groups, self.owned)
        except TransformationError as error:
            raise error.__cause__ or error from None
        return partition(self.traced, self.offloaded, groups, self.trace, self.owned.groups)

    @property
    def chunkings(self) -> tuple[Chunking | None, ...]:
        """Return, for each leaf of the state, how it is chunked, or None if it is on the device."""
        state, found = self.leaves.state, {}
        for group in self.partition.groups if self.offloaded.units else ():
            found |= {k: group.chunking or Chunking(0, state[k].local_shape[:1]) for k in group.state}
        return tuple(map(found.get, range(len(state))))

    @property
    def groups(self) -> str:
        """Return the groups of the update in words, or an empty string if nothing is offloaded: all is one group."""
        return groups_in_words(self.partition, self.leaves) if self.offloaded.units else ""

    @property
    def matrices(self) -> MatrixUpdates | None:
        """Return how matrices are updated, or None if the update needs more arguments than a step gives."""
        try:
            return matrix_updates(self.owned, self.leaves.grads)
        except TransformationError:
            return None


# Tracing takes seconds for a deep model: once for a plan.
planned_update = functools.lru_cache(maxsize=8)(PlannedUpdate)
