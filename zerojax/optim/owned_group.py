"""Records of what owners compute: cores, which need a matrix whole, and groups of cores of one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Core:
    """The part of one leaf's update that needs it whole, by indices of equations and variables of a jaxpr.

    Attributes:
        leaf: The trained parameter.
        eqns: Its equations.
        arrays: Sharded arrays that it reads, each with its layout.
        small: Other arrays of the leaf that it reads.
        shared: Values that it reads and all leaves share.
        outs: Its results that are sharded, each with its layout.
        small_outs: Its other results.
    """

    leaf: int
    eqns: tuple[int, ...]
    arrays: tuple[tuple[int, Leaf], ...]
    small: tuple[int, ...]
    shared: tuple[int, ...]
    outs: tuple[tuple[int, Leaf], ...]
    small_outs: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return the variables that it reads."""
        return *(n for n, _ in self.arrays), *self.small, *self.shared

    @property
    def results(self) -> tuple[int, ...]:
        """Return the variables that it computes for others."""
        return *(n for n, _ in self.outs), *self.small_outs

    def renumbered(self, eqns: Mapping[int, int], variables: Mapping[int, int]) -> Core:
        """Return the same core in another jaxpr, with the new index of each equation and variable."""
        of = lambda indices: tuple(variables[n] for n in indices)
        laid_out = lambda pairs: tuple((variables[n], leaf) for n, leaf in pairs)
        parts = of(self.small), of(self.shared), laid_out(self.outs), of(self.small_outs)
        return Core(self.leaf, tuple(eqns[e] for e in self.eqns), laid_out(self.arrays), *parts)


@dataclasses.dataclass(frozen=True)
class OwnedGroup:
    """Cores of one program that are computed together.

    Attributes:
        cores: One per parameter.
        counts: How many items each core has: one, or the number of parts that a stack of matrices is divided into.
        size: Matrices per item where the parameters are stacks of matrices, mostly 1; 0: they are not stacks.
        jaxpr: The program of one item.
        within: Devices per owner.
        seconds: Estimated time of all of them by owners, at peak rates.
        seconds_sharded: The same if each is divided among all devices.
    """

    cores: tuple[Core, ...]
    counts: tuple[int, ...]
    size: int
    jaxpr: Any
    within: int = 1
    seconds: float = 0.0
    seconds_sharded: float = 0.0

    @property
    def items(self) -> int:
        """Return the number of items."""
        return sum(self.counts)

    @property
    def leaf(self) -> Leaf:
        """Return the layout of the first array that is moved."""
        return self.cores[0].arrays[0][1]

    @property
    def structure(self) -> tuple:
        """Return everything that two groups in equal equations can differ in."""
        return tuple(core.eqns for core in self.cores), self.counts, self.size, self.within

    def item(self, leaf: Leaf) -> Leaf:
        """Return the layout of one item of an array."""
        return item_of(leaf, self.size)

    def take(self, cores: Sequence[Core]) -> OwnedGroup:
        """Return the group with some of its cores alone."""
        counts = dict(zip((core.leaf for core in self.cores), self.counts, strict=True))
        return dataclasses.replace(self, cores=tuple(cores), counts=tuple(counts[core.leaf] for core in cores))


def item_of(leaf: Leaf, size: int) -> Leaf:
    """Return the layout of one item; see `OwnedGroup.size`."""
    shape = (size, *leaf.shape[1:]) if size else leaf.shape
    return dataclasses.replace(leaf, shape=shape)
