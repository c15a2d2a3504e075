"""Find the `State` of each value in a jaxpr and its calls, loops and branches. A state says where the followed dim is.

In the engine and `comm.partial_sums`, the followed dim has the rows of a batch, and each trace has one `Follower`. In
`optim.dims`, the followed dim has the matrices of a stack.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.dims import indexing, moves, products
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, State, joined, stacked, unstacked

RULES = {**moves.RULES, **products.RULES, **indexing.RULES}
_ROUNDS = 4  # A loop's body is analysed until the states of its carry no longer change, but at most this often.


class Follower:
    """Finds the followed dim in the values of jaxprs. Each analysis makes one instance, which caches states of results.

    Attributes:
        count: The number of entries of the followed dim. It is the size of the dim or a divisor of the size, such as
            the number of devices over which the dim is divided.
    """

    def __init__(self, count: int):
        """Start with an empty cache."""
        self.count = count
        self._results: dict[Any, tuple[Any, list[State]]] = {}

    def states(self, jaxpr: Any, given: Sequence[State]) -> dict[Any, State]:
        """Return the state of every variable of an open jaxpr, given the states of its arguments."""
        found: dict[Any, State] = dict.fromkeys(compat.constvars_of(jaxpr), NOWHERE)
        found.update(zip(jaxpr.invars, given, strict=True))
        made: dict[Any, Any] = {}
        context = Context(self.count, made)
        for eqn in jaxpr.eqns:
            states = [NOWHERE if compat.is_literal(atom) else found[atom] for atom in eqn.invars]
            for var, state in zip(eqn.outvars, self.through(eqn, states, context), strict=True):
                found[var] = NOWHERE if state is None and _is_nowhere(var) else state
                made[var] = eqn
        return found

    def with_implied(self, jaxpr: Any, found: Mapping[Any, State]) -> dict[Any, State]:
        """Add places to values that have none, if they are combined element by element with values that have places.

        Examples are noise and learned positions with one entry per row. They do not depend on the batch, but their
        cotangents hold rows. `found` is the result of `states`.
        """
        implied = dict(found)
        for eqn in reversed(jaxpr.eqns):
            if compat.name_of(eqn) not in moves.IMPLIES:
                continue
            state = implied[eqn.outvars[0]]
            if state is None or not state.places:
                continue
            for atom in jaxprs.variables_in(eqn.invars):
                given = implied[atom]
                if given is not None and not given.places and atom.aval.shape:
                    implied[atom] = moves.implied(eqn, state, atom, given)
        return implied

    def results(self, jaxpr: Any, given: Sequence[State]) -> list[State]:
        """Return the states of a jaxpr's results; see `states`."""
        key = id(jaxpr), tuple(given)
        if key not in self._results:
            found = self.states(jaxpr, given)
            results = [NOWHERE if compat.is_literal(a) else found[a] for a in jaxpr.outvars]
            self._results[key] = jaxpr, results  # The jaxpr is kept, so that no other jaxpr gets its id.
        return self._results[key][1]

    def through(self, eqn: Any, states: Sequence[State], context: Context) -> Sequence[State]:
        """Return the states of the results of `eqn`, given the states of its operands."""
        name = compat.name_of(eqn)
        if (rule := RULES.get(name)) is not None:
            found = rule(eqn, states, context)
            return found if isinstance(found, list) else [found] * len(eqn.outvars)
        if (loop := compat.loop_of(eqn)) is not None:
            return self._through_loop(loop, states)
        if name == "while":
            return self._through_while(eqn, states)
        if name == "cond":
            return self._through_cond(eqn, states)
        if (body := compat.evaluated_body(eqn)) is not None:
            return self.results(body, states)
        return [NOWHERE if all(state is not None and not state.places for state in states) else UNKNOWN] * len(
            eqn.outvars
        )

    def into_loop(self, loop: compat.LoopEqn, states: Sequence[State]) -> list[State]:
        """Return the states of the body's constants, carry and slices, given the states of the loop's operands."""
        body, sliced = compat.opened(loop.body)[0], loop.consts + loop.carry
        consts, rows = states[: loop.consts], [unstacked(state) for state in states[sliced:]]
        carry = self._carried(states[loop.consts : sliced], lambda carry: self.results(body, [*consts, *carry, *rows]))
        return [*consts, *(carry or [UNKNOWN] * loop.carry), *rows]

    def _carried(
        self, carry: Sequence[State], body: Callable[[Sequence[State]], Sequence[State]]
    ) -> list[State] | None:
        """Return the states of a loop's carry that hold in every iteration, or None if `_ROUNDS` rounds find none."""
        carry = list(carry)
        for _ in range(_ROUNDS):
            again = [joined(*pair) for pair in zip(carry, body(carry), strict=False)]  # A scan also returns rows.
            if again == carry:
                return carry
            carry = again
        return None

    def _through_loop(self, loop: compat.LoopEqn, states: Sequence[State]) -> list[State]:
        inside = self.into_loop(loop, states)
        outs = self.results(compat.opened(loop.body)[0], inside)
        return [*inside[loop.consts : loop.consts + loop.carry], *map(stacked, outs[loop.carry :])]

    def _through_while(self, eqn: Any, states: Sequence[State]) -> list[State]:
        """Return the states of a while loop's results. They are unknown if the rows decide the number of iterations."""
        first, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, test = compat.opened(eqn.params["body_jaxpr"])[0], compat.opened(eqn.params["cond_jaxpr"])[0]
        of_body, carry = states[first : first + consts], states[first + consts :]
        lasting = self._carried(carry, lambda carry: self.results(body, [*of_body, *carry]))
        (stop,) = [UNKNOWN] if lasting is None else self.results(test, [*states[:first], *lasting])
        return lasting if lasting is not None and stop is not None and not stop.places else [UNKNOWN] * len(carry)

    def _through_cond(self, eqn: Any, states: Sequence[State]) -> list[State]:
        found = [self.results(compat.opened(branch)[0], states[1:]) for branch in eqn.params["branches"]]
        outs = found[0]
        for other in found[1:]:
            outs = [joined(*pair) for pair in zip(outs, other, strict=True)]
        return outs if states[0] is not None and not states[0].places else [UNKNOWN] * len(outs)


def _is_nowhere(var: Any) -> bool:
    """Return whether a value cannot have one entry per row, because it is a scalar or empty."""
    shape = getattr(var.aval, "shape", None)
    return shape == () or 0 in (shape or ())
