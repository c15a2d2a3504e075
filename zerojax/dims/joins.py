"""Rules for primitives that cut and join arrays, at indices known statically. They are a part of the table of rules."""

from collections.abc import Sequence
from typing import Any

from zerojax.dims.moves import PlaceRule, without
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, moved, off, ragged, together, uncounted
from zerojax.primitives import ROWS


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


RULES: dict[str, PlaceRule] = {
    "concatenate": concatenate,
    "pad": pad,
    ROWS: lambda eqn, states, context: list(states),  # where `guess` does not believe what it declares
    "slice": slice_,
    "split": split,
    "stack": stack,
    "tile": tile,
    "unstack": unstack,
}
