"""Find the reductions of parameters that can be computed on shards. The rule "reduction" asks `chain_of`.

A penalty such as `jnp.sum(w**2)` needs no gather. Each device reduces its shard, and one small collective combines the
results. The equations that compute the operand of the reduction are its chain. They read parameters, and values that
are alike on all devices: literals, arguments, results of earlier reductions. Each equation of the chain must be
computable on one device's part of its operands. A `Part` describes the part that each device holds.

`ReducedSegment` in `reduced` evaluates the chain and the reduction.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from zerojax import compat, jaxprs
from zerojax.gather.sharded_param import ShardedParam
from zerojax.primitives import TABLE, Kind, of_kind

# Reductions whose partial results devices can combine.
REDUCTIONS = frozenset(name for name, facts in TABLE.items() if facts.is_combinable)
_SMALL = 8  # A value of at most 1/8 of a parameter's elements is cheap to compute again.
_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose"})
# Primitives that can be computed on one device's part of their operands.
_BY_PART = of_kind(Kind.ELEMENTWISE) | _MOVES | REDUCTIONS


@dataclasses.dataclass(frozen=True)
class Part:
    """The part that each device holds of a value: a range of one dim.

    Attributes:
        shape: The logical shape of the value.
        dim: The divided dim. None if a reshape has merged all dims into one, which devices do not divide into ranges.
        extent: The length of the divided dim on one device, with padding.
        axes: The mesh axes that divide the dim.
        shards: The number of devices along `axes`.
        merged: The logical shape and the divided dim before this reshape. `()` if `dim` is not None.
    """

    shape: tuple[int, ...]
    dim: int | None
    extent: int
    axes: tuple[str, ...]
    shards: int
    merged: tuple = ()

    @classmethod
    def of(cls, param: ShardedParam) -> "Part":
        """Return the part of a parameter that each device stores."""
        leaf = param.leaf
        assert leaf.dim is not None
        return cls(tuple(leaf.shape), leaf.dim, leaf.local_shape[leaf.dim], leaf.axes, leaf.shards)

    @property
    def with_dim(self) -> "Part":
        """Return the part before a reshape merged its dims, or the part itself if no reshape did."""
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
    """Return the part of the result of `eqn` that a device can compute without communication, or None.

    `parts` has the part of each operand, and None for an operand that every device has in full. At least one operand
    is a part.
    """
    name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
    part = largest(parts)
    held = {part for part in parts if part is not None}
    if name not in _BY_PART or len({dataclasses.replace(p, shape=(0,) * len(p.shape)) for p in held}) > 1:
        return None
    if jaxprs.facts(eqn).elementwise:
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
    """Return the part with the most elements. The other parts may have dims of size 1 instead of its dims."""
    return max((part for part in parts if part is not None), key=lambda part: math.prod(part.shape))


def _merged(part: Part, shape: tuple[int, ...]) -> Part | None:
    """Return `part` after its dims are merged into one, or None for any other `shape`.

    If several parts of one equation are merged in the same way, their elements stay aligned.
    """
    if len(shape) != 1:
        return None
    return dataclasses.replace(part, shape=shape, dim=None, merged=part.merged or (part.shape, part.dim))


def _dim_after(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return the index of `dim` after a reshape that only adds or removes dims of size 1, and otherwise None."""
    old, new = ([d for d, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[d] for d in old] != [after[d] for d in new] or dim not in old:
        return None
    return new[old.index(dim)]


def is_combined(eqn: Any, parts: Sequence[Part | None]) -> bool:
    """Return whether `eqn` reduces the divided dim, and devices can combine the results of their parts."""
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
    """The inputs and equations that a segment needs to compute an equation on shards.

    `reads` and `params` are dicts with the value None, because a set has no fixed order.

    Attributes:
        again: Equations on values that are alike on all devices, by `id`. The segment computes them again.
        reads: Variables that are alike on all devices, and that the segment reads.
        params: The variables of the sharded parameters.
        is_link: Whether the equation belongs to the chain of reductions, whose segments repeat it.
    """

    again: dict = dataclasses.field(default_factory=dict)
    reads: dict = dataclasses.field(default_factory=dict)
    params: dict = dataclasses.field(default_factory=dict)
    is_link: bool = False


@dataclasses.dataclass
class Analysis:
    """Finds chains among the decisions so far.

    Attributes:
        params: See `Decisions`.
        repeated: See `Decisions`.
        alike: Variables that have the same value on all devices.
        made: The equation of each variable.
        uses: See `jaxprs.uses_of`.
        reduced: Variables that only reductions read, directly or after equations that can be computed on parts.
    """

    params: Mapping[Any, ShardedParam]
    repeated: Mapping
    alike: Set
    made: Mapping
    uses: Mapping
    reduced: set

    @classmethod
    def of(cls, jaxpr: Any, params: Mapping, repeated: Mapping, alike: Set) -> "Analysis":
        """Analyse a function. `Decisions` adds to `params`, `repeated` and `alike` later."""
        made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        uses, final = jaxprs.uses_of(jaxpr)
        return cls(params, repeated, alike, made, uses, _only_reduced(jaxpr, uses, final))

    def ends(self, eqn: Any) -> list:
        """Return `[eqn]` if `eqn` is a reduction, or else the reductions to whose chains `eqn` belongs."""
        found, pending = {}, [eqn]
        while pending:
            reader = pending.pop()
            if not self.reduced.issuperset(reader.outvars):
                found[id(reader)] = reader
            else:
                pending += [use for var in reader.outvars for use, _ in self.uses.get(var, ()) if id(use) not in found]
        return list(found.values())

    def chain(self, eqn: Any) -> tuple[Chain, list[Part | None]] | None:
        """Return the chain that computes the operands of `eqn`, and the part of each operand (None if it is alike).

        Return None instead of both if an operand cannot be computed on shards.
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
        """Return whether computing `eqn`, which reads only alike values, again costs less than keeping its result.

        A result of at most `small` elements counts as cheap.
        """
        reads = jaxprs.variables_in(eqn.invars)
        if any(v in self.params or v in self.repeated or v not in self.alike for v in reads):
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            return True
        by_element = jaxprs.facts(eqn).elementwise or eqn.primitive.name in _MOVES
        return by_element and len(eqn.outvars) == 1 and eqn.outvars[0].aval.size <= small


class NotOnShards:
    """The mark of a value that cannot be computed on shards, instead of its `Part`."""


def _only_reduced(jaxpr: Any, uses: Mapping, final: frozenset) -> set:
    """Return the variables that only reductions read, directly or after equations that can be computed on parts."""
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
    """Return the chain of `eqn` if devices can compute `eqn` on their shards, or None.

    `eqn` is a reduction, or belongs to the chain of reductions, because only they read its result (`Chain.is_link`).
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
