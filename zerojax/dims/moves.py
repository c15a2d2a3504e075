"""Rules for the primitives of a dense model: elementwise ones, layouts, reductions and products of matrices.

They are the first part of the table of rules. `mixing` and `indexing` have the other parts, which `follow` imports when
it meets a primitive without a rule here. A rule gets an equation, the `RowDims` of each operand, and the context. It
returns the `RowDims` of the result, or a list of them if there are several results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Places, RowDims, off, renumbered, reshaped, together
from zerojax.primitives import ROWS, Kind, of_kind

PlaceRule = Callable[[Any, Sequence[RowDims], Context], RowDims | list[RowDims]]


def elementwise_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Find the followed dim in an elementwise result. Scalars are ignored. A dim that is broadcast is uniform."""
    shape, found = eqn.outvars[0].aval.shape, []
    for rows, atom in zip(row_dims, eqn.invars, strict=True):
        if (old := atom.aval.shape) == shape:
            found.append(rows)
        elif old:
            ones = [dim for dim, size in enumerate(shape) if old[dim] != size]
            found.append(renumbered(rows, range(len(shape)), ones))
    return [together(found) if found and shape else NOWHERE] * len(eqn.outvars)


def broadcast_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    to, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    old = getattr(eqn.invars[0].aval, "shape", ())
    kept = {int(new) for dim, new in enumerate(to) if old[dim] == shape[new]}
    return renumbered(row_dims[0], [int(new) for new in to], set(range(len(shape))) - kept)


def reshape_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims:
    rows, old, order = row_dims[0], eqn.invars[0].aval.shape, eqn.params.get("dimensions")
    if order is not None:
        rows, old = renumbered(rows, np.argsort(order).tolist()), [old[dim] for dim in order]
    return reshaped(rows, old, eqn.outvars[0].aval.shape, context.count)


def without(dims: Sequence[int], ndim: int) -> list[int | None]:
    """Return the new index of each of `ndim` dims after `dims` are removed, or None for a removed dim."""
    gone = {int(dim) for dim in dims}
    return [None if dim in gone else dim - sum(other < dim for other in gone) for dim in range(ndim)]


def reduction_rule(eqn: Any, row_dims: Sequence[RowDims], context: Context) -> RowDims | list[RowDims]:
    name, results = eqn.primitive.name, len(eqn.outvars)
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    rows = together(row_dims[: len(row_dims) // 2] if name == "reduce" else row_dims)
    rows = off(axes, rows) if name in ("argmax", "argmin") else rows
    return [renumbered(rows, without(axes, len(eqn.invars[0].aval.shape)))] * results


def free_dims(eqn: Any) -> list[list[int]]:
    contracted, batch = eqn.params["dimension_numbers"]
    return [[d for d in range(len(eqn.invars[n].aval.shape)) if d not in (*contracted[n], *batch[n])] for n in (0, 1)]


def product(eqn: Any, row_dims: Sequence[RowDims], agree: Callable[[Places, Places, int, int], bool]) -> RowDims:
    """Find the followed dim after `dot_general`: unknown if `agree(lhs, rhs, i, j)` is false for a pair of dims."""
    lhs, rhs = row_dims
    if lhs is None or rhs is None:
        return UNKNOWN
    (contracted, batch), free = eqn.params["dimension_numbers"], free_dims(eqn)
    if not lhs.places and not rhs.places:
        return NOWHERE
    if not all(agree(lhs, rhs, int(i), int(j)) for dims in (contracted, batch) for i, j in zip(*dims, strict=True)):
        return UNKNOWN
    pairs = enumerate(zip(*batch, strict=True))
    found = {place.to(n) for n, (i, j) in pairs if (place := lhs.along(int(i)) or rhs.along(int(j)))}
    for rows, dims, start in ((lhs, free[0], len(batch[0])), (rhs, free[1], len(batch[0]) + len(free[0]))):
        found |= {place.to(start + n) for n, dim in enumerate(dims) if (place := rows.along(dim))}
    return Places(frozenset(found))


def agree(lhs: Places, rhs: Places, i: int, j: int) -> bool:
    """Return whether dim `i` of `lhs` and dim `j` of `rhs`, which a product pairs, can hold the same rows."""
    a, b = lhs.along(i), rhs.along(j)
    if a is not None and b is not None:
        return a.outer == b.outer
    if a is not None:
        return not rhs.places or j in rhs.uniform
    return b is None or not lhs.places or i in lhs.uniform


# For these primitives, the places of the result imply the places of an operand that has no place yet.
IMPLIES = of_kind(Kind.ELEMENTWISE, Kind.COUNTERS)
IMPLIES |= {"broadcast_in_dim", "name", "pvary", "reduce_sum", "reshard", "sharding_constraint", "squeeze", "transpose"}


def implied(eqn: Any, rows: Places, atom: Any, given: Places) -> Places:
    """Return new row dims for the operand `atom` of `eqn`, with the places that follow from the result's places.

    The primitive of `eqn` is in `IMPLIES`. `rows` are the row dims of the result, and `given` the present row dims of
    the operand, which has no place yet.
    """
    name, old, new = eqn.primitive.name, atom.aval.shape, eqn.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        to = [int(dim) for dim in eqn.params["broadcast_dimensions"]]
    elif name == "transpose":
        to = np.argsort(eqn.params["permutation"]).tolist()
    elif name in ("squeeze", "reduce_sum"):
        to = without(eqn.params["axes" if name == "reduce_sum" else "dimensions"], len(old))
    else:
        to = list(range(len(old)))
    places = {p.to(d) for d, at in enumerate(to) if at is not None and old[d] == new[at] and (p := rows.along(at))}
    return Places(frozenset(p for p in places if p.dim not in given.uniform), given.uniform)


def without_rule(eqn: Any, row_dims: Sequence[RowDims]) -> list[RowDims]:
    """Return the results' row dims for an equation without a rule: no place if no operand has one, else unknown."""
    bare = all(rows is not None and not rows.places for rows in row_dims)
    return [NOWHERE if bare else UNKNOWN] * len(eqn.outvars)


RULES: dict[str, PlaceRule] = {
    **dict.fromkeys(of_kind(Kind.ELEMENTWISE, Kind.COUNTERS), elementwise_rule),
    **dict.fromkeys(of_kind(Kind.IDENTITY) - {ROWS}, lambda eqn, row_dims, context: list(row_dims)),
    **dict.fromkeys(of_kind(Kind.REDUCTION), reduction_rule),
    "broadcast_in_dim": broadcast_rule,
    "dot_general": lambda eqn, row_dims, _: product(eqn, row_dims, agree),
    "reshape": reshape_rule,
    "squeeze": lambda eqn, rows, _: renumbered(rows[0], without(eqn.params["dimensions"], eqn.invars[0].aval.ndim)),
    "transpose": lambda eqn, rows, _: renumbered(rows[0], np.argsort(eqn.params["permutation"]).tolist()),
}
