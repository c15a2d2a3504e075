"""How a plan's matrices are updated: found once, from shapes alone, for the plan, the report and the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zerojax.layout.leaf import Leaf
from zerojax.optim.owned import OwnedUpdate


@dataclasses.dataclass(frozen=True)
class OwnedMatrices:
    """Matrices of one shape and one program that are updated by owners.

    Attributes:
        paths: Of the parameters.
        matrices: How many there are: a parameter may be a stack of them.
        owners: How many owners share them.
        within: How many devices an owner is.
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
        """Return one line that says what is saved."""
        each = f"{self.within} devices each" if self.within > 1 else "one device each"
        return (
            f"{_named(self.paths)}: {self.matrices} matrices by {self.owners} owners, {each}: "
            f"{1e3 * self.seconds:.3g} ms instead of {1e3 * self.seconds_sharded:.3g}, at peak rates"
        )


@dataclasses.dataclass(frozen=True)
class MatrixUpdates:
    """How the matrices of an update are computed.

    Attributes:
        owned: By owners.
        left: Divided, or repeated, as the compiler does it: the paths, and why.
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
    """Describe what owners compute, for the plan and the report. `leaves` are those of the trained parameters."""
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
