"""Describe in which dims of a value the entries of the followed dim are.

The followed dim is a dim of some inputs of a program, for example the dim of the rows of a batch. A place is a dim of a
value along which the value is permuted if the inputs are permuted along the followed dim. A value may have no place,
one place, or several places. In this definition, constants and parameters with one entry per row (positions, a mask)
are permuted together with the rows. So if an elementwise operation combines a value with a constant, the result has
the places of the value.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from zerojax import compat


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A dim of a value that holds the followed dim, perhaps merged with other dims.

    The dim can be split into the shape `(outer, count, rest)`. `count` is the number of entries of the followed dim.

    Attributes:
        dim: The dim of the value.
        outer: The number of blocks in the dim. Each block has all entries of the followed dim. 1 if the followed dim is
            the first factor.
        joined: Whether the blocks were concatenated. If so, the compiler divides the whole dim, not block by block.
    """

    dim: int
    outer: int = 1
    joined: bool = dataclasses.field(default=False, compare=False)

    def to(self, dim: int) -> "Place":
        return dataclasses.replace(self, dim=dim)

    @property
    def is_split(self) -> bool:
        return self.outer > 1 and not self.joined


@dataclasses.dataclass(frozen=True)
class Places:
    """All dims of a value that hold the followed dim.

    Attributes:
        places: The places of the followed dim, for example two in a matrix of similarities between all rows. Empty if
            the value does not change when the followed dim is permuted.
        uniform: Dims along which all entries are equal, for example after a broadcast.
        counting: For an array of indices, pairs `(part, dim)`. The entries `[..., part]`, or all entries if `part` is
            None, are 0, 1, 2, and so on along dim `dim`. Only arguments and results of functions have this note; see
            `indexing.noted`.
    """

    places: frozenset[Place] = frozenset()
    uniform: frozenset[int] = frozenset()
    counting: frozenset[tuple[int | None, int]] = frozenset()

    @property
    def only(self) -> Place | None:
        return next(iter(self.places)) if len(self.places) == 1 else None

    def along(self, dim: int) -> Place | None:
        return next((place for place in self.places if place.dim == dim), None)

    def allows(self, places: Iterable[Place]) -> bool:
        """Return whether `places` can be added: the value has no place, or is uniform along the dims of new places."""
        return not self.places or all(place in self.places or place.dim in self.uniform for place in places)


RowDims = Places | None  # the dims of a value that hold the followed dim; None: unknown
NOWHERE = Places()
UNKNOWN: RowDims = None
LARGE = 1 << 16  # Smaller operands and gradients cost too little to warn about them.


@dataclasses.dataclass(frozen=True)
class Context:
    """What rules know of a jaxpr."""

    count: int  # the number of entries of the followed dim
    made: Mapping[Any, Any]  # the equation that computes each variable
    # the arguments whose values are known to be 0, 1, 2, ...; see `Places.counting`
    known: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    axes: frozenset[str] = frozenset()  # the mesh axes that divide the followed dim, if they are known


def on_dim(dim: int) -> Places:
    return Places(frozenset((Place(dim),)))


def row_dims_of(atoms: Iterable, row_dims: Mapping[Any, RowDims]) -> list[RowDims]:
    return [NOWHERE if compat.is_literal(atom) else row_dims[atom] for atom in atoms]


def is_index(atom: Any) -> bool:
    """Return whether a value is an array of integers, which an equation may use as indices."""
    return getattr(getattr(atom.aval, "dtype", None), "kind", "") in ("i", "u") and bool(atom.aval.shape)


def one_per_dim(places: Collection[Place]) -> RowDims:
    """Return the row dims of a value with these places, or unknown if one dim would have two places."""
    return Places(frozenset(places)) if len({place.dim for place in places}) == len(places) else UNKNOWN


def fits(place: Place, shape: Sequence[int], count: int) -> bool:
    """Return whether a value of this shape can hold the followed dim at `place`, in equal parts."""
    return place.dim < len(shape) and shape[place.dim] > 0 and shape[place.dim] % (place.outer * count) == 0


def together(row_dims: Sequence[RowDims]) -> RowDims:
    """Combine the row dims of an elementwise equation's operands of one shape. If these disagree, return UNKNOWN."""
    first = row_dims[0]
    if all(rows is first or rows == first for rows in row_dims):
        return uncounted(first)
    known = [rows for rows in row_dims if rows is not None]
    if len(known) < len(row_dims):
        return UNKNOWN
    places = frozenset().union(*(rows.places for rows in known))
    if not all(rows.allows(places) for rows in known) or one_per_dim(places) is UNKNOWN:
        return UNKNOWN
    return Places(places, frozenset.intersection(*(rows.uniform for rows in known)))


def uncounted(rows: RowDims) -> RowDims:
    """Remove `counting` from row dims, because the value's entries are no longer 0, 1, 2, and so on."""
    return dataclasses.replace(rows, counting=frozenset()) if rows is not None and rows.counting else rows


def off(dims: Sequence[int], rows: RowDims) -> RowDims:
    """Return `rows`, or UNKNOWN if one of `dims`, whose entries are mixed, holds the followed dim."""
    return UNKNOWN if rows is None or any(rows.along(int(dim)) for dim in dims) else rows


def ragged(rows: RowDims, dims: Sequence[int]) -> RowDims:
    """Return `rows`, but no longer uniform along `dims`, because the entries may now differ along `dims`."""
    return rows if rows is None else Places(rows.places, rows.uniform.difference(map(int, dims)))


def renumbered(rows: RowDims, to: Sequence[int | None], added: Iterable[int] = ()) -> RowDims:
    """Return the row dims of a result, given the row dims of its operand.

    Dim i of the operand becomes dim `to[i]` of the result. `to[i]` is None if the result does not have the dim. The
    result is uniform along the `added` dims.
    """
    if rows is None or (not rows.places and not rows.uniform and not added):
        return uncounted(rows)
    places = frozenset(place.to(new) for place in rows.places if (new := to[place.dim]) is not None)
    uniform = {new for dim in rows.uniform if (new := to[dim]) is not None}
    return Places(places, frozenset(uniform.union(added)))


def reshaped(rows: RowDims, old: Sequence[int], new: Sequence[int], count: int) -> RowDims:
    """Return the row dims of a value after a reshape from `old` to `new`, which may merge or split dims.

    If the reshape splits the followed dim, the first part becomes the place, or the last if `count` divides only that.
    """
    if rows is None:
        return UNKNOWN
    if 0 in new:
        return NOWHERE
    places = set()
    for place in rows.places:
        before = math.prod(old[: place.dim]) * place.outer
        found = _place_of(before, count, new) or _in_last_part(old, place, new, count)
        if found is None:
            return UNKNOWN
        places.add(dataclasses.replace(found, joined=place.joined and found.outer > 1))
    ends, uniform = {math.prod(old[:dim]): dim for dim in range(len(old)) if old[dim] > 1}, set()
    for dim, size in enumerate(new):
        before = ends.get(math.prod(new[:dim]))
        if size > 1 and before in rows.uniform and old[before] == size:
            uniform.add(dim)
    return Places(frozenset(places), frozenset(uniform))


def _place_of(before: int, count: int, shape: Sequence[int]) -> Place | None:
    """Return the place in `shape` of a factor `count`, or None if no dim contains the whole factor.

    `before` is the product of all factors in front of it. For example, the 4 of `(2, 4, 5)`, with `before=2`, is at
    `Place(0, outer=2)` in `(8, 5)`.
    """
    product = 1  # of the sizes in front of `dim`
    for dim, size in enumerate(shape):
        if size > 1 and before % product == 0 and product * size % (before * count) == 0:
            return Place(dim, before // product)
        product *= size
    return None


def _in_last_part(old: Sequence[int], place: Place, new: Sequence[int], count: int) -> Place | None:
    """Return the place in the last part of a dim that a reshape splits; None if `count` does not divide the part."""
    end = math.prod(old[: place.dim + 1])
    after = math.prod(new)
    for dim in reversed(range(len(new))):
        if new[dim] > 1 and after == end and place.outer == 1:
            return Place(dim) if new[dim] % count == 0 else None
        after //= new[dim]
    return None
