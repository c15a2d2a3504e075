"""Gradients in global view, before they are summed over the devices.

The compiler divides the rows of the batch, so the gradient of a parameter is a product whose
contracted dim is divided, and the compiler would all-reduce it where the product is made. Here
that product is made in a small `shard_map`: each device's own sum is a row of a global array
`(workers, *shape)`, divided on dim 0. So *computed* and *reduced* are two moments, as in device
view, and the reduction is explicit. What follows in the backward pass up to the gradient is linear,
and is applied row by row.

Any sum may be divided, whatever the model does, so this is exact. Which dim is divided decides only what moves:
it has to be the one that holds the rows of the batch, which `zerojax.dims` follows through the program. A sum over
other dims, or over dims that are not known, is left to the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from zerojax import compat, jaxprs
from zerojax.dims import NOWHERE, UNKNOWN, Follower, Place, Places, State

# Names, in a compiled program, a sum for a gradient of which it is not known whether it is one over rows.
ROWS_UNKNOWN = "zerojax_rows_unknown"
_SUMS = frozenset("dot_general conv_general_dilated reduce_sum scatter-add".split())
# Linear in the one operand that is a partial sum, if no other operand is one.
_LINEAR = frozenset(
    "broadcast_in_dim convert_element_type copy div dot_general dynamic_slice mul neg reduce_precision reduce_sum "
    "reshape rev sharding_constraint slice split squeeze transpose".split()
)
# Linear in some operands together: which of them. What slices a parameter, or joins several, has these as transposes.
_JOINTLY = MappingProxyType(
    {
        "add": slice(2),
        "add_any": slice(2),
        "concatenate": slice(None),
        "dynamic_update_slice": slice(2),
        "pad": slice(2),
        "scatter-add": slice(0, 3, 2),
        "select_n": slice(1, None),
        "sub": slice(2),
    }
)


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """A value as one partial sum per worker.

    Attributes:
        rows: `(workers, *shape)`, divided on dim 0.
    """

    rows: jax.Array

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Return shape and type of the sum."""
        return jax.ShapeDtypeStruct(self.rows.shape[1:], self.rows.dtype)


@dataclasses.dataclass(frozen=True)
class Divided:
    """An equation that sums over rows, which are divided over the workers.

    Attributes:
        places: For each operand, where it holds the rows; None for one that every worker has in full.
    """

    places: tuple[Place | None, ...]

    def specs(self, entry: Any) -> tuple[PartitionSpec, ...]:
        """Return the `PartitionSpec`s of the operands after `opened`; `entry` names the axes of the workers."""
        dim_of = lambda place: place.dim + place.is_split
        return tuple(PartitionSpec() if p is None else PartitionSpec(*[None] * dim_of(p), entry) for p in self.places)

    def opened(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Give the rows a dim of their own where they are not the first factor of one."""
        return [_split(x, p) if p is not None and p.is_split else x for x, p in zip(values, self.places, strict=True)]

    def closed(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Undo `opened`. Also accepts one worker's part."""
        return [_merged(x, p) if p is not None and p.is_split else x for x, p in zip(values, self.places, strict=True)]


def _split(x: jax.Array, place: Place) -> jax.Array:
    return x.reshape(*x.shape[: place.dim], place.outer, -1, *x.shape[place.dim + 1 :])


def _merged(x: jax.Array, place: Place) -> jax.Array:
    return x.reshape(*x.shape[: place.dim], -1, *x.shape[place.dim + 2 :])


def evaluate(
    backward: Any,
    args: Sequence,
    *,
    grads: Sequence[int],
    rows: Sequence[State],
    workers: int,
    island: Callable,
    alike: Callable[[jax.Array], jax.Array] | None = None,
    rule: jaxprs.Rule | None = None,
) -> list:
    """Evaluate a backward pass; the gradients that can be are left as rows of `PartialSum`s.

    Args:
        backward: The backward pass, as a closed jaxpr.
        args: Its arguments; what it only adds to gradients may be `PartialSum`s.
        grads: Which of its results are gradients of parameters.
        rows: For each of its arguments, where it holds the rows of the batch.
        workers: Data-parallel workers.
        island: `island(eqn, divided, values)` makes the rows of one equation's result.
        alike: If given, pins a gradient that is computed from parameters alone.
        rule: If given, evaluates any other equation, as for `jaxprs.evaluate`.

    Returns:
        The results; a gradient that is rows has a dim more.
    """
    jaxpr, consts = compat.opened(backward)
    shapes = [x.shape if isinstance(x, PartialSum) else x for x in args]
    closed = jax.make_jaxpr(lambda consts, args: _inlined(jaxpr, consts, *args))(list(consts), shapes)
    flat, more = compat.opened(closed)
    only_grads = _only_of(flat, grads)
    zeros: set = set()
    again = functools.partial(evaluate, workers=workers, island=island)
    follower = Follower(workers)
    found = follower.states(flat, [*[NOWHERE] * len(consts), *rows])
    states_of = lambda eqn: [NOWHERE if compat.is_literal(atom) else found[atom] for atom in eqn.invars]

    def partial_rule(eqn, values):
        out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if eqn.primitive.name == "broadcast_in_dim" and compat.is_literal(eqn.invars[0]) and not values[0]:
            zeros.add(out)
        if any(isinstance(x, PartialSum) for x in values):
            return _linear(eqn, values, workers)
        loop = compat.loop_of(eqn)
        if loop is not None and not only_grads.isdisjoint(eqn.outvars):
            wanted = [i for i, var in enumerate(eqn.outvars) if var in only_grads]
            inside = functools.partial(again, rows=follower.into_loop(loop, states_of(eqn)))
            return _loop(eqn, loop, values, wanted, inside, workers)
        if out in only_grads and (divided := _divided(eqn, states_of(eqn), found[out], zeros)) is not None:
            return [PartialSum(island(eqn, divided, values))]
        if out in only_grads and eqn.primitive.name in _SUMS and UNKNOWN in states_of(eqn):
            with jax.named_scope(ROWS_UNKNOWN):
                return compat.evaluate_one(eqn, values)
        return None if rule is None else rule(eqn, values)

    results = jaxprs.evaluate(flat, more, [*consts, *args], partial_rule)
    for i in grads:
        if alike is None:  # within a loop: what it returns is pinned behind it
            break
        state = NOWHERE if compat.is_literal(flat.outvars[i]) else found[flat.outvars[i]]
        if not isinstance(results[i], PartialSum) and state is not None and not state.places:
            results[i] = alike(results[i])
    return [x.rows if isinstance(x, PartialSum) else x for x in results]


def _inlined(jaxpr: Any, consts: Sequence, *args: Any) -> list:
    """Evaluate a jaxpr with calls and remats inlined, behind the barrier that keeps a remat from being undone."""

    def rule(eqn, values):
        body = compat.called(eqn)
        if body is not None:
            return _inlined(*compat.opened(body), *values)
        if compat.is_remat(eqn):
            kept = lax.optimization_barrier(tuple(values)) if eqn.params["prevent_cse"] else values
            return _inlined(*compat.opened(eqn.params["jaxpr"]), *kept)
        return None

    return jaxprs.evaluate(jaxpr, consts, args, rule)


def _loop(eqn, loop: compat.LoopEqn, values: Sequence, grads: Sequence[int], evaluate: Callable, workers: int) -> list:
    """Evaluate a loop whose results `grads` depend on gradients alone.

    Those that it adds up or stacks stay partial sums.
    """
    summed = _added_up(loop, grads)
    rows = [*summed, *(i for i in grads if i >= loop.carry)]
    consts, rest = values[: loop.consts], values[loop.consts :]
    carry, slices = list(rest[: loop.carry]), rest[loop.carry :]
    for i in summed:
        carry[i] = as_rows(carry[i], workers)

    def body(carry, slices):
        given = [PartialSum(x) if i in summed else x for i, x in enumerate(carry)]
        results = evaluate(loop.body, [*consts, *given, *slices], grads=rows)
        return results[: loop.carry], results[loop.carry :]

    carry, stacks = lax.scan(body, carry, slices, length=loop.length, reverse=loop.reverse, unroll=loop.unroll)
    results = [*carry, *stacks]
    for i in rows:
        if results[i].ndim > len(eqn.outvars[i].aval.shape):
            results[i] = PartialSum(results[i] if i < loop.carry else jnp.moveaxis(results[i], 1, 0))
    return results


def _added_up(loop: compat.LoopEqn, grads: Sequence[int]) -> list[int]:
    """Return the gradients among a loop's carries that the loop only adds to."""
    jaxpr, _ = compat.opened(loop.body)
    carries, stacked = [i for i in grads if i < loop.carry], [i for i in grads if i >= loop.carry]
    while carries:
        found = _only_of(jaxpr, [*carries, *stacked])
        kept = [i for i in carries if jaxpr.invars[loop.consts + i] in found and jaxpr.outvars[i] in found]
        if kept == carries:
            break
        carries = kept
    return carries


def _only_of(jaxpr: Any, grads: Sequence[int]) -> set:
    """Return the variables from which only the results `grads` are computed, linearly."""
    uses, _ = jaxprs.uses_of(jaxpr)
    wanted = set(jaxprs.variables_in(jaxpr.outvars[i] for i in grads))
    refused = set(jaxprs.variables_in(atom for i, atom in enumerate(jaxpr.outvars) if i not in grads))
    found: set = set()
    is_found = lambda var: var in found or compat.is_dropped(var)
    for var in (*(var for eqn in reversed(jaxpr.eqns) for var in eqn.outvars), *jaxpr.invars):
        if var in refused or not (var in wanted or var in uses):
            continue
        if all(_is_linear(use) and all(map(is_found, use.outvars)) for use, _ in uses.get(var, ())):
            found.add(var)
    return found


def _is_linear(eqn) -> bool:
    """Return whether an equation is linear in sums. A cast to float8 is not: each partial sum would be rounded."""
    if eqn.primitive.name == "convert_element_type":
        dtype = np.dtype(eqn.params["new_dtype"])
        return not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 2)
    return eqn.primitive.name in _LINEAR or eqn.primitive.name in _JOINTLY


def _linear(eqn, values: Sequence, workers: int) -> list:
    """Evaluate one equation on values of which some are partial sums."""
    rows = [x.rows if isinstance(x, PartialSum) else x for x in values]
    partial = [isinstance(x, PartialSum) for x in values]

    def of_rows(batched):
        one_row = lambda *xs: compat.evaluate_one(eqn, xs)
        results = jax.vmap(one_row, in_axes=[0 if on else None for on in batched])(*rows)
        return [None if x is None else PartialSum(x) for x in results]

    joint = range(len(rows))[_JOINTLY.get(eqn.primitive.name, slice(0))]
    if joint and not any(on and i not in joint for i, on in enumerate(partial)):
        zero = [compat.is_literal(atom) and not np.any(atom.val) for atom in eqn.invars]  # in each row
        batched = [i in joint and not zero[i] for i in range(len(rows))]
        rows = [as_rows(x, workers) if batched[i] and not partial[i] else x for i, x in enumerate(rows)]
        return of_rows(batched)
    if (
        eqn.primitive.name in _LINEAR
        and _is_linear(eqn)
        and sum(partial) == 1
        and (eqn.primitive.name != "div" or partial[0])
    ):
        return of_rows(partial)
    return compat.evaluate_one(eqn, [x.sum(0) if on else x for x, on in zip(rows, partial, strict=True)])


def as_rows(value: jax.Array, workers: int) -> jax.Array:
    """Return a value that is summed already as partial sums, all of it on the first worker."""
    first = lax.broadcasted_iota(jnp.int32, (workers, *value.shape), 0) == 0
    return jnp.where(first, value[None], 0)


def _divided(eqn, states: Sequence[State], result: State, zeros: set) -> Divided | None:
    """Return how an equation's sum over rows is divided over the workers, or None if it has no such sum.

    The result must have no rows left: a product of rows with rows, batched, is summed by a later equation.
    """
    known = [state for state in states if state is not None]
    if len(known) < len(states) or result is None or result.places:
        return None
    name = eqn.primitive.name
    if name == "dot_general":
        return _paired(known, zip(*eqn.params["dimension_numbers"][0], strict=True))
    if name == "conv_general_dilated" and eqn.params["feature_group_count"] == 1:
        numbers = eqn.params["dimension_numbers"]  # the gradient of a kernel: the sum over features is one over rows
        return _paired(known, [(numbers.lhs_spec[1], numbers.rhs_spec[1])])
    if name == "reduce_sum":
        place = known[0].only
        return Divided((place,)) if place is not None and place.dim in eqn.params["axes"] else None
    if name == "scatter-add" and eqn.invars[0] in zeros:
        return _scattered(eqn, known)
    return None


def _paired(states: Sequence[Places], pairs: Iterable) -> Divided | None:
    """Find the pair of summed dims that holds the rows. An operand without rows is the same for all of them."""
    lhs, rhs = states
    for i, j in pairs:
        if (place := lhs.along(int(i)) or rhs.along(int(j))) is not None:
            return Divided((place.to(int(i)), place.to(int(j))))
    return None


def _scattered(eqn, states: Sequence[Places]) -> Divided | None:
    """Return the rows of the updates that are added into zeros, and of their indices."""
    _, indices, updates = states
    numbers = eqn.params["dimension_numbers"]
    place = next(iter({*indices.places} or {*updates.places}), None)
    if place is None or place.is_split or getattr(numbers, "operand_batching_dims", ()):
        return None
    scattered = [d for d in range(len(eqn.invars[2].aval.shape)) if d not in numbers.update_window_dims]
    if indices.places:
        if place.dim >= len(scattered):
            return None
        return Divided((None, place, place.to(scattered[place.dim])))
    if place.dim not in scattered:
        return None
    return Divided((None, place.to(scattered.index(place.dim)), place))
