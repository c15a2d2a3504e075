"""Estimate the cost of a matrix's update if one dim of the matrix is sharded.

This file finds the index of the dim in every variable of the update, by the rules of `zerojax.dims`. The result says
which products are divided over the devices, and which products every device repeats. It also says whether the update
computes each slice of the dim separately.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, Context, Follower, at
from zerojax.dims.products import free_dims
from zerojax.primitives import Kind


class LostError(Exception):
    """The index of the dim is unknown, because an equation mixes the dim with other dims, or has no rule."""


@dataclasses.dataclass
class Work:
    """The cost of equations if one dim of their operands is sharded."""

    divided: float = 0.0  # FLOPs of products whose operands have the dim, of which each device computes a part
    repeated: float = 0.0  # FLOPs of all other products, which every device computes in full
    # bytes of results that are all-reduced because they are summed over the dim, and half of those that are gathered
    summed: float = 0.0
    sums: float = 0.0  # the number of all-reduces and gathers

    @property
    def flops(self) -> float:
        return self.divided + self.repeated

    def add(self, other: Work, times: float = 1) -> None:
        self.divided += times * other.divided
        self.repeated += times * other.repeated
        self.summed += times * other.summed
        self.sums += times * other.sums

    def sum(self, var: Any, share: float = 1) -> None:
        """Count a collective on `var` that sends `share` times the bytes of an all-reduce."""
        self.summed += share * jaxprs.nbytes(var)
        self.sums += 1


def follow(jaxpr: Any, dims: Sequence[int | None], *, may_sum: bool) -> tuple[list[int | None], Work]:
    """Return the index of one dim in each result of a jaxpr, given its index in each argument, and the cost.

    The index is None for a value without the dim. Raise a `LostError` if an index cannot be found, or if the dim is
    summed over and `may_sum` is false.
    """
    found, work, made = dict(zip(jaxpr.invars, dims, strict=True)), Work(), {}
    of = lambda atom: None if compat.is_literal(atom) else found.get(atom)
    for eqn in jaxpr.eqns:
        given = [of(atom) for atom in eqn.invars]
        found.update(zip(eqn.outvars, _through(eqn, given, may_sum, work, made), strict=True))
        made.update(dict.fromkeys(eqn.outvars, eqn))
    return [of(atom) for atom in jaxpr.outvars], work


def has_products(eqn: Any) -> bool:
    return any(jaxprs.facts(e).kind in (Kind.PRODUCT, Kind.DECOMPOSITION) for e in jaxprs.with_inner(eqn))


def _through(eqn: Any, dims: list[int | None], may_sum: bool, work: Work, made: dict) -> list[int | None]:
    name, body = eqn.primitive.name, compat.inlined_body(eqn)
    if body is not None:
        return _inner(body, dims, may_sum, work)
    if (loop := compat.loop_of(eqn)) is not None:
        return _through_loop(eqn, loop, dims, may_sum, work)
    if name == "cond":
        return _through_cond(eqn, dims, may_sum, work)
    if name == "dot_general":
        return [_through_dot(eqn, dims, may_sum, work)]
    if jaxprs.facts(eqn).kind is Kind.DECOMPOSITION:
        return _through_decomposition(eqn, dims, work)
    if all(d is None for d in dims):
        if has_products(eqn):  # such as a while loop, whose length is unknown: count one iteration
            for inner in compat.inner_jaxprs(eqn):
                _inner(inner, [None] * len(inner.invars), may_sum, work)
        return [None] * len(eqn.outvars)
    return _moved(eqn, dims, may_sum, work, made)


def _inner(jaxpr: Any, dims: Sequence[int | None], may_sum: bool, work: Work, times: float = 1) -> list[int | None]:
    outs, inside = follow(jaxpr, dims, may_sum=may_sum)
    work.add(inside, times)
    return outs


def _through_loop(
    eqn: Any, loop: compat.LoopEqn, dims: list[int | None], may_sum: bool, work: Work
) -> list[int | None]:
    """Return the index of the dim in each result of a loop. The loop must not move it in a carry, or scan over it."""
    sliced = loop.consts + loop.carry
    if 0 in dims[sliced:]:
        raise LostError(eqn)
    inside = dims[:sliced] + [None if d is None else d - 1 for d in dims[sliced:]]
    body = compat.opened(loop.body)[0]
    outs = _inner(body, inside, may_sum, work, loop.length)
    if outs[: loop.carry] != dims[loop.consts : sliced]:
        raise LostError(eqn)
    return outs[: loop.carry] + [None if d is None else d + 1 for d in outs[loop.carry :]]


def _through_cond(eqn: Any, dims: list[int | None], may_sum: bool, work: Work) -> list[int | None]:
    """Return the index of the dim in each result of a cond. Branches must agree. Add the costliest branch to `work`."""
    found = [follow(compat.opened(branch)[0], dims[1:], may_sum=may_sum) for branch in eqn.params["branches"]]
    if any(outs != found[0][0] for outs, _ in found):
        raise LostError(eqn)
    work.add(max((inside for _, inside in found), key=lambda inside: inside.flops))
    return found[0][0]


def _through_dot(eqn: Any, dims: list[int | None], may_sum: bool, work: Work) -> int | None:
    """Return the index of the dim in the result of a `dot_general`, or None if the dim is contracted."""
    contracted, batch = eqn.params["dimension_numbers"]
    flops = float(jaxprs.dot_flops(eqn))
    if dims == [None, None]:
        work.repeated += flops
        return None
    work.divided += flops
    pairs = [(pair, n, False) for n, pair in enumerate(zip(*batch, strict=True))]
    pairs += [(pair, n, True) for n, pair in enumerate(zip(*contracted, strict=True))]
    has = lambda pair: any(d is not None and d == int(of) for d, of in zip(dims, pair, strict=True))
    found = [one for one in pairs if has(one[0])]
    matched = len(found) == 1 and tuple(dims) == tuple(map(int, found[0][0]))
    if not may_sum and not (matched and not found[0][2]):
        raise LostError(eqn)
    if None not in dims and not matched:
        # The dim has another role in the second operand. Gathering this operand sends half the bytes of an all-reduce.
        work.sum(eqn.invars[1], 0.5)
        dims = [dims[0], None]
        found = [one for one in pairs if has(one[0])]
    for _, place, sums in found:
        if sums:
            work.sum(eqn.outvars[0])
        return None if sums else place
    free = free_dims(eqn)
    if dims[0] is not None:
        return len(batch[0]) + free[0].index(dims[0])
    assert dims[1] is not None
    return len(batch[0]) + len(free[0]) + free[1].index(dims[1])


def _through_decomposition(eqn: Any, dims: list[int | None], work: Work) -> list[int | None]:
    """Return the index of the dim in each result of a matrix decomposition. The dim must be a batch dim."""
    shape = eqn.invars[0].aval.shape
    *batch, m, n = shape if len(shape) > 1 else (1, *shape)
    if eqn.primitive.name == "triangular_solve":
        m, n = math.prod(eqn.invars[1].aval.shape[-2:]) // n, n
    flops = jaxprs.facts(eqn).decomposition_flops * math.prod(batch) * max(m, n) * min(m, n) ** 2
    given = {d for d in dims if d is not None}
    if not given:
        work.repeated += flops
        return [None] * len(eqn.outvars)
    if len(given) > 1 or max(given) >= len(batch) or None in dims:
        raise LostError(eqn)
    work.divided += flops
    return [max(given)] * len(eqn.outvars)


def _moved(eqn: Any, dims: list[int | None], may_sum: bool, work: Work, made: dict) -> list[int | None]:
    """Return the index of the dim in each result of an equation without products, by the rules of `zerojax.dims`."""
    sizes = {atom.aval.shape[d] for atom, d in zip(eqn.invars, dims, strict=True) if d is not None}
    if len(sizes) > 1:
        raise LostError(eqn)
    count = sizes.pop()
    states = [NOWHERE if d is None else at(d) for d in dims]
    found = []
    for var, state in zip(eqn.outvars, Follower(count).through(eqn, states, Context(count, made)), strict=True):
        place = None if state is None else state.only
        if (
            state is None
            or len(state.places) > 1
            or (place and (place.outer > 1 or var.aval.shape[place.dim] != count))
        ):
            raise LostError(eqn)
        if place is None and not may_sum:
            raise LostError(eqn)
        if place is None:
            work.sum(var)
        found.append(None if place is None else place.dim)
    return found
