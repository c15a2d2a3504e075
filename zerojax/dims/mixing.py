"""Rules for primitives that mix the entries along some dims of an array. They are a part of the table of rules."""

from collections.abc import Sequence
from typing import Any

from zerojax.dims.moves import PlaceRule, agree
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, off, ragged, together
from zerojax.primitives import Kind, of_kind


def along(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Find the followed dim after a sort, a reversal, a top-k or an accumulation along a dim, by default the last."""
    names, ndim = ("axis", "dimension", "reduction_dimension"), len(eqn.invars[0].aval.shape)
    axis = next((int(eqn.params[name]) for name in names if name in eqn.params), -1)
    dims = eqn.params.get("dimensions", (axis % ndim,))
    return [ragged(off(dims, together(states)), dims)] * len(eqn.outvars)


def window(eqn: Any, states: Sequence[State], context: Context) -> State | list[State]:
    slid = [dim for dim, size in enumerate(eqn.params["window_dimensions"]) if size != 1]
    state = off(slid, _of_arrays(eqn, states))
    return [state if state is None else Places(state.places)] * len(eqn.outvars)


def batched(state: State, ndim: int) -> State:
    """Return the state of a result that has the operand's first `ndim` dims, and mixes elements of all other dims."""
    if state is None or any(place.dim >= ndim for place in state.places):
        return UNKNOWN
    return Places(state.places)


def _of_arrays(eqn: Any, states: Sequence[State]) -> State:
    return together([s for s, atom in zip(states, eqn.invars, strict=True) if atom.aval.shape] or [NOWHERE])


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
        elif place.dim == features and not grouped and agree(lhs, rhs, features, in_features):
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
        elif place.dim != in_features or grouped or not agree(lhs, rhs, features, in_features):
            return UNKNOWN
    return Places(frozenset(found))


def _in_groups(lhs: Place, rhs: Place | None, params: Any, context: Context) -> bool:
    return lhs.outer == 1 and (rhs is None or rhs.outer == 1) and params["feature_group_count"] % context.count == 0


def decomposition(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    ndim = min(len(atom.aval.shape) for atom in eqn.invars)
    state = batched(together(states), ndim - 2)
    return [state] * len(eqn.outvars)


def keys(eqn: Any, states: Sequence[State], context: Context) -> State:
    return batched(_of_arrays(eqn, states), len(eqn.outvars[0].aval.shape))


def attention(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after fused attention. Dim 0 of every operand and result is a batch dim."""
    return batched(_of_arrays(eqn, states), 1)


def fft(eqn: Any, states: Sequence[State], context: Context) -> State:
    return batched(states[0], len(eqn.invars[0].aval.shape) - len(eqn.params["fft_lengths"]))


def bitcast(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after a bitcast, which may add or remove a last dim."""
    return batched(states[0], min(len(atom.aval.shape) for atom in (eqn.invars[0], eqn.outvars[0])))


RULES: dict[str, PlaceRule] = {
    **dict.fromkeys(of_kind(Kind.ALONG), along),
    **dict.fromkeys(of_kind(Kind.DECOMPOSITION), decomposition),
    **dict.fromkeys(of_kind(Kind.KEYS), keys),
    **dict.fromkeys(of_kind(Kind.WINDOW), window),
    "bitcast_convert_type": bitcast,
    "conv_general_dilated": convolution,
    "dot_product_attention_bwd_wrapper": attention,
    "dot_product_attention_fwd_wrapper": attention,
    "fft": fft,
    "rev": along,
}
