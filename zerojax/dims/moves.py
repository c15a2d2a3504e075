"""First part of the table of rules: primitives that move elements, or compute each from elements at the same place.

A rule gets the equation, the states of its operands, and the context. It returns the state of the result, or a list
with one state per result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, moved, reshaped, together
from zerojax.jaxprs import ELEMENTWISE

PlaceRule = Callable[[Any, Sequence[State], Context], State | list[State]]

# Each element of the result is computed from the operands' elements at the same place. In addition to the arithmetic,
# these are random numbers from counters, names, sharding constraints, and `pvary`.
SAME_PLACE = ELEMENTWISE | frozenset(
    "name philox2x32 philox4x32 pvary reshard sharding_constraint threefry2x32 threefry4x32".split()
)
# Result i is operand i, unchanged.
_PASSED = frozenset("optimization_barrier device_put layout_constraint with_memory_space_constraint".split())
_REDUCTIONS = frozenset(
    """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor reduce argmax argmin
    """.split()
)
_ALONG = frozenset("cumsum cumprod cummax cummin cumlogsumexp sort rev".split())
# The leading dims are a batch. The equation works in the other dims.
_LEADING = frozenset(
    "random_bits random_wrap random_unwrap random_split random_seed random_fold_in random_clone random_gamma".split()
)
_WINDOWS = frozenset(
    """
    reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add
    """.split()
)


def elementwise(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Follow an elementwise equation. It ignores scalars. A dim of size 1 that is broadcast counts as uniform."""
    shape, full = eqn.outvars[0].aval.shape, []
    for state, atom in zip(states, eqn.invars, strict=True):
        if (old := atom.aval.shape) == shape:
            full.append(state)
        elif old:
            ones = [dim for dim, size in enumerate(shape) if old[dim] != size]
            full.append(moved(state, range(len(shape)), ones))
    return [together(full) if full and shape else NOWHERE] * len(eqn.outvars)


def broadcast(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Follow `broadcast_in_dim`. The result is uniform along the dims that it adds."""
    to, shape = eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    old = getattr(eqn.invars[0].aval, "shape", ())
    kept = {int(new) for dim, new in enumerate(to) if old[dim] == shape[new]}
    return moved(states[0], [int(new) for new in to], set(range(len(shape))) - kept)


def reshape(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Follow `reshape`, also with the dims in another order; see `reshaped`."""
    state, old, order = states[0], eqn.invars[0].aval.shape, eqn.params.get("dimensions")
    if order is not None:
        state, old = moved(state, np.argsort(order).tolist()), [old[dim] for dim in order]
    return reshaped(state, old, eqn.outvars[0].aval.shape, context.count)


def transpose(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Follow `transpose`."""
    return moved(states[0], np.argsort(eqn.params["permutation"]).tolist())


def without(dims: Sequence[int], ndim: int) -> list[int | None]:
    """Return the new index of each dim if the dims in `dims` are removed; None for a removed dim."""
    gone = {int(dim) for dim in dims}
    return [None if dim in gone else dim - sum(other < dim for other in gone) for dim in range(ndim)]


def reduction(eqn: Any, states: Sequence[State], context: Context) -> State | list[State]:
    """Follow a reduction. The result of a sum over the followed dim does not have it. An index along it is unknown."""
    name, results = eqn.primitive.name, len(eqn.outvars)
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    state = together(states[: len(states) // 2] if name == "reduce" else states)
    state = _off(axes, state) if name in ("argmax", "argmin") else state
    return [moved(state, without(axes, len(eqn.invars[0].aval.shape)))] * results


def along(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Follow a sort, a running sum or a reversal along one dim. The result is unknown if this is the followed dim."""
    params = eqn.params
    dims = params.get("dimensions", (params.get("axis", params.get("dimension")),))
    return [_ragged(_off(dims, together(states)), dims)] * len(eqn.outvars)


def _off(dims: Sequence[int], state: State) -> State:
    """Return the state, or unknown if the followed dim is in one of `dims`."""
    return UNKNOWN if state is None or any(state.along(int(dim)) for dim in dims) else state


def _ragged(state: State, dims: Sequence[int]) -> State:
    """Return the state of a value that is not uniform along some dims."""
    return state if state is None else Places(state.places, state.uniform.difference(map(int, dims)))


def concatenate(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Follow `concatenate`. Along the followed dim, all operands must have the same size and place."""
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
    """Follow `pad`. Along the followed dim, only whole blocks of entries may be added."""
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
    """Follow a slice, which may cut the followed dim only into whole blocks of entries. An unknown start is None."""
    for place in () if state is None else state.places:
        dim = place.dim
        if old[dim] == new[dim]:
            continue
        block, start = old[dim] // place.outer, starts[dim]
        if start is None or start % block or new[dim] % block:
            return UNKNOWN
        assert state is not None
        state = _replaced(state, place, new[dim] // block)
    return state


def _replaced(state: Places, place: Place, outer: int) -> Places:
    return Places(state.places - {place} | {Place(place.dim, outer, joined=outer > 1)}, state.uniform)


def _of_arrays(eqn: Any, states: Sequence[State]) -> State:
    """Combine the states of the operands that are not scalars."""
    return together([s for s, atom in zip(states, eqn.invars, strict=True) if atom.aval.shape] or [NOWHERE])


def window(eqn: Any, states: Sequence[State], context: Context) -> State | list[State]:
    """Follow a sliding window. The result is unknown if the window's size along the followed dim is not 1."""
    slid = [dim for dim, size in enumerate(eqn.params["window_dimensions"]) if size != 1]
    state = _off(slid, _of_arrays(eqn, states))
    return [state if state is None else Places(state.places)] * len(eqn.outvars)


def split(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Follow `split`, which makes a slice for each result."""
    axis, start, slices = int(eqn.params["axis"]), 0, []
    old = eqn.invars[0].aval.shape
    for size in eqn.params["sizes"]:
        new = (*old[:axis], size, *old[axis + 1 :])
        slices.append(cut(states[0], old, new, [start if dim == axis else 0 for dim in range(len(old))]))
        start += int(size)
    return slices


def stack(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Follow `stack`, which joins its operands along a new dim."""
    axis, ndim = int(eqn.params["axis"]), len(eqn.invars[0].aval.shape)
    return moved(together(states), [dim + (dim >= axis) for dim in range(ndim)])


def unstack(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Follow `unstack`, which slices the operand along one dim. The result is unknown if this is the followed dim."""
    axes, ndim = (eqn.params["axis"],), len(eqn.invars[0].aval.shape)
    return [moved(_off(axes, states[0]), without(axes, ndim))] * len(eqn.outvars)


def tile(eqn: Any, states: Sequence[State], context: Context) -> State:
    """Follow `tile`. The result is unknown if the followed dim is repeated."""
    repeated = [dim for dim, times in enumerate(eqn.params["reps"]) if times != 1]
    adds_dims = len(eqn.params["reps"]) != len(eqn.invars[0].aval.shape)
    return UNKNOWN if adds_dims else _ragged(_off(repeated, states[0]), repeated)


def top_k(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Follow `top_k` along its axis, which is the last one by default."""
    ndim = len(eqn.invars[0].aval.shape)
    axis = int(eqn.params.get("axis", eqn.params.get("reduction_dimension", ndim - 1))) % ndim
    return [_ragged(_off((axis,), states[0]), (axis,))] * len(eqn.outvars)


def batched(state: State, ndim: int) -> State:
    """Return the state of a result that keeps the operand's first `ndim` dims, and mixes elements of all other dims."""
    if state is None or any(place.dim >= ndim for place in state.places):
        return UNKNOWN
    return Places(state.places)


# For these primitives, the place of the result implies the place of an operand whose state has none.
IMPLIES = SAME_PLACE | {"broadcast_in_dim", "transpose", "squeeze", "reduce_sum"}


def implied(eqn: Any, state: Places, atom: Any, given: Places) -> Places:
    """Return the state of an operand, with the places that it must have because the result has places.

    The primitive of `eqn` is in `IMPLIES`. `state` is the state of its result. `given` is the state of the operand
    `atom`, and has no place.
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


RULES: dict[str, PlaceRule] = {
    **dict.fromkeys(SAME_PLACE, elementwise),
    **dict.fromkeys(_PASSED, lambda eqn, states, context: list(states)),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **dict.fromkeys(_ALONG, along),
    **dict.fromkeys(_LEADING, lambda eqn, states, context: batched(_of_arrays(eqn, states), _ndim(eqn.outvars[0]))),
    **dict.fromkeys(_WINDOWS, window),
    "broadcast_in_dim": broadcast,
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
