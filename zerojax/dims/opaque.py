"""Rules for equations that the other rules cannot look into, but that say where they divide their operands.

They are the fourth part of the table of rules, for a `Follower` that guesses. They prove nothing: the group sizes of a
`ragged_dot` depend on the order of the rows, and a user's sharding rule or declaration may be wrong.
"""

from collections.abc import Callable, Sequence
from typing import Any

from zerojax import jaxprs
from zerojax.dims.guess import divided_by, fits
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, Place, Places, State, at, one_per_dim
from zerojax.primitives import ROWS


def is_undivided(eqn: Any, states: Sequence[State], least: int) -> bool:
    """Return whether every device runs `eqn` on all rows, and an operand with rows has at least `least` elements."""
    sizes = (
        atom.aval.size for atom, state in zip(eqn.invars, states, strict=True) if state is not None and state.places
    )
    return jaxprs.facts(eqn).is_opaque and any(size >= least for size in sizes)


def declared(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Return the dim that `zerojax.rows` declares. A declaration that cannot hold has no effect."""
    place = Place(eqn.params["dim"])
    return [at(place.dim) if fits(place, eqn.outvars[0].aval.shape, context.count) else states[0]]


def by_sharding_rule(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    rule = eqn.params.get("sharding_rule")
    mappings = getattr(rule, "operand_mappings", None)
    known = [state for state in states if state is not None]
    if rule is None or mappings is None or len(known) < len(states):
        return [UNKNOWN] * len(eqn.outvars)
    # A mapping has one name of a factor per dim. A dim of several factors has a list, which begins with the major one.
    major = lambda factors: factors if isinstance(factors, str) else next(iter(factors), None)
    names = {
        major(mapping[place.dim])
        for state, mapping in zip(known, mappings, strict=True)
        for place in state.places
        if place.outer == 1 and place.dim < len(mapping)
    }
    if not names and any(state.places for state in known):
        return [UNKNOWN] * len(eqn.outvars)
    found = [
        Places(frozenset(Place(dim) for dim, factors in enumerate(mapping) if major(factors) in names))
        for mapping in rule.result_mappings
    ]
    fit = lambda state, var: all(fits(place, var.aval.shape, context.count) for place in state.places)
    return [state if fit(state, var) else UNKNOWN for state, var in zip(found, eqn.outvars, strict=True)]


def specified(specs: Sequence[Any], states: Sequence[State], context: Context) -> list[State]:
    """Return the dims of the results of a `shard_map` that its `out_specs` divide over the data axes.

    A result that no data axis divides is a sum over the workers, or is the same on all of them: its dims are unknown.
    """
    if all(state is not None and not state.places for state in states):
        return [NOWHERE] * len(specs)
    found = [divided_by(spec, context.axes) for spec in specs]
    return [at(dims[0]) if dims else UNKNOWN for dims in found]


def ragged_dot(eqn: Any, states: Sequence[State], context: Context) -> list[State]:
    """Find the followed dim in a `ragged_dot_general`. The ragged dim of the operands may hold the rows of all groups.

    The group sizes are counts over all rows, whatever their own state.
    """
    lhs, rhs = states[:2]
    if lhs is None or rhs is None:
        return [UNKNOWN]
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    if not lhs.places and not rhs.places:
        return [NOWHERE]
    # A ragged dim that is contracted becomes the groups, the first dim of the result.
    first = int(not set(numbers.lhs_ragged_dimensions).isdisjoint(contracted[0]))
    batches = [(lhs, dim, i) for i, dim in enumerate(batch[0])] + [(rhs, dim, i) for i, dim in enumerate(batch[1])]
    found = {place.to(first + i) for state, dim, i in batches if (place := state.along(int(dim)))}
    at_dim = first + len(batch[0])
    for n, state in ((0, lhs), (1, rhs)):
        skipped = {*map(int, contracted[n]), *map(int, batch[n]), *(groups if n else ())}
        for dim in range(len(eqn.invars[n].aval.shape)):
            if dim in skipped:
                continue
            if (place := state.along(dim)) is not None:
                found.add(place.to(at_dim))
            at_dim += 1
    return [one_per_dim(found)]


RULES: dict[str, Callable[[Any, Sequence[State], Context], list[State]]] = {
    ROWS: declared,
    "custom_partitioning": by_sharding_rule,
    "ragged_dot_general": ragged_dot,
}
