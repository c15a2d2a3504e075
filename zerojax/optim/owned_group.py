"""Records of the work of owners: cores, which need a matrix whole, and groups of cores of one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import jaxprs
from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Core:
    """The part of a leaf's update that needs the leaf whole. Equations and variables of a jaxpr are given by index.

    Attributes:
        leaf: The trained parameter.
        eqns: The equations of the core.
        arrays: Sharded arrays that the core reads, each with its layout.
        small: Other values of the leaf that the core reads.
        shared: Values that the core reads and that all leaves share.
        outs: Sharded results of the core, each with its layout.
        small_outs: All other results of the core.
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
        """Return the variables that the core reads."""
        return *(n for n, _ in self.arrays), *self.small, *self.shared

    @property
    def results(self) -> tuple[int, ...]:
        """Return the variables that the core computes for other equations."""
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
        cores: One core per parameter.
        counts: The number of items of each core: 1, or the number of items that a stack of matrices is divided into.
        size: Matrices per item if the parameters are stacks of matrices, mostly 1; 0 if they are not stacks.
        jaxpr: The program of one item.
        within: Devices per owner.
        seconds: Estimated time if owners compute the group, at peak rates.
        seconds_sharded: Estimated time if each matrix is divided among all devices.
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
        """Return the layout of the first array that is sent to owners."""
        return self.cores[0].arrays[0][1]

    @property
    def structure(self) -> tuple:
        """Return everything in which two groups of equal equations can differ."""
        return tuple(core.eqns for core in self.cores), self.counts, self.size, self.within

    def take(self, cores: Sequence[Core]) -> OwnedGroup:
        """Return the group with only some of its cores."""
        counts = dict(zip((core.leaf for core in self.cores), self.counts, strict=True))
        return dataclasses.replace(self, cores=tuple(cores), counts=tuple(counts[core.leaf] for core in cores))


def item_of(leaf: Leaf, size: int) -> Leaf:
    """Return the layout of one item; see `OwnedGroup.size`."""
    shape = (size, *leaf.shape[1:]) if size else leaf.shape
    return dataclasses.replace(leaf, shape=shape)


def equations_after(jaxpr: Any, cores: Sequence[Core]) -> tuple[set[int], set[int]]:
    """Return the equations of some cores, and all other equations that depend on the cores' results."""
    inside = {e for core in cores for e in core.eqns}
    made, late = set(), set()
    for e, eqn in enumerate(jaxpr.eqns):
        if e in inside or made.intersection(jaxprs.variables_in(eqn.invars)):
            made.update(eqn.outvars)
            late.add(e)
    return inside, late - inside
