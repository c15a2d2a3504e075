"""Analyse the update that a training step runs: its offloaded state, its groups, and the cores that owners compute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from zerojax.layout.leaf import Leaf
from zerojax.offload.chunked import Chunking
from zerojax.optim.owned import OwnedUpdate, owned_update
from zerojax.optim.partition import OffloadedState, Partition, groups_of, merged, partition
from zerojax.optim.traced import OwnedGroup, TracedUpdate, tracer
from zerojax.optim.transformation import FlatUpdate, TransformationError, UpdatedLeaves

WHERE = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


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
        return self.trace()

    @functools.cached_property
    def trace(self) -> Callable[..., TracedUpdate]:
        """Return a function `trace(changed)`; see `tracer`."""
        return tracer(self.flat, *self.flat.planned_shapes())

    @functools.cached_property
    def _with_offloaded(self) -> list[list[int]]:
        """Return the indices of the results of each group with offloaded state."""
        some = self.offloaded.units or self.offloaded.params_on_disk
        return groups_of(self.traced, self.offloaded) if some else []

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
        return partition(self.traced, self.offloaded, groups, self.owned.groups)

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
        offload = self.flat.config.offload
        if offload is None or not self.offloaded.units:
            return ""
        return groups_in_words(self.partition, self.flat.leaves, offload.optimizer or "device")

    @property
    def matrices(self) -> MatrixUpdates | None:
        """Return how matrices are updated, or None if the update needs arguments that a step does not give."""
        try:
            found, leaves = self.owned, self.flat.leaves.grads
        except TransformationError:
            return None
        by_reason: dict[str, list[str]] = {}
        for i, reason in sorted(found.left.items()):
            by_reason.setdefault(reason, []).append(leaves[i].path)
        owned = tuple(OwnedMatrices.of(group, leaves) for group in found.groups)
        return MatrixUpdates(owned, tuple((tuple(paths), reason) for reason, paths in by_reason.items()))


# Cached, because tracing takes seconds for a deep model, and a plan and its step ask for the same update.
planned_update = functools.lru_cache(maxsize=8)(PlannedUpdate)


@dataclasses.dataclass(frozen=True)
class OwnedMatrices:
    """Matrices with equal shapes and equal programs that are updated by owners."""

    paths: tuple[str, ...]  # the paths of the parameters
    matrices: int  # the number of matrices; a parameter may be a stack of matrices
    owners: int  # the number of owners that share the matrices
    within: int  # the number of devices per owner
    seconds: float  # the time of the update at peak rates
    seconds_sharded: float  # the time at peak rates if each product were divided among all devices

    @classmethod
    def of(cls, group: OwnedGroup, leaves: Sequence[Leaf]) -> OwnedMatrices:
        paths, within = tuple(leaves[core.leaf].path for core in group.cores), group.within
        matrices, owners = group.items * max(group.size, 1), group.leaf.shards // within
        return cls(paths, matrices, owners, within, group.seconds, group.seconds_sharded)

    def __str__(self) -> str:
        """Return one line that compares the time of the update with owners to the time without owners."""
        each = f"{self.within} devices each" if self.within > 1 else "one device each"
        matrices = "1 matrix" if self.matrices == 1 else f"{self.matrices} matrices"
        return (
            f"{_named(self.paths)}: {matrices} by {self.owners} owners, {each}: "
            f"{1e3 * self.seconds:.3g} ms instead of {1e3 * self.seconds_sharded:.3g}, at peak rates"
        )


@dataclasses.dataclass(frozen=True)
class MatrixUpdates:
    """A summary of how the matrices of an update are computed."""

    owned: tuple[OwnedMatrices, ...] = ()  # the matrices that owners compute
    # the paths of all other matrices, with the reason why owners do not compute them
    left: tuple[tuple[tuple[str, ...], str], ...] = ()

    def __str__(self) -> str:
        """Return one line per entry of `owned` and `left`, or an empty string if the update multiplies no matrices."""
        lines = [str(group) for group in self.owned]
        lines += [f"{_named(paths)}: divided among all devices: {reason}" for paths, reason in self.left]
        return "\n".join(f"update of {line}" for line in lines)


def _named(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def groups_in_words(partition: Partition, leaves: UpdatedLeaves, offloaded_to: str) -> str:
    """Return one line per set of similar groups, with their parameters and where their state waits between steps."""
    alike: dict[tuple, list[list[str]]] = {}
    for group in (partition.first, *partition.groups):
        state = group.state or group.resident
        paths = [leaves.grads[i].path for i in group.params] or [f"opt_state{leaves.state[k].path}" for k in state]
        place = "device" if group is partition.first else offloaded_to
        key = place, len(group.chunks), len(group.params), len(state)
        alike.setdefault(key, []).extend([paths] if paths else [])
    lines = []
    for (place, chunks, _, count), members in alike.items():
        if members:
            number = f"{len(members)} groups, each" if len(members) > 1 else "one group"
            divided = f", in {chunks} chunks" if chunks > 1 else ""
            state = f"{count} {'leaf' if count == 1 else 'leaves'} of the state"
            paths = _named([path for paths in members for path in paths])
            lines.append(f"update of {paths}: {number} with {state} {WHERE[place]}{divided}")
    return "\n".join(lines)
