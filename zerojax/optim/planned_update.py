"""Analyse the update that a training step runs: its offloaded state, its groups, and the cores that owners compute."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from zerojax.offload.chunked import Chunking
from zerojax.optim.owned import OwnedUpdate, owned_update
from zerojax.optim.partition import OffloadedState, Partition, groups_of, merged, partition
from zerojax.optim.traced import OwnedCores, TracedUpdate, trace_update
from zerojax.optim.transformation import FlatUpdate, TransformationError

PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """Analyses of the `flat` update that a training step runs. Each analysis runs once, when it is first needed."""

    flat: FlatUpdate

    @functools.cached_property
    def offloaded(self) -> OffloadedState:
        return OffloadedState(self.flat)

    @functools.cached_property
    def traced(self) -> TracedUpdate:
        """Return the traced update. Raise a `TransformationError` if it needs arguments that a step does not give."""
        return trace_update(self.flat, self.flat.planned_shapes())

    @functools.cached_property
    def _with_offloaded(self) -> list[list[int]]:
        """Return the indices of the results of each group with offloaded state."""
        some = self.offloaded.units or self.offloaded.params_on_disk
        return groups_of(self.traced, self.offloaded) if some else []

    @functools.cached_property
    def owned(self) -> OwnedUpdate:
        """Return the cores that owners compute, or raise a `TransformationError` as `traced` does."""
        if not self.flat.may_have_owners:
            return OwnedUpdate()
        streamed = {o for outs in self._with_offloaded for o in outs if o < len(self.flat.leaves.grads)}
        return owned_update(self.flat, self.flat.planned_shapes(), self.traced, streamed)

    @functools.cached_property
    def partition(self) -> Partition:
        """Return the groups of the update. Raise the error of the transformation if it cannot be traced."""
        try:
            groups = merged(self._with_offloaded, self.owned)
        except TransformationError as error:
            raise error.__cause__ or error from None
        return partition(self.traced, self.offloaded, groups, self.owned.owned)

    @property
    def chunkings(self) -> tuple[Chunking | None, ...]:
        """Return the chunking of each leaf of the state, or None for a leaf that stays on the device."""
        state, found = self.flat.leaves.state, {}
        for group in self.partition.groups if self.offloaded.units else ():
            found |= {k: group.chunking or Chunking(0, state[k].local_shape[:1]) for k in group.state}
        return tuple(map(found.get, range(len(state))))

    @property
    def has_owners(self) -> bool | None:
        """Return whether owners compute cores, or None if the update needs arguments that a step does not give."""
        try:
            return bool(self.owned.owned)
        except TransformationError:
            return None

    def owners_in_words(self) -> str:
        """Return one line per set of equal cores that owners compute, and per reason why they do not compute others."""
        if self.has_owners is None:
            return ""
        path_of = lambda i: self.flat.leaves.grads[i].path
        lines = [cores_in_words(each, [path_of(core.leaf) for core in each.cores]) for each in self.owned.owned]
        by_reason: dict[str, list[str]] = {}
        for i, reason in sorted(self.owned.left.items()):
            by_reason.setdefault(reason, []).append(path_of(i))
        lines += [f"{first_of(x)}: divided among all devices: {reason}" for reason, x in by_reason.items()]
        return "\n".join(f"update of {line}" for line in lines)

    def groups_in_words(self) -> str:
        """Return one line per set of similar groups, with their parameters and where their state is between steps.

        Return an empty string if nothing is offloaded.
        """
        offload, leaves = self.flat.config.offload, self.flat.leaves
        alike: dict[tuple, list[list[str]]] = {}
        for group in (self.partition.first, *self.partition.groups) if offload and self.offloaded.units else ():
            state = group.state or group.resident
            paths = [leaves.grads[i].path for i in group.params] or [f"opt_state{leaves.state[k].path}" for k in state]
            place = "device" if group is self.partition.first else offload.optimizer or "device"
            if paths:
                key = PLACES[place], len(group.chunks), len(group.params), len(state)
                alike.setdefault(key, []).append(paths)
        lines = []
        for (place, chunks, _, count), members in alike.items():
            number = f"{len(members)} groups, each" if len(members) > 1 else "one group"
            divided = f", in {chunks} chunks" if chunks > 1 else ""
            state = f"{count} {'leaf' if count == 1 else 'leaves'} of the state"
            paths = first_of([path for paths in members for path in paths])
            lines.append(f"update of {paths}: {number} with {state} {place}{divided}")
        return "\n".join(lines)


# Cached, because tracing takes seconds for a deep model, and a plan and its step ask for the same update.
planned_update = functools.lru_cache(maxsize=8)(PlannedUpdate)


def cores_in_words(owned: OwnedCores, paths: Sequence[str]) -> str:
    """Return a line that compares the time of the update of `paths` with owners to the time without owners."""
    each = f"{owned.within} devices each" if owned.within > 1 else "one device each"
    matrices = "1 matrix" if owned.matrices == 1 else f"{owned.matrices} matrices"
    return (
        f"{first_of(paths)}: {matrices} by {owned.leaf.shards // owned.within} owners, {each}: "
        f"{1e3 * owned.seconds:.3g} ms instead of {1e3 * owned.seconds_sharded:.3g}, at peak rates"
    )


def first_of(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
