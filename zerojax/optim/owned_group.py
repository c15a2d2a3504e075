"""Describe the work of owners. A `Core` needs a full matrix. An `OwnedGroup` has cores with equal programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import jaxprs
from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Core:
    """The part of a leaf's update that needs the full leaf. All integers are indices.

    Attributes:
        leaf: The trained parameter.
        eqns: The equations of the core in the jaxpr of the update.
        arrays: The sharded arrays that the core reads, each with its layout.
        small: Other variables that the core reads and that depend on the leaf.
        shared: Variables that the core reads and that do not depend on the leaf, such as a count.
        outs: The sharded results of the core, each with its layout.
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
        return *(n for n, _ in self.arrays), *self.small, *self.shared

    @property
    def results(self) -> tuple[int, ...]:
        """Return the variables that the core computes and that are used outside of the core."""
        return *(n for n, _ in self.outs), *self.small_outs

    def renumbered(self, eqns: Mapping[int, int], variables: Mapping[int, int]) -> Core:
        """Return the same core for another jaxpr. The arguments map old indices to new indices."""
        of = lambda indices: tuple(variables[n] for n in indices)
        laid_out = lambda pairs: tuple((variables[n], leaf) for n, leaf in pairs)
        parts = of(self.small), of(self.shared), laid_out(self.outs), of(self.small_outs)
        return Core(self.leaf, tuple(eqns[e] for e in self.eqns), laid_out(self.arrays), *parts)


@dataclasses.dataclass(frozen=True)
class OwnedGroup:
    """Cores with equal programs, which are computed together.

    Attributes:
        cores: One core per parameter.
        counts: The number of items per core. A stack of matrices is divided into items; any other core is one item.
        size: The number of matrices per item, usually 1; 0 if the parameters are not stacks of matrices.
        jaxpr: The program that computes one item.
        within: The number of devices per owner.
        seconds: The estimated time, at peak rates, if owners compute the group.
        seconds_sharded: The estimated time, at peak rates, if each matrix is divided among all devices.
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
        return sum(self.counts)

    @property
    def leaf(self) -> Leaf:
        return self.cores[0].arrays[0][1]

    @property
    def structure(self) -> tuple:
        return tuple(core.eqns for core in self.cores), self.counts, self.size, self.within

    def take(self, cores: Sequence[Core]) -> OwnedGroup:
        """Return a copy of the group that has only `cores`, which are some of its cores."""
        counts = dict(zip((core.leaf for core in self.cores), self.counts, strict=True))
        return dataclasses.replace(self, cores=tuple(cores), counts=tuple(counts[core.leaf] for core in cores))


def item_of(leaf: Leaf, size: int) -> Leaf:
    """Return the layout of one item, which has `size` matrices of a stack, or the full leaf if `size` is 0."""
    shape = (size, *leaf.shape[1:]) if size else leaf.shape
    return dataclasses.replace(leaf, shape=shape)


def equations_after(jaxpr: Any, cores: Sequence[Core]) -> tuple[set[int], set[int]]:
    """Return the equations of `cores`, and all other equations that depend on results of `cores`."""
    inside = {e for core in cores for e in core.eqns}
    made, late = set(), set()
    for e, eqn in enumerate(jaxpr.eqns):
        if e in inside or made.intersection(jaxprs.variables_in(eqn.invars)):
            made.update(eqn.outvars)
            late.add(e)
    return inside, late - inside
