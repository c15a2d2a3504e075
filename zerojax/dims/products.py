"""Rules for products, convolutions and matrix decompositions. They are the second part of the table of rules."""

from collections.abc import Callable, Sequence
from typing import Any

from zerojax.dims.moves import PlaceRule, batched
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, together
from zerojax.primitives import Kind, of_kind


def dot(eqn: Any, states: Sequence[State], context: Context) -> State:
    return _dot(eqn, states, _agree)


def guessed_dot(eqn: Any, states: Sequence[State]) -> State:
    """Return the state of the result of `dot_general` if its operands hold the same rows wherever one of them does."""
    return _dot(eqn, states, lambda *_: True)


def free_dims(eqn: Any) -> list[list[int]]:
    contracted, batch = eqn.params["dimension_numbers"]
    return [[d for d in range(len(eqn.invars[n].aval.shape)) if d not in (*contracted[n], *batch[n])] for n in (0, 1)]


def _dot(eqn: Any, states: Sequence[State], agree: Callable[[Places, Places, int, int], bool]) -> State:
    lhs, rhs = states
    if lhs is None or rhs is None:
        return UNKNOWN
    (contracted, batch), free = eqn.params["dimension_numbers"], free_dims(eqn)
    if not lhs.places and not rhs.places:
        return NOWHERE
    if not all(agree(lhs, rhs, int(i), int(j)) for dims in (contracted, batch) for i, j in zip(*dims, strict=True)):
        return UNKNOWN
    pairs = enumerate(zip(*batch, strict=True))
    found = {place.to(n) for n, (i, j) in pairs if (place := lhs.along(int(i)) or rhs.along(int(j)))}
    for state, dims, start in ((lhs, free[0], len(batch[0])), (rhs, free[1], len(batch[0]) + len(free[0]))):
        found |= {place.to(start + n) for n, dim in enumerate(dims) if (place := state.along(dim))}
    return Places(frozenset(found))


def _agree(lhs: Places, rhs: Places, i: int, j: int) -> bool:
    """Return whether dim `i` of `lhs` and dim `j` of `rhs`, which are contracted or batched, may hold the same rows."""
    a, b = lhs.along(i), rhs.along(j)
    if a is not None and b is not None:
        return a.outer == b.outer
    if a is not None:
        return not rhs.places or j in rhs.uniform
    return b is None or not lhs.places or i in lhs.uniform


def convolution(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after a convolution. It may be the batch or the output features, or be contracted."""
    lhs, rhs = states
    if lhs is None or rhs is None:
        return UNKNOWN
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    (rows, features, *_), (out_features, in_features, *_) = numbers.lhs_spec, numbers.rhs_spec
    batch_of_out, features_of_out = numbers.out_spec[:2]
    grouped = params["feature_group_count"] > 1
    found = set()
    for place in lhs.places:
        if place.dim == rows and params["batch_group_count"] == 1 and (not rhs.places or grouped):
            found.add(place.to(batch_of_out))
        elif place.dim == features and not grouped and _agree(lhs, rhs, features, in_features):
            continue
        elif place.dim == features and _in_groups(place, rhs.along(out_features), params, context):
            found.add(Place(features_of_out))
        else:
            return UNKNOWN
    for place in rhs.places:
        if place.dim == out_features and (not grouped or Place(features_of_out) in found or not lhs.places):
            if grouped and not _in_groups(place, place, params, context):
                return UNKNOWN
            found.add(place.to(features_of_out))
        elif place.dim != in_features or grouped or not _agree(lhs, rhs, features, in_features):
            return UNKNOWN
    return Places(frozenset(found))


def _in_groups(lhs: Place, rhs: Place | None, params: Any, context: Context) -> bool:
    return lhs.outer == 1 and (rhs is None or rhs.outer == 1) and params["feature_group_count"] % context.count == 0


def decomposition(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    ndim = min(len(atom.aval.shape) for atom in eqn.invars)
    state = batched(together(states), ndim - 2)
    return [state] * len(eqn.outvars)


RULES: dict[str, PlaceRule] = {
    "dot_general": dot,
    "conv_general_dilated": convolution,
    **dict.fromkeys(of_kind(Kind.DECOMPOSITION), decomposition),
}
