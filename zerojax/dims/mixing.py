"""Rules for primitives that cut, join or mix the entries along some dims. They are a part of the table of rules."""

from collections.abc import Sequence
from typing import Any

from zerojax.dims.moves import PlaceRule, agree, without
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, moved, off, ragged, together, uncounted
from zerojax.primitives import ROWS, Kind, of_kind


def slice_(eqn: Any, states: Sequence[State], context: Context) -> State:
    params, state = eqn.params, states[0]
    old, new, strides = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, params["strides"]
    if state is not None and strides and any(strides[place.dim] != 1 for place in state.places):
        return UNKNOWN
    return cut(state, old, new, params["start_indices"])


def cut(state: State, old: Sequence[int], new: Sequence[int], starts: Sequence[int | None]) -> State:
    """Find the followed dim after a slice. A start that is not known is None.

    Return UNKNOWN if such a start matters, or the slice does not begin and end at whole blocks (`Place.outer`).
    """
    for place in () if state is None else state.places:
        dim = place.dim
        if old[dim] == new[dim]:
            continue
        block, start = old[dim] // place.outer, starts[dim]
        if start is None or start % block or new[dim] % block:
            return UNKNOWN
        assert state is not None
        state = _replaced(state, place, new[dim] // block)
    return uncounted(state)


def concatenate(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after `concatenate`. Along this dim, all operands must have the same size and place."""
    dim = int(eqn.params["dimension"])
    sizes = [int(atom.aval.shape[dim]) for atom in eqn.invars]
    states = [state for state, size in zip(states, sizes, strict=True) if size] or [NOWHERE]
    state = ragged(together(states), (dim,))
    if state is None or len(states) == 1 or (place := state.along(dim)) is None:
        return state
    if len({*sizes} - {0}) > 1 or any(s is None or s.along(dim) != place for s in states):
        return UNKNOWN
    return _replaced(state, place, place.outer * len(states))


def pad(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after `pad`. It is unknown if the padding along this dim is not made of whole blocks."""
    state = ragged(states[0], [d for d, config in enumerate(eqn.params["padding_config"]) if any(config)])
    for dim, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        place = None if state is None else state.along(dim)
        if state is not None and place is not None and (low or high or inside):
            block = eqn.invars[0].aval.shape[dim] // place.outer
            if inside or low % block or high % block or low < 0 or high < 0:
                return UNKNOWN
            state = _replaced(state, place, place.outer + (low + high) // block)
    return state


def _replaced(state: Places, place: Place, outer: int) -> Places:
    return Places(state.places - {place} | {Place(place.dim, outer, joined=outer > 1)}, state.uniform)


def split(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    axis, start, slices = int(eqn.params["axis"]), 0, []
    old = eqn.invars[0].aval.shape
    for size in eqn.params["sizes"]:
        new = (*old[:axis], size, *old[axis + 1 :])
        slices.append(cut(states[0], old, new, [start if dim == axis else 0 for dim in range(len(old))]))
        start += int(size)
    return slices


def stack(eqn: Any, states: Sequence[State], context: Context) -> State:
    axis, ndim = int(eqn.params["axis"]), len(eqn.invars[0].aval.shape)
    return moved(together(states), [dim + (dim >= axis) for dim in range(ndim)])


def unstack(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    axes, ndim = (eqn.params["axis"],), len(eqn.invars[0].aval.shape)
    return [moved(off(axes, states[0]), without(axes, ndim))] * len(eqn.outvars)


def tile(eqn: Any, states: Sequence[State], context: Context) -> State:
    repeated = [dim for dim, times in enumerate(eqn.params["reps"]) if times != 1]
    adds_dims = len(eqn.params["reps"]) != len(eqn.invars[0].aval.shape)
    return UNKNOWN if adds_dims else ragged(off(repeated, states[0]), repeated)


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
    "concatenate": concatenate,
    "conv_general_dilated": convolution,
    "dot_product_attention_bwd_wrapper": attention,
    "dot_product_attention_fwd_wrapper": attention,
    "fft": fft,
    "pad": pad,
    "rev": along,
    "slice": slice_,
    "split": split,
    "stack": stack,
    "tile": tile,
    "unstack": unstack,
    ROWS: lambda eqn, states, context: list(states),  # where `guess` does not believe what it declares
}
