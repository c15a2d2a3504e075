"""Find the followed dim in the results of loops and branches. The calling `Follower` analyses the bodies."""

from collections.abc import Callable, Sequence
from typing import Any

from zerojax import compat
from zerojax.dims.place import UNKNOWN, Places, RowDims

_ROUNDS = 4  # A loop's body is analysed until the row dims of its carry no longer change, but at most this often.


def through(follower: Any, eqn: Any, row_dims: Sequence[RowDims]) -> list[RowDims]:
    """Return the row dims of the results of a loop or a conditional, given those of its operands."""
    if (loop := compat.loop_of(eqn)) is not None:
        inside = into_loop(follower, loop, row_dims)
        outs = follower.results(compat.opened(loop.body)[0], inside)
        return [*inside[loop.consts : loop.consts + loop.carry], *map(stacked, outs[loop.carry :])]
    return (_through_while if eqn.primitive.name == "while" else _through_cond)(follower, eqn, row_dims)


def into_loop(follower: Any, loop: compat.LoopEqn, row_dims: Sequence[RowDims]) -> list[RowDims]:
    """Return the row dims of the body's constants, carry and slices, given the row dims of the loop's operands."""
    body, sliced = compat.opened(loop.body)[0], loop.consts + loop.carry
    consts, slices = row_dims[: loop.consts], [unstacked(rows) for rows in row_dims[sliced:]]
    carry = _carried(
        follower, row_dims[loop.consts : sliced], lambda carry: follower.results(body, [*consts, *carry, *slices])
    )
    return [*consts, *(carry or [UNKNOWN] * loop.carry), *slices]


def _carried(
    follower: Any, carry: Sequence[RowDims], body: Callable[[Sequence[RowDims]], Sequence[RowDims]]
) -> list[RowDims] | None:
    """Return the row dims of a loop's carry that hold in every iteration, or None if `_ROUNDS` rounds find none."""
    carry = list(carry)
    for _ in range(_ROUNDS):
        pairs = zip(carry, body(carry), strict=False)  # A scan's body also returns slices, which `zip` drops.
        again = [_joined(*pair, guesses=follower.guesses) for pair in pairs]
        if again == carry:
            return carry
        carry = again
    return None


def _joined(a: RowDims, b: RowDims, *, guesses: bool) -> RowDims:
    """Join the row dims that one value has in two branches, or before a loop and after an iteration of the loop.

    With `guesses`, known places win over unknown ones.
    """
    if a == b:
        return a
    if a is None or b is None:
        known = next((rows for rows in (a, b) if rows is not None and rows.places), UNKNOWN)
        return known if guesses else UNKNOWN
    if a.places and b.places and a.places != b.places:
        return UNKNOWN
    return Places(a.places or b.places, a.uniform & b.uniform)


def _through_while(follower: Any, eqn: Any, row_dims: Sequence[RowDims]) -> list[RowDims]:
    """Return the row dims of a while loop's results: unknown if the rows decide the number of iterations."""
    first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body, test = compat.opened(eqn.params["body_jaxpr"])[0], compat.opened(eqn.params["cond_jaxpr"])[0]
    of_body, carry = row_dims[first : first + consts], row_dims[first + consts :]
    lasting = _carried(follower, carry, lambda carry: follower.results(body, [*of_body, *carry]))
    (stop,) = [UNKNOWN] if lasting is None else follower.results(test, [*row_dims[:first], *lasting])
    return lasting if lasting is not None and stop is not None and not stop.places else [UNKNOWN] * len(carry)


def _through_cond(follower: Any, eqn: Any, row_dims: Sequence[RowDims]) -> list[RowDims]:
    found = [follower.results(compat.opened(branch)[0], row_dims[1:]) for branch in eqn.params["branches"]]
    outs = found[0]
    for other in found[1:]:
        outs = [_joined(*pair, guesses=follower.guesses) for pair in zip(outs, other, strict=True)]
    return outs if row_dims[0] is not None and not row_dims[0].places else [UNKNOWN] * len(outs)


def unstacked(rows: RowDims) -> RowDims:
    """Return the row dims of `x[i]`, given the row dims of `x`. An iteration of a scan reads such a slice."""
    return UNKNOWN if rows is None or rows.along(0) is not None else _shifted(rows, -1)


def stacked(rows: RowDims) -> RowDims:
    """Return the row dims of a stack along a new dim 0, given those of one element. A scan returns such stacks."""
    return UNKNOWN if rows is None else _shifted(rows, 1)


def _shifted(rows: Places, by: int) -> Places:
    places = frozenset(place.to(place.dim + by) for place in rows.places)
    counting = frozenset((part, dim + by) for part, dim in rows.counting if dim + by >= 0)
    return Places(places, frozenset(dim + by for dim in rows.uniform if dim + by >= 0), counting)
