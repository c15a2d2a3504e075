"""Describe the work of owners. A `Core` needs a full matrix. An `OwnedGroup` has cores with equal programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import jaxprs
from zerojax.layout.leaf import Leaf


@dataclasses.dataclass(frozen=True)
class Core:
    """The part of a leaf's update that needs the full leaf. All integers are indices."""

    leaf: int  # the trained parameter
    eqns: tuple[int, ...]  # the equations of the core in the jaxpr of the update
    arrays: tuple[tuple[int, Leaf], ...]  # the sharded arrays that the core reads, each with its layout
    small: tuple[int, ...]  # other variables that the core reads and that depend on the leaf
    shared: tuple[int, ...]  # variables that the core reads and that do not depend on the leaf, such as a count
    outs: tuple[tuple[int, Leaf], ...]  # the sharded results of the core, each with its layout
    small_outs: tuple[int, ...]  # all other results of the core

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
    """Cores with equal programs, which are computed together."""

    cores: tuple[Core, ...]  # one core per parameter
    # the number of items per core; a stack of matrices is divided into items; any other core is one item
    counts: tuple[int, ...]
    size: int  # the number of matrices per item, usually 1; 0 if the parameters are not stacks of matrices
    jaxpr: Any  # the program that computes one item
    within: int = 1  # the number of devices per owner
    seconds: float = 0.0  # the estimated time, at peak rates, if owners compute the group
    seconds_sharded: float = 0.0  # the estimated time, at peak rates, if each matrix is divided among all devices

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
