"""Find the values that a block's backward pass reads, and how much it costs to compute each of them again."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from zerojax import compat, costs, jaxprs
from zerojax.primitives import Kind

PREFIX = "zerojax_value_"
CALLED_BACK = "zerojax_called_back"  # the name of values that the user is shown, as by `jax.debug.print`
# A byte costs a millionth of a FLOP, so that bytes decide only between values that cost equally many FLOPs.
_FLOPS_PER_BYTE = 1e-6
# FLOPs of the Threefry rounds per 32-bit word of random bits.
_RANDOM_BITS = 100


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that can be saved, because `jax.checkpoint` knows it by a name."""

    name: str  # the name, given by `run_named`
    equation: int  # the index in `Graph.equations` of the equation that names the value
    bytes: int  # the size of the value
    is_form_of_argument: bool  # whether the value is an argument of the block in another shape or type


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of the forward pass, or of its derivative, on which the backward pass depends."""

    reads: tuple[int, ...]  # the indices of the equations whose results this equation reads
    cost: float  # the FLOPs to compute the equation again, plus a small part of the bytes that it writes
    flops: int  # the FLOPs to compute the equation again
    is_collective: bool  # whether other devices take part in the equation


@dataclasses.dataclass(frozen=True)
class Graph:
    """The values that a block's backward pass depends on."""

    equations: tuple[Equation, ...]  # in the order in which they are computed
    values: tuple[Value, ...]  # the values that can be saved
    residuals: tuple[int, ...]  # the indices of the equations whose results the backward pass reads
    bytes: int  # the size of all values that the backward pass reads, without the block's arguments
    # The size of the values that XLA keeps if nothing is recomputed on purpose. It keeps operands and results of
    # products, and computes elementwise functions of them again inside of the kernels that read them.
    kept: int
    largest: int  # the size of the largest value


def run_named(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    """Evaluate a jaxpr with calls inlined, and name each value, so that a `jax.checkpoint` policy can select values."""
    numbers = itertools.count()

    def name(x: Any, var: Any) -> Any:
        # Scalars cost almost no memory. JAX decides whether to keep them.
        number = next(numbers)
        return (
            checkpoint_name(x, f"{PREFIX}{number}") if x is not None and is_array_atom(var) and var.aval.size > 1 else x
        )

    def rule(eqn, values):
        if compat.called(eqn) is not None:
            return jaxprs.evaluate_call(eqn, values, rule)
        if jaxprs.facts(eqn).kind is Kind.DEBUG:
            # Under these names the operands count as saved, so that the backward pass does not call back again.
            values = [checkpoint_name(x, CALLED_BACK) for x in values]
        results = compat.evaluate_one(eqn, values)
        return [name(x, var) for x, var in zip(results, eqn.outvars, strict=True)]

    return jaxprs.evaluate(jaxpr, consts, args, rule)


def graph_of(jaxpr: Any, consts: Sequence, avals: Sequence) -> Graph:
    """Return the graph of a block, from the open jaxpr of its forward pass and the shapes of its arguments."""

    def residuals(*args):
        _, pull = jax.vjp(functools.partial(run_named, jaxpr, consts), *args)
        return jax.tree.leaves(pull)

    linear = compat.opened(jax.make_jaxpr(residuals)(*avals))
    inlined = functools.partial(jaxprs.inline_calls, *linear)
    return _graph(compat.opened(jax.make_jaxpr(inlined)(*avals))[0])


def _graph(jaxpr: Any) -> Graph:
    given = {*jaxpr.invars, *compat.constvars_of(jaxpr)}
    wanted = {var for var in jaxprs.variables_in(jaxpr.outvars) if var not in given}
    eqns, _ = jaxprs.needed_for(jaxpr.eqns, [*wanted])
    maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    read_by = [{maker[v] for v in jaxprs.variables_in(eqn.invars) if v in maker} for eqn in eqns]
    forms: set[int] = set()
    for i, eqn in enumerate(eqns):
        # Arguments of the block stay in memory, so no other form of them is saved.
        if _is_form(eqn) and read_by[i] <= forms:
            forms.add(i)
    return Graph(
        equations=tuple(map(_equation, eqns, read_by)),
        values=tuple(
            Value(
                name=compat.params_of(eqn)["name"],
                equation=i,
                bytes=bytes_written(eqn),
                is_form_of_argument=i in forms,
            )
            for i, eqn in enumerate(eqns)
            if compat.name_of(eqn) == "name" and compat.params_of(eqn)["name"].startswith(PREFIX)
        ),
        residuals=tuple(sorted({maker[var] for var in wanted})),
        bytes=sum(jaxprs.nbytes(var) for var in wanted if is_array_atom(var)),
        kept=_bytes_kept(eqns, {maker[var] for var in wanted}, read_by, _in_memory(jaxpr)),
        largest=max(map(bytes_written, eqns), default=0),
    )


def _in_memory(jaxpr: Any) -> set:
    """Return the variables that XLA writes to memory: operands and results of products, and results of reductions."""
    same, found = {}, set()
    for eqn in jaxpr.eqns:
        facts = jaxprs.facts(eqn)
        if facts.is_view and not compat.is_literal(eqn.invars[0]):
            same[eqn.outvars[0]] = same.get(eqn.invars[0], eqn.invars[0])
        elif not (facts.elementwise or facts.kind is Kind.JOIN or _is_form(eqn)):
            # XLA computes the operands of reductions inside of their kernels.
            operands = () if facts.kind is Kind.REDUCTION else jaxprs.variables_in(eqn.invars)
            found |= {same.get(var, var) for var in operands} | set(eqn.outvars)
    return found


def _bytes_kept(eqns: Sequence, wanted: set[int], read_by: Sequence[set[int]], in_memory: set) -> int:
    """Return the bytes of the equations' results from which XLA computes the wanted results."""
    total, seen, pending = 0, set[int](), [*wanted]
    while pending:
        i = pending.pop()
        if i in seen:
            continue
        seen.add(i)
        if not in_memory.isdisjoint(eqns[i].outvars):
            total += bytes_written(eqns[i])
        else:
            pending += read_by[i]
    return total


def _is_form(eqn: Any) -> bool:
    """Return whether an equation changes only a value's form."""
    facts = jaxprs.facts(eqn)
    return facts.is_view or facts.kind is Kind.LAYOUT or compat.name_of(eqn) in ("convert_element_type", "copy")


def _equation(eqn: Any, reads: set[int]) -> Equation:
    flops = flops_of(eqn)
    written = 0 if compat.name_of(eqn) == "name" else bytes_written(eqn)
    # Repeating a collective would use the links, not only this device's time.
    is_collective = any(jaxprs.facts(e).kind is Kind.COLLECTIVE for e in jaxprs.with_inner(eqn))
    return Equation(tuple(sorted(reads)), flops + _FLOPS_PER_BYTE * written, flops, is_collective)


def flops_of(eqn: Any) -> int:
    """Return the FLOPs of one equation, like XLA's cost analysis: two per multiply-add, otherwise one per element.

    A loop, a conditional or a call has the FLOPs of the equations inside it.
    """
    name, facts = compat.name_of(eqn), jaxprs.facts(eqn)
    if name == "dot_general":
        return costs.dot_flops(eqn)
    if name == "conv_general_dilated":
        features = eqn.params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval
        return 2 * _elements(eqn.outvars[0]) * kernel.size // max(kernel.shape[features], 1)
    if name == "cond":
        return max(_flops_inside(compat.opened(branch)[0]) for branch in eqn.params["branches"])
    if (loop := compat.loop_of(eqn)) is not None:
        return loop.length * _flops_inside(compat.opened(loop.body)[0])
    if inner := compat.inner_jaxprs(eqn):
        return sum(map(_flops_inside, inner))
    if costs.is_free(eqn):
        return 0
    if facts.draws:
        return _RANDOM_BITS * sum(map(_elements, eqn.outvars))
    if facts.kind in (Kind.REDUCTION, Kind.ALONG, Kind.WINDOW):
        return sum(_elements(atom) for atom in eqn.invars)
    return sum(map(_elements, eqn.outvars))


def bytes_written(eqn: Any) -> int:
    return sum(jaxprs.nbytes(var) for var in eqn.outvars if is_array_atom(var))


def is_array_atom(atom: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and hasattr(dtype, "itemsize") and hasattr(atom.aval, "size") and not compat.is_ref(atom)


def _flops_inside(jaxpr: Any) -> int:
    return sum(map(flops_of, jaxpr.eqns))


def _elements(atom: Any) -> int:
    return getattr(atom.aval, "size", 0)
