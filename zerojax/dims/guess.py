"""Guess where the followed dim is in a value, if the rules prove nothing.

A kernel, a callback or a call of foreign code has no rule, and a rule can give up, as on a sort of all rows. Shapes
are then still evidence: if an operand's dim that holds rows has the same size in the result, this dim of the result
most likely holds the rows. Only code for which a wrong dim costs time and not correctness may guess; see `Follower`.

`RULES` is another part of the table of rules. It is for equations that no other rule can look into, but whose
parameters say how operands and results are divided. These rules prove nothing: the group sizes of a `ragged_dot` depend
on the order of the rows, and a user's sharding rule or declaration may be wrong.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.config.data_mesh import entry_axes
from zerojax.dims.kernels import own_rows
from zerojax.dims.moves import product, without_rule
from zerojax.dims.place import LARGE, NOWHERE, UNKNOWN, Context, Place, Places, RowDims, fits, on_dim, one_per_dim
from zerojax.primitives import ROWS, Facts, Kind


def guessed(eqn: Any, row_dims: Sequence[RowDims], found: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Replace the unknown row dims of an equation's results by guesses, where shapes and shardings allow a guess.

    `found` has the row dims of the results, and `row_dims` those of the operands.
    """
    return [
        _guess(eqn, row_dims, var, context) if rows is UNKNOWN else rows
        for var, rows in zip(eqn.outvars, found, strict=True)
    ]


def divided_by(spec: Any, axes: frozenset[str]) -> list[int]:
    return [dim for dim, entry in enumerate(spec) if not axes.isdisjoint(entry_axes(entry))]


def _constrained(eqn: Any, context: Context) -> RowDims:
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    dims = divided_by(getattr(sharding, "spec", ()), context.axes)
    return on_dim(dims[0]) if dims and fits(Place(dims[0]), eqn.outvars[0].aval.shape, context.count) else UNKNOWN


def _guess(eqn: Any, row_dims: Sequence[RowDims], var: Any, context: Context) -> RowDims:
    shape = getattr(var.aval, "shape", ())
    if not shape:
        return NOWHERE
    if (rows := _constrained(eqn, context)) is not UNKNOWN:
        return rows
    if eqn.primitive.name == "dot_general" and UNKNOWN not in row_dims:
        # The operands have the rows on different dims, for example if a cotangent was joined from halves of the rows.
        return product(eqn, row_dims, lambda *_: True)
    for candidates in (_of_equal_size, _of_other_size):
        for atom, rows in zip(eqn.invars, row_dims, strict=True):
            places = () if rows is None else sorted(rows.places)
            found = [p for place in places for p in candidates(place, atom.aval.shape, shape)]
            if found and fits(found[0], shape, context.count):
                return Places(frozenset(found[:1]))
    return UNKNOWN


def _of_equal_size(place: Place, old: Sequence[int], new: Sequence[int]) -> Iterator[Place]:
    """Yield `place` if its dim has the same size in the result, or else the only dim of this size in the result."""
    size = old[place.dim]
    if place.dim < len(new) and new[place.dim] == size:
        yield place
    elif list(new).count(size) == 1:
        yield place.to(list(new).index(size))


def _of_other_size(place: Place, old: Sequence[int], new: Sequence[int]) -> Iterator[Place]:
    """Yield the dim of `place` if the result's shape looks as if it was split, merged with the next dims, or sliced.

    A kernel may merge the rows with heads, for example. Other shapes are no evidence: dims of parameters are often
    multiples of the number of rows, too.
    """
    dim = place.dim
    if dim >= len(new) or not old[dim] or not new[dim]:
        return
    merged, split = ({*itertools.accumulate(shape[dim:], operator.mul)} for shape in (old, new))
    sliced = len(old) == len(new) and [*old[:dim], *old[dim + 1 :]] == [*new[:dim], *new[dim + 1 :]]
    if new[dim] in merged or old[dim] in split or (sliced and 0 in (old[dim] % new[dim], new[dim] % old[dim])):
        yield Place(dim)


def drawn(jaxpr: Any, given: Sequence[RowDims], found: Mapping[Any, RowDims]) -> frozenset:
    """Return arrays of random numbers whose dim 0 most likely holds rows, because it is as long as a dim with rows.

    An example is the noise from which a generator or a chain of Langevin steps starts. Noise is left out if values with
    rows meet it before any matrix product reads it, because these values already show where its rows are. `given`
    has the row dims of the arguments, and `found` those of all variables.
    """
    sizes = {
        var.aval.shape[place.dim]
        for var, rows in zip(jaxpr.invars, given, strict=True)
        for place in (() if rows is None else rows.places)
        if place.outer == 1
    }
    is_bare = lambda var: (rows := found[var]) is not None and not rows.places
    noise, derived, is_read = set(), set(), False
    for eqn in jaxpr.eqns if sizes else ():
        outs = [var for var in eqn.outvars if is_bare(var) and getattr(var.aval, "shape", ())]
        if not derived.isdisjoint(jaxprs.variables_in(eqn.invars)):
            derived.update(outs)
            is_read |= bool(outs) and _contains(eqn, lambda facts: facts.kind is Kind.PRODUCT)
        elif any(var.aval.shape[0] in sizes for var in outs) and _contains(eqn, lambda facts: facts.draws):
            noise.update(var for var in outs if var.aval.shape[0] in sizes)
            derived.update(noise)
    return frozenset(noise) if is_read else frozenset()


def _contains(eqn: Any, wanted: Callable[[Facts], bool]) -> bool:
    return any(wanted(jaxprs.facts(one)) for one in jaxprs.with_inner(eqn))


def is_undivided(eqn: Any, row_dims: Sequence[RowDims], workers: int) -> bool:
    """Return whether a large operand holds rows, and every worker runs `eqn` on all rows. The engine warns of this."""
    sizes = (
        atom.aval.size for atom, rows in zip(eqn.invars, row_dims, strict=True) if rows is not None and rows.places
    )
    is_large = jaxprs.facts(eqn).is_opaque and any(size >= LARGE for size in sizes)
    return is_large and own_rows(eqn, row_dims, workers) is None


def body_of(eqn: Any) -> Any:
    """Return an open jaxpr that computes the same as `eqn`, and in which rows can be followed, or None.

    Examples are functions with a rule for `jax.vmap`, and the forward pass of a `custom_vjp(optimize_remat=True)`. The
    jaxpr is for this analysis only. It must not be evaluated on fewer rows, because it holds for the shapes of `eqn`.
    """
    name = {"custom_vmap_call": "call", "remat_opt": "fwd_jaxpr", "shard_map": "jaxpr"}.get(eqn.primitive.name)
    return None if name is None else compat.opened(eqn.params[name])[0]


def kernel_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    split = own_rows(eqn, row_dims, context.count)
    return without_rule(eqn, row_dims) if split is None else [on_dim(dim) for dim in split.out_dims]


def declared_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Return the dim that `zerojax.rows` declares. If the workers cannot divide it, return the operand's row dims."""
    place = Place(eqn.params["dim"])
    return [on_dim(place.dim) if fits(place, eqn.outvars[0].aval.shape, context.count) else row_dims[0]]


def partitioning_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    rule = eqn.params.get("sharding_rule")
    mappings = getattr(rule, "operand_mappings", None)
    known = [rows for rows in row_dims if rows is not None]
    if rule is None or mappings is None or len(known) < len(row_dims):
        return [UNKNOWN] * len(eqn.outvars)
    # A mapping has one name of a factor per dim. A dim of several factors has a list, which begins with the major one.
    major = lambda factors: factors if isinstance(factors, str) else next(iter(factors), None)
    names = {
        major(mapping[place.dim])
        for rows, mapping in zip(known, mappings, strict=True)
        for place in rows.places
        if place.outer == 1 and place.dim < len(mapping)
    }
    if not names and any(rows.places for rows in known):
        return [UNKNOWN] * len(eqn.outvars)
    found = [
        Places(frozenset(Place(dim) for dim, factors in enumerate(mapping) if major(factors) in names))
        for mapping in rule.result_mappings
    ]
    fit = lambda rows, var: all(fits(place, var.aval.shape, context.count) for place in rows.places)
    return [rows if fit(rows, var) else UNKNOWN for rows, var in zip(found, eqn.outvars, strict=True)]


def shard_map_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Find the rows in the results of a `shard_map`: they are on the dims that `out_specs` divides over the data axes.

    Return UNKNOWN for a result that no data axis divides: it may be a sum over workers, or equal on all workers.
    """
    specs = eqn.params["out_specs"]
    if all(rows is not None and not rows.places for rows in row_dims):
        return [NOWHERE] * len(specs)
    found = [divided_by(spec, context.axes) for spec in specs]
    return [on_dim(dims[0]) if dims else UNKNOWN for dims in found]


def ragged_dot_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Find the followed dim in the result of `ragged_dot_general`. The ragged dim may hold the rows of all groups.

    The row dims of the group sizes are ignored, because group sizes are counts over all rows.
    """
    lhs, rhs = row_dims[:2]
    if lhs is None or rhs is None:
        return [UNKNOWN]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    if not lhs.places and not rhs.places:
        return [NOWHERE]
    # A ragged dim that is contracted becomes the groups, the first dim of the result.
    first = int(not set(numbers.lhs_ragged_dimensions).isdisjoint(contracted[0]))
    found, remaining = set(), []  # the remaining dims of both operands follow the batch dims in the result
    for n, rows in enumerate((lhs, rhs)):
        found |= {place.to(first + i) for i, dim in enumerate(batch[n]) if (place := rows.along(int(dim)))}
        skipped = {*map(int, (*contracted[n], *batch[n], *(groups if n else ())))}
        remaining += [rows.along(dim) for dim in range(len(eqn.invars[n].aval.shape)) if dim not in skipped]
    found |= {place.to(first + len(batch[0]) + i) for i, place in enumerate(remaining) if place is not None}
    return [one_per_dim(found)]


RULES: dict[str, Callable[[Any, Sequence[RowDims], Context], list[RowDims]]] = {
    ROWS: declared_rule,
    "custom_partitioning": partitioning_rule,
    "pallas_call": kernel_rule,
    "ragged_dot_general": ragged_dot_rule,
    "shard_map": shard_map_rule,
}
