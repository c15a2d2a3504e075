"""Rules for primitives that move, combine or multiply elements: all but slices, gathers and scatters.

They are the first part of the table of rules. A rule gets the equation, the states of its operands, and the context. It
returns the state of the result, or a list with one state per result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, moved, reshaped, together, uncounted
from zerojax.primitives import Kind, of_kind

PlaceRule = Callable[[Any, Sequence[State], Context], State | list[State]]


def elementwise(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Find the followed dim in an elementwise result. Scalars are ignored. A broadcast dim of size 1 is uniform."""
    shape, full = eqn.outvars[0].aval.shape, []
    for state, atom in zip(states, eqn.invars, strict=True):
        if (old := atom.aval.shape) == shape:
            full.append(state)
        elif old:
            ones = [dim for dim, size in enumerate(shape) if old[dim] != size]
            full.append(moved(state, range(len(shape)), ones))
    return [together(full) if full and shape else NOWHERE] * len(eqn.outvars)


def broadcast(eqn: Any, states: Sequence[State], context: Context) -> State:
    to, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    old = getattr(eqn.invars[0].aval, "shape", ())
    kept = {int(new) for dim, new in enumerate(to) if old[dim] == shape[new]}
    return moved(states[0], [int(new) for new in to], set(range(len(shape))) - kept)


def reshape(eqn: Any, states: Sequence[State], context: Context) -> State:
    state, old, order = states[0], eqn.invars[0].aval.shape, eqn.params.get("dimensions")
    if order is not None:
        state, old = moved(state, np.argsort(order).tolist()), [old[dim] for dim in order]
    return reshaped(state, old, eqn.outvars[0].aval.shape, context.count)


def transpose(eqn: Any, states: Sequence[State], context: Context) -> State:
    return moved(states[0], np.argsort(eqn.params["permutation"]).tolist())


def without(dims: Sequence[int], ndim: int) -> list[int | None]:
    """Return, for each of `ndim` dims, its index after the dims `dims` are removed, or None for a removed dim."""
    gone = {int(dim) for dim in dims}
    return [None if dim in gone else dim - sum(other < dim for other in gone) for dim in range(ndim)]


def reduction(eqn: Any, states: Sequence[State], context: Context) -> State | list[State]:
    name, results = eqn.primitive.name, len(eqn.outvars)
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    state = together(states[: len(states) // 2] if name == "reduce" else states)
    state = _off(axes, state) if name in ("argmax", "argmin") else state
    return [moved(state, without(axes, len(eqn.invars[0].aval.shape)))] * results


def along(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    params = eqn.params
    dims = params.get("dimensions", (params.get("axis", params.get("dimension")),))
    return [_ragged(_off(dims, together(states)), dims)] * len(eqn.outvars)


def _off(dims: Sequence[int], state: State) -> State:
    return UNKNOWN if state is None or any(state.along(int(dim)) for dim in dims) else state


def _ragged(state: State, dims: Sequence[int]) -> State:
    return state if state is None else Places(state.places, state.uniform.difference(map(int, dims)))


def concatenate(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after `concatenate`. Along this dim, all operands must have the same size and place."""
    dim = int(eqn.params["dimension"])
    sizes = [int(atom.aval.shape[dim]) for atom in eqn.invars]
    states = [state for state, size in zip(states, sizes, strict=True) if size] or [NOWHERE]
    state = _ragged(together(states), (dim,))
    if state is None or len(states) == 1 or (place := state.along(dim)) is None:
        return state
    if len({*sizes} - {0}) > 1 or any(s is None or s.along(dim) != place for s in states):
        return UNKNOWN
    return _replaced(state, place, place.outer * len(states))


def pad(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Find the followed dim after `pad`. It is unknown if the padding along this dim is not made of whole blocks."""
    state = _ragged(states[0], [d for d, config in enumerate(eqn.params["padding_config"]) if any(config)])
    for dim, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        place = None if state is None else state.along(dim)
        if state is not None and place is not None and (low or high or inside):
            block = eqn.invars[0].aval.shape[dim] // place.outer
            if inside or low % block or high % block or low < 0 or high < 0:
                return UNKNOWN
            state = _replaced(state, place, place.outer + (low + high) // block)
    return state


def cut(state: State, old: Sequence[int], new: Sequence[int], starts: Sequence[int | None]) -> State:
    """Find the followed dim in a slice. It is unknown if the slice cuts a block. An unknown start is None."""
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


def _replaced(state: Places, place: Place, outer: int) -> Places:
    return Places(state.places - {place} | {Place(place.dim, outer, joined=outer > 1)}, state.uniform)


def _of_arrays(eqn: Any, states: Sequence[State]) -> State:
    return together([s for s, atom in zip(states, eqn.invars, strict=True) if atom.aval.shape] or [NOWHERE])


def window(eqn: Any, states: Sequence[State], context: Context) -> State | list[State]:
    slid = [dim for dim, size in enumerate(eqn.params["window_dimensions"]) if size != 1]
    state = _off(slid, _of_arrays(eqn, states))
    return [state if state is None else Places(state.places)] * len(eqn.outvars)


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
    return [moved(_off(axes, states[0]), without(axes, ndim))] * len(eqn.outvars)


def tile(eqn: Any, states: Sequence[State], context: Context) -> State:
    repeated = [dim for dim, times in enumerate(eqn.params["reps"]) if times != 1]
    adds_dims = len(eqn.params["reps"]) != len(eqn.invars[0].aval.shape)
    return UNKNOWN if adds_dims else _ragged(_off(repeated, states[0]), repeated)


def top_k(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    ndim = len(eqn.invars[0].aval.shape)
    axis = int(eqn.params.get("axis", eqn.params.get("reduction_dimension", ndim - 1))) % ndim
    return [_ragged(_off((axis,), states[0]), (axis,))] * len(eqn.outvars)


def batched(state: State, ndim: int) -> State:
    """Return the state of a result that has the operand's first `ndim` dims, and mixes elements of all other dims."""
    if state is None or any(place.dim >= ndim for place in state.places):
        return UNKNOWN
    return Places(state.places)


# For these primitives, the places of the result imply the places of an operand that has no place yet.
IMPLIES = of_kind(Kind.ELEMENTWISE, Kind.COUNTERS) | {
    "broadcast_in_dim",
    "name",
    "pvary",
    "reduce_sum",
    "reshard",
    "sharding_constraint",
    "squeeze",
    "transpose",
}


def implied(eqn: Any, state: Places, atom: Any, given: Places) -> Places:
    """Return the state of the operand `atom` of `eqn`, with the places that follow from the places of the result.

    The primitive of `eqn` is in `IMPLIES`. `state` is the state of the result. `given` is the present state of
    `atom`, which has no place.
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
    places = {p.to(d) for d, at in enumerate(to) if at is not None and old[d] == new[at] and (p := state.along(at))}
    return Places(frozenset(p for p in places if p.dim not in given.uniform), given.uniform)


def _ndim(atom: Any) -> int:
    return len(atom.aval.shape)


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
    **dict.fromkeys(of_kind(Kind.ELEMENTWISE, Kind.COUNTERS), elementwise),
    **dict.fromkeys(of_kind(Kind.IDENTITY), lambda eqn, states, context: list(states)),
    **dict.fromkeys(of_kind(Kind.REDUCTION), reduction),
    **dict.fromkeys(of_kind(Kind.ALONG), along),
    **dict.fromkeys(
        of_kind(Kind.KEYS), lambda eqn, states, context: batched(_of_arrays(eqn, states), _ndim(eqn.outvars[0]))
    ),
    **dict.fromkeys(of_kind(Kind.WINDOW), window),
    **dict.fromkeys(of_kind(Kind.DECOMPOSITION), decomposition),
    "rev": along,
    "broadcast_in_dim": broadcast,
    "dot_general": dot,
    "conv_general_dilated": convolution,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": lambda eqn, states, context: moved(states[0], without(eqn.params["dimensions"], _ndim(eqn.invars[0]))),
    "concatenate": concatenate,
    "pad": pad,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    # Fused attention: dim 0 of every operand and result is a batch dim.
    **dict.fromkeys(
        ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"),
        lambda eqn, states, context: batched(_of_arrays(eqn, states), 1),
    ),
    # A Fourier transform mixes the last dims.
    "fft": lambda eqn, states, context: batched(states[0], _ndim(eqn.invars[0]) - len(eqn.params["fft_lengths"])),
    "top_k": top_k,
    "approx_top_k": top_k,
    # A bitcast may add or remove a last dim.
    "bitcast_convert_type": lambda eqn, states, context: batched(
        states[0], min(_ndim(eqn.invars[0]), _ndim(eqn.outvars[0]))
    ),
}
