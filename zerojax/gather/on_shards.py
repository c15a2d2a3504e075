"""Find the reductions of parameters that can be computed on shards. The rules "on shards" and "reduced" ask here.

A penalty such as `jnp.sum(w**2)` needs no gather: each device reduces its shard, and one small collective combines the
results. The operand of such a reduction is a chain of equations, which read parameters and values that are alike on all
devices (literals, arguments, results of earlier reductions). Each equation of the chain must work on one device's part
of its operands. A `Part` says which part a device holds.

`ReducedSegment`, in `reduced`, evaluates the chain, and calls the functions of this module again.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import ShardedParam

# Reductions whose partial results devices can combine.
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_SMALL = 8  # A value of at most 1/8 of a parameter's elements is cheap to compute again.
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
# Equations that work on one device's part of their operand.
_BY_PART = jaxprs.ELEMENTWISE | _MOVES | REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Part:
    """The part that each device holds of a value: a range of one dim.

    Attributes:
        shape: The logical shape of the value.
        dim: The divided dim. None if a reshape has merged this dim with others, after which only the set of elements is
            known.
        extent: The length of the divided dim on one device, with padding.
        axes: The mesh axes that divide the dim.
        shards: The number of devices along `axes`.
        merged: The logical shape and the divided dim before the reshape; `()` if `dim` is known.
    """

    shape: tuple[int, ...]
    dim: int | None
    extent: int
    axes: tuple[str, ...]
    shards: int
    merged: tuple = ()

    @classmethod
    def of(cls, param: ShardedParam) -> "Part":
        """Return the part of a parameter that a device stores."""
        leaf = param.leaf
        assert leaf.dim is not None
        return cls(tuple(leaf.shape), leaf.dim, leaf.local_shape[leaf.dim], leaf.axes, leaf.shards)

    @property
    def with_dim(self) -> "Part":
        """Return the part before a reshape merged the divided dim with others."""
        return dataclasses.replace(self, shape=self.merged[0], dim=self.merged[1], merged=()) if self.merged else self

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of one device's array."""
        if self.dim is None:
            return (math.prod(self.with_dim.local_shape),)
        return (*self.shape[: self.dim], self.extent, *self.shape[self.dim + 1 :])

    @property
    def is_padded(self) -> bool:
        """Return whether some devices hold padding."""
        whole = self.with_dim
        assert whole.dim is not None
        return whole.extent * whole.shards != whole.shape[whole.dim]


def part_of_result(eqn: Any, parts: Sequence[Part | None]) -> Part | None:
    """Return the part of an equation's result that a device can compute, or None if its parts do not suffice.

    `parts` has the part of each operand, and None for an operand that every device has in full. At least one is a part.
    """
    name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
    part = largest(parts)
    held = {part for part in parts if part is not None}
    if name not in _BY_PART or len({dataclasses.replace(p, shape=(0,) * len(p.shape)) for p in held}) > 1:
        return None
    if name in jaxprs.ELEMENTWISE:
        others = [a.aval.size for a, of in zip(eqn.invars, parts, strict=True) if of is None]
        return part if shape == part.shape and (part.dim is not None or all(size == 1 for size in others)) else None
    if name == "reshape" and (part.dim is None or shape == (math.prod(part.shape),) != part.shape):
        return _merged(part, shape)
    if part.dim is None:
        return None
    if name == "broadcast_in_dim":
        dim = eqn.params["broadcast_dimensions"][part.dim]
    elif name == "transpose":
        dim = eqn.params["permutation"].index(part.dim)
    elif name in REDUCTIONS:
        kept = [d for d in range(len(part.shape)) if d not in eqn.params["axes"]]
        dim = kept.index(part.dim) if part.dim in kept else None
    else:
        dim = _dim_after(part.shape, shape, part.dim)
    if dim is None or shape[dim] != part.shape[part.dim]:
        return None
    return dataclasses.replace(part, shape=shape, dim=dim)


def largest(parts: Sequence[Part | None]) -> Part:
    """Return the part with the most elements. Other operands of its equation may have dims of size 1 instead."""
    return max((part for part in parts if part is not None), key=lambda part: math.prod(part.shape))


def _merged(part: Part, shape: tuple[int, ...]) -> Part | None:
    """Return a part whose dims are merged into one, which is the only shape that keeps the elements aligned."""
    if len(shape) != 1:
        return None
    return dataclasses.replace(part, shape=shape, dim=None, merged=part.merged or (part.shape, part.dim))


def _dim_after(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return where a reshape moves a dim, if it only adds and removes dims of size 1, and otherwise None."""
    old, new = ([d for d, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[d] for d in old] != [after[d] for d in new] or dim not in old:
        return None
    return new[old.index(dim)]


def is_combined(eqn: Any, parts: Sequence[Part | None]) -> bool:
    """Return whether devices can reduce their parts of the operands and combine the results."""
    held = {part for part in parts if part is not None}
    if len(held) != 1:
        return False
    (part,) = held
    if eqn.primitive.name in REDUCTIONS:
        if eqn.primitive.name != "reduce_sum" and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            return False
        return len(eqn.params["axes"]) == 1 if part.dim is None else part.dim in eqn.params["axes"]
    if eqn.primitive.name != "dot_general":
        return False
    # An inner product: all dims of both operands are contracted, in the same order.
    (lhs, rhs), _ = eqn.params["dimension_numbers"]
    same = [tuple(atom.aval.shape) == part.shape for atom in eqn.invars]
    is_whole = all(same) and not eqn.outvars[0].aval.shape and list(lhs) == list(rhs)
    return is_whole and (part.dim is not None or None not in parts)


@dataclasses.dataclass
class Chain:
    """The equations that compute the operand of a reduction on shards.

    Attributes:
        again: Equations on values that are alike on all devices, which the segment computes again.
        reads: Variables that are alike on all devices, and that the segment reads.
        params: The sharded parameters.
        is_link: Whether only reductions read the result, so that it is computed in their segment.
    """

    again: dict = dataclasses.field(default_factory=dict)
    reads: dict = dataclasses.field(default_factory=dict)
    params: dict = dataclasses.field(default_factory=dict)
    is_link: bool = False


@dataclasses.dataclass
class Analysis:
    """The variables that are alike on all devices or reduced on shards, among the decisions so far.

    Attributes:
        params: See `Decisions`.
        repeated: See `Decisions`.
        alike: Variables that have the same value on all devices.
        made: The equation of each variable.
        uses: See `jaxprs.uses_of`.
        reduced: The variables that only reductions read, after equations that work on parts.
    """

    params: Mapping[Any, ShardedParam]
    repeated: Mapping
    alike: Set
    made: Mapping
    uses: Mapping
    reduced: set

    @classmethod
    def of(cls, jaxpr: Any, params: Mapping, repeated: Mapping, alike: Set) -> "Analysis":
        """Analyse a function. The mappings and the set change while decisions are made."""
        made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        uses, final = jaxprs.uses_of(jaxpr)
        return cls(params, repeated, alike, made, uses, _only_reduced(jaxpr, uses, final))

    def ends(self, eqn: Any) -> list:
        """Return the reductions in which the result of an equation ends: the equation, or the readers of its result."""
        found, pending = {}, [eqn]
        while pending:
            reader = pending.pop()
            if not self.reduced.issuperset(reader.outvars):
                found[id(reader)] = reader
            else:
                pending += [use for var in reader.outvars for use, _ in self.uses.get(var, ()) if id(use) not in found]
        return list(found.values())

    def chain(self, eqn: Any) -> tuple[Chain, list[Part | None]] | None:
        """Return the chain that computes the operands of `eqn`, and a device's part of each operand.

        Return None if an operand cannot be computed on shards.
        """
        chain, known = Chain(), {}
        small = max(atom.aval.size for atom in eqn.invars) // _SMALL
        parts = [self._part(atom, chain, known, small) for atom in eqn.invars]
        return None if any(part is NotOnShards for part in parts) else (chain, parts)

    def _part(self, atom: Any, chain: Chain, known: dict, small: int) -> Any:
        if compat.is_literal(atom):
            return None
        if atom not in known:
            known[atom] = self._part_of(atom, chain, known, small)
        return known[atom]

    def _part_of(self, var: Any, chain: Chain, known: dict, small: int) -> Any:
        if var in self.params:
            chain.params[var] = None
            return NotOnShards if any(self.params[var].leaf.others) else Part.of(self.params[var])
        if var in self.repeated:
            eqn = self.repeated[var]
            parts = [self._part(atom, chain, known, small) for atom in eqn.invars]
            if any(part is NotOnShards for part in parts):
                return NotOnShards
            if any(part is not None for part in parts):
                return part_of_result(eqn, parts) or NotOnShards
            return NotOnShards
        if var not in self.alike:
            return NotOnShards
        eqn = self.made.get(var)
        # A broadcast would be as large as the parameter, and small values are cheap.
        if eqn is not None and self._is_cheap(eqn, small):
            chain.again[id(eqn)] = eqn
            for atom in eqn.invars:
                self._part(atom, chain, known, small)
        else:
            chain.reads[var] = None
        return None

    def _is_cheap(self, eqn: Any, small: int) -> bool:
        """Return whether an equation on values that are alike on all devices costs less than keeping its result."""
        reads = jaxprs.variables_in(eqn.invars)
        if any(v in self.params or v in self.repeated or v not in self.alike for v in reads):
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            return True
        by_element = eqn.primitive.name in jaxprs.ELEMENTWISE | _MOVES
        return by_element and len(eqn.outvars) == 1 and eqn.outvars[0].aval.size <= small


class NotOnShards:
    """Stands for the part of a value that cannot be computed on shards."""


def _only_reduced(jaxpr: Any, uses: Mapping, final: frozenset) -> set:
    """Return the variables that only reductions read, directly or after equations that work on parts."""
    found: set = set()
    for eqn in reversed(jaxpr.eqns):
        for var in eqn.outvars:
            readers = uses.get(var, ())
            if var not in final and readers and all(_reduces(reader, found) for reader, _ in readers):
                found.add(var)
    return found


def _reduces(eqn: Any, found: set) -> bool:
    name = eqn.primitive.name
    if name in REDUCTIONS or (name == "dot_general" and not eqn.outvars[0].aval.shape):
        return True
    return name in _BY_PART and found.issuperset(eqn.outvars)


def chain_of(analysis: Analysis, eqn: Any) -> Chain | None:
    """Return the chain of an equation that devices can compute on their shards, or None.

    The equation is a reduction, or only reductions read its result (`Chain.is_link`).
    """
    name = eqn.primitive.name
    is_link = name in _BY_PART and analysis.reduced.issuperset(eqn.outvars)
    if eqn.effects or not (is_link or name in REDUCTIONS or name == "dot_general"):
        return None
    if (found := analysis.chain(eqn)) is None:
        return None
    chain, parts = found
    part = next((part for part in parts if part is not None), None)
    if part is None:
        return None
    if is_combined(eqn, parts):
        return chain
    # Every device gets the whole result of a reduction, so it must be small.
    is_small = eqn.outvars[0].aval.size * part.shards <= max(atom.aval.size for atom in eqn.invars)
    if part_of_result(eqn, parts) is None or not (is_link or (name in REDUCTIONS and is_small)):
        return None
    return dataclasses.replace(chain, is_link=is_link)
