"""The groups of an update and the matrices that owners compute, in the words of plan and report."""

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
    """Matrices of one shape and one program that are updated by owners.

    Attributes:
        paths: Paths of the parameters.
        matrices: The number of matrices: a parameter may be a stack of them.
        owners: The number of owners that share the matrices.
        within: Devices per owner.
        seconds: Least time of their update.
        seconds_sharded: The same if each product were divided among all devices.
    """

    paths: tuple[str, ...]
    matrices: int
    owners: int
    within: int
    seconds: float
    seconds_sharded: float

    def __str__(self) -> str:
        """Return one line that compares the time with owners and without owners."""
        each = f"{self.within} devices each" if self.within > 1 else "one device each"
        matrices = "1 matrix" if self.matrices == 1 else f"{self.matrices} matrices"
        return (
            f"{_named(self.paths)}: {matrices} by {self.owners} owners, {each}: "
            f"{1e3 * self.seconds:.3g} ms instead of {1e3 * self.seconds_sharded:.3g}, at peak rates"
        )


@dataclasses.dataclass(frozen=True)
class MatrixUpdates:
    """How the matrices of an update are computed.

    Attributes:
        owned: The matrices that owners compute.
        left: The paths of all other matrices, which the compiler divides or repeats, and why.
    """

    owned: tuple[OwnedMatrices, ...] = ()
    left: tuple[tuple[tuple[str, ...], str], ...] = ()

    def __str__(self) -> str:
        """Return a line for each group of parameters, or an empty string if no matrices are multiplied."""
        lines = [str(group) for group in self.owned]
        lines += [f"{_named(paths)}: divided among all devices: {reason}" for paths, reason in self.left]
        return "\n".join(f"update of {line}" for line in lines)


def _named(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def matrix_updates(found: OwnedUpdate, leaves: Sequence[Leaf]) -> MatrixUpdates:
    """Describe who computes which matrices. `leaves` are the layouts of the trained parameters."""
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
    """Return a line for all groups that are alike: their parameters, and where their state waits between steps."""
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
