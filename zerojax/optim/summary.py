"""Describe an update's groups, and the matrices that owners compute, for the texts of a plan and a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zerojax.layout.leaf import Leaf
from zerojax.optim.flat_update import UpdatedLeaves
from zerojax.optim.owned import OwnedUpdate
from zerojax.optim.partition import Partition

WHERE = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


@dataclasses.dataclass(frozen=True)
class OwnedMatrices:
    """Matrices with equal shapes and equal programs that are updated by owners."""

    paths: tuple[str, ...]  # the paths of the parameters
    matrices: int  # the number of matrices; a parameter may be a stack of matrices
    owners: int  # the number of owners that share the matrices
    within: int  # the number of devices per owner
    seconds: float  # the time of the update at peak rates
    seconds_sharded: float  # the time at peak rates if each product were divided among all devices

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


def matrix_updates(found: OwnedUpdate, leaves: Sequence[Leaf]) -> MatrixUpdates:
    """Describe how each matrix is updated. `leaves` are the layouts of the trained parameters."""
    owned = tuple(
        OwnedMatrices(
            tuple(leaves[core.leaf].path for core in group.cores),
            group.items * max(group.size, 1),
            group.leaf.shards // group.within,
            group.within,
            group.seconds,
            group.seconds_sharded,
        )
        for group in found.groups
    )
    by_reason: dict[str, list[str]] = {}
    for i, reason in sorted(found.left.items()):
        by_reason.setdefault(reason, []).append(leaves[i].path)
    return MatrixUpdates(owned, tuple((tuple(paths), reason) for reason, paths in by_reason.items()))


def groups_in_words(partition: Partition, leaves: UpdatedLeaves) -> str:
    """Return one line per set of similar groups, with their parameters and where their state waits between steps."""
    alike: dict[tuple, list[list[str]]] = {}
    for group in (partition.first, *partition.groups):
        state = group.state or group.resident
        paths = [leaves.grads[i].path for i in group.params] or [f"opt_state{leaves.state[k].path}" for k in state]
        key = group.place, len(group.chunks), len(group.params), len(state)
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
