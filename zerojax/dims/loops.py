"""Follow the dim through loops and branches, with the `Follower` that met them."""

from collections.abc import Callable, Sequence
from typing import Any

from zerojax import compat
from zerojax.dims.place import UNKNOWN, Places, State

_ROUNDS = 4  # A loop's body is analysed until the states of its carry no longer change, but at most this often.


def through(follower: Any, eqn: Any, states: Sequence[State]) -> list[State]:
    """Return the states of the results of a loop or a conditional, given those of its operands."""
    if (loop := compat.loop_of(eqn)) is not None:
        return _through_scan(follower, loop, states)
    return (_through_while if eqn.primitive.name == "while" else _through_cond)(follower, eqn, states)


def into_loop(follower: Any, loop: compat.LoopEqn, states: Sequence[State]) -> list[State]:
    """Return the states of the body's constants, carry and slices, given the states of the loop's operands."""
    body, sliced = compat.opened(loop.body)[0], loop.consts + loop.carry
    consts, rows = states[: loop.consts], [unstacked(state) for state in states[sliced:]]
    carry = _carried(
        follower, states[loop.consts : sliced], lambda carry: follower.results(body, [*consts, *carry, *rows])
    )
    return [*consts, *(carry or [UNKNOWN] * loop.carry), *rows]


def _carried(
    follower: Any, carry: Sequence[State], body: Callable[[Sequence[State]], Sequence[State]]
) -> list[State] | None:
    """Return the states of a loop's carry that hold in every iteration, or None if `_ROUNDS` rounds find none."""
    carry = list(carry)
    for _ in range(_ROUNDS):
        again = [
            _joined(*pair, guesses=follower.guesses) for pair in zip(carry, body(carry), strict=False)
        ]  # A scan also returns rows.
        if again == carry:
            return carry
        carry = again
    return None


def _joined(a: State, b: State, *, guesses: bool) -> State:
    """Join the states that one value has in two branches, or before a loop and after an iteration of the loop.

    A guess prefers known places to an unknown state.
    """
    if a == b:
        return a
    if a is None or b is None:
        known = next((state for state in (a, b) if state is not None and state.places), UNKNOWN)
        return known if guesses else UNKNOWN
    if a.places and b.places and a.places != b.places:
        return UNKNOWN
    return Places(a.places or b.places, a.uniform & b.uniform)


def _through_scan(follower: Any, loop: compat.LoopEqn, states: Sequence[State]) -> list[State]:
    inside = into_loop(follower, loop, states)
    outs = follower.results(compat.opened(loop.body)[0], inside)
    return [*inside[loop.consts : loop.consts + loop.carry], *map(stacked, outs[loop.carry :])]


def _through_while(follower: Any, eqn: Any, states: Sequence[State]) -> list[State]:
    """Return the states of a while loop's results. They are unknown if the rows decide the number of iterations."""
    first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body, test = compat.opened(eqn.params["body_jaxpr"])[0], compat.opened(eqn.params["cond_jaxpr"])[0]
    of_body, carry = states[first : first + consts], states[first + consts :]
    lasting = _carried(follower, carry, lambda carry: follower.results(body, [*of_body, *carry]))
    (stop,) = [UNKNOWN] if lasting is None else follower.results(test, [*states[:first], *lasting])
    return lasting if lasting is not None and stop is not None and not stop.places else [UNKNOWN] * len(carry)


def _through_cond(follower: Any, eqn: Any, states: Sequence[State]) -> list[State]:
    found = [follower.results(compat.opened(branch)[0], states[1:]) for branch in eqn.params["branches"]]
    outs = found[0]
    for other in found[1:]:
        outs = [_joined(*pair, guesses=follower.guesses) for pair in zip(outs, other, strict=True)]
    return outs if states[0] is not None and not states[0].places else [UNKNOWN] * len(outs)


def unstacked(state: State) -> State:
    """Return the state of `x[i]`, given the state of `x`. An iteration of a scan reads such a slice."""
    return UNKNOWN if state is None or state.along(0) is not None else _shifted(state, -1)


def stacked(state: State) -> State:
    """Return the state of a stack along a new dim 0, given the state of one row. A scan returns such stacks."""
    return UNKNOWN if state is None else _shifted(state, 1)


def _shifted(state: Places, by: int) -> Places:
    places = frozenset(place.to(place.dim + by) for place in state.places)
    counting = frozenset((part, dim + by) for part, dim in state.counting if dim + by >= 0)
    return Places(places, frozenset(dim + by for dim in state.uniform if dim + by >= 0), counting)
